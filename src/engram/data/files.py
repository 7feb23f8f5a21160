"""`ImageFiles`: the images of an index, decoded when they are used; `CachedImages`: the same, decoded once into a file.

One bad file must not end a run of days. What is left of a truncated JPEG is used, and a grey image replaces a file that
cannot be decoded at all. Each such file is named in a warning, once.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram import storage
from engram.data.images import JPEG_END, Fit, UnreadableImage, decode, read_file
from engram.data.samples import LazyImages, prefetch
from engram.data.scanning import ImageIndex, folder_cache
from engram.errors import DataError, EngramError, EngramWarning
from engram.progress import SILENT, Progress
from engram.text import printable

Pixels = npt.NDArray[np.uint8]

DECODER = 1  # increase it when the same file decodes to another image than before
GREY = 128
MAX_WARNINGS = 20  # files that warnings name
TOLERATED = 10  # unreadable files per request, or a tenth of it; more mean that the disk or the data is wrong
CHUNK = 256  # images decoded between two writes to the cache
SYNC = 2**28  # bytes written between two fsyncs
GIGABYTE = 2**30

PARTLY = "The part that can be read is used."
REPLACED = "A grey image replaces it."
CHANGED = "Its present content is used; the next run will see different data."


class ImageFiles(LazyImages):
    """Images (N, size, size, 3) of all files of an index."""

    def __init__(self, index: ImageIndex, size: int, fit: Fit, workers: int | None = None) -> None:
        self.index, self.size, self.fit, self.workers = index, size, fit, workers
        self.shape = (len(index), size, size, 3)
        self.problems: dict[int, str] = {}  # found so far, by row: the file, what is wrong with it, what is done
        self._lock = threading.Lock()

    def __getitem__(self, rows: Tensor) -> Tensor:
        wanted: list[int] = rows.tolist()
        problems: dict[int, str] = {}

        def write(number: int, pixels: Pixels) -> None:
            if problem := self._decode(wanted[number], pixels):
                problems[wanted[number]] = f"{printable(self.index.path(wanted[number]))}: {problem}"

        images = fill(len(wanted), self.shape[1:], write, self.workers)
        if problems:
            self._report(dict(sorted(problems.items())), len(wanted))
        return images

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        yield f"decoded by {DECODER} to {self.size}, {self.fit}".encode()
        yield from self.index.identity(rows)

    def _decode(self, row: int, pixels: Pixels) -> str | None:
        """Write the image of a row; return what is wrong with its file, and what is done about it."""
        content = b""
        try:
            content = read_file(self.index.path(row))
            pixels[:] = decode(content, size=self.size, fit=self.fit).numpy()
        except UnreadableImage as error:
            try:
                pixels[:] = decode(content + JPEG_END, size=self.size, fit=self.fit).numpy()
                return f"{error} {PARTLY}"
            except UnreadableImage:
                pixels[:] = GREY
                return f"{error} {REPLACED}"
        before = int(self.index.sizes[row])
        if len(content) == before:
            return None
        self.index.drop()
        return f"It had {before:,} bytes when the folder was scanned, now {len(content):,}. {CHANGED}"

    def _report(self, problems: dict[int, str], requested: int) -> None:
        """Warn of files that were not warned of before; too many that cannot be read at all are an error."""
        unreadable = [problem for problem in problems.values() if problem.endswith(REPLACED)]
        if len(unreadable) > max(TOLERATED, requested // 10):
            raise DataError(
                f"Of {requested:,} files, {len(unreadable):,} cannot be read. {unreadable[0].removesuffix(REPLACED)}"
                f"Check that {printable(self.index.root)} is mounted and complete."
            )
        with self._lock:
            room = MAX_WARNINGS - len(self.problems)
            new = [problem for row, problem in problems.items() if row not in self.problems]
            self.problems |= problems
        for message in new[: max(room, 0)]:
            warnings.warn(message, EngramWarning, stacklevel=2)
        if 0 <= room < len(new):
            more = f"More files in {printable(self.index.root)} have such problems; they are not named."
            warnings.warn(more, EngramWarning, stacklevel=2)


def fill(count: int, shape: tuple[int, ...], write: Callable[[int, Pixels], None], workers: int | None) -> Tensor:
    """Images (count, *shape), each written by `write(number, pixels)` in threads: decoders release the GIL.

    By default there are as many workers as torch may use threads, so that one setting limits both.
    """
    images = torch.empty((count, *shape), dtype=torch.uint8)
    pixels = images.numpy()  # numpy copies start no threads; torch's could, in every worker
    with ThreadPoolExecutor(workers or torch.get_num_threads(), "decode") as pool:
        list(pool.map(write, range(count), pixels))  # raises the first error; the rest is not started
    return images


class CachedImages(LazyImages):
    """The images of some rows of `ImageFiles`, from the file `path`.

    The file is read by position and not mapped into memory: mapped pages count as the process's own memory, and a disk
    error would kill the process with SIGBUS.
    """

    def __init__(self, files: ImageFiles, rows: Tensor, path: Path) -> None:
        self.files, self.path = files, path
        self.shape = files.shape
        self.positions = torch.full((len(files.index),), -1)
        self.positions[rows] = torch.arange(len(rows))
        self.file = path.open("rb", buffering=0)  # readable even when another process deletes it
        os.utime(path)  # the time of its last use
        self.problems: list[str] = storage.read_json(_record(path))["problems"]

    def __getitem__(self, rows: Tensor) -> Tensor:
        positions, length = self.positions[rows].tolist(), math.prod(self.shape[1:])

        def write(number: int, pixels: Pixels) -> None:
            if os.preadv(self.file.fileno(), [pixels.data], positions[number] * length) != length:
                raise DataError(f"{printable(self.path)} is truncated. Delete it; it is rebuilt when needed.")

        return fill(len(positions), self.shape[1:], write, self.files.workers)

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        return self.files.identity(rows)  # so that a run may continue with or without the cache


def cache_images(files: ImageFiles, rows: Tensor, limit: int, progress: Progress = SILENT) -> LazyImages:
    """The images of these rows from a cache file, which is written first if needed; `files` where that is impossible.

    `limit` is in bytes, for all cache files of one folder: the least recently used are deleted first. A process that
    was killed while it wrote is continued.
    """
    size = len(rows) * math.prod(files.shape[1:])
    # Modification times identify the files too: in some formats the size never changes.
    digest = hashlib.sha256(files.index.times[rows].numpy().tobytes())
    for part in files.identity(rows):
        digest.update(part)
    path = folder_cache(files.index.root) / f"images-{digest.hexdigest()[:24]}"
    try:
        if size > limit:
            raise EngramError(f"--cache allows {limit / GIGABYTE:,.2f} GB.")
        storage.make_folder(path.parent)
        try:
            cached = CachedImages(files, rows, path)
        except FileNotFoundError:
            with storage.waiting(path.parent / ".writing"):
                if not (path.exists() and _record(path).exists()):  # another process may have written it meanwhile
                    images = (each for each in path.parent.glob("images-*") if each.suffix != ".json")
                    others = (each for each in images if not each.name.startswith(path.name))
                    for evicted in storage.evict(others, limit - size):
                        _record(evicted).unlink(missing_ok=True)
                    _write(files, rows, path, progress)
                cached = CachedImages(files, rows, path)
    except DataError:  # about the images: it would only be raised later
        raise
    except (EngramError, OSError) as error:
        what = f"{len(rows):,} images need {size / GIGABYTE:,.2f} GB and are not cached"
        warnings.warn(f"{what}: {error} They are decoded when they are used.", EngramWarning, stacklevel=2)
        return files
    if cached.problems:
        what = f"{len(cached.problems):,} of the cached images are of damaged, changed or missing files. The first:"
        warnings.warn(f"{what} {cached.problems[0]}", EngramWarning, stacklevel=2)
    return cached


def _record(path: Path) -> Path:
    """The file that says how many images are safely on disk, and what was wrong with their files."""
    return path.with_name(f"{path.name.removesuffix('.part')}.json")


def _write(files: ImageFiles, rows: Tensor, path: Path, progress: Progress) -> None:
    """Write the images that are not there yet, then give the file its name."""
    part, record, length = path.with_name(f"{path.name}.part"), _record(path), math.prod(files.shape[1:])
    before: dict[str, Any] = {"images": 0, "problems": []}
    if part.exists() and record.exists():
        before = storage.read_json(record)
    done = synced = int(before["images"])
    if (len(rows) - done) * length > (free := shutil.disk_usage(path.parent).free):
        raise EngramError(f"{path.parent} has {free / GIGABYTE:,.2f} GB free.")
    with (
        part.open("r+b" if done else "wb") as file,
        progress.phase("cache", len(rows)) as phase,
        closing(prefetch(files.__getitem__, rows[done:].split(CHUNK), workers=1, ahead=1)) as decoded,
    ):
        file.truncate(done * length)
        file.seek(done * length)
        phase.advance(done)
        for images in decoded:
            file.write(images.numpy().data)
            done += len(images)
            phase.advance(len(images))
            if (done - synced) * length >= SYNC or done == len(rows):
                file.flush()
                os.fsync(file.fileno())
                synced = done
                problems = [*before["problems"], *files.problems.values()]
                storage.write_json(record, {"images": done, "problems": problems})
    os.replace(part, path)
    storage.sync(path.parent)
