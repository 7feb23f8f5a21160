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
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from engram import storage
from engram.data.images import JPEG_END, Fit, UnreadableImage, check_side, decode, read_file
from engram.data.lazy import LazyImages, Pixels, fill, prefetch
from engram.data.scanning import ImageIndex, folder_cache
from engram.errors import DataError, EngramError, EngramWarning, UsageError, unknown
from engram.progress import SILENT, Progress
from engram.text import printable

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


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How the files of a data set become images. None leaves it to the data set."""

    size: int | None = None  # pixels per side of the square images
    fit: Fit | None = None  # how an image becomes a square
    class_list: Path | None = None  # a file with the names of the classes to load, one per line
    cache: int | None = None  # bytes that decoded images may take on disk; None: no cache
    workers: int | None = None  # threads that read and decode; None: as many as torch may use

    def __post_init__(self) -> None:
        if self.size is not None:
            check_side(self.size)
        if self.fit is not None and self.fit not in get_args(Fit):
            raise unknown("fit", self.fit, get_args(Fit))
        for name in ("cache", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1; found {value}.")
        if self.class_list is not None:
            object.__setattr__(self, "class_list", Path(self.class_list))

    def to_json(self) -> dict[str, Any]:
        """The options that determine the images, as plain values; None is left out."""
        name = self.class_list and printable(self.class_list.name)
        options = {"image_size": self.size, "fit": self.fit, "class_list": name}
        return {name: value for name, value in options.items() if value is not None}


class _Problem(NamedTuple):
    row: int
    reason: str
    consequence: str


class ImageFiles(LazyImages):
    """Images (N, size, size, 3) of all files of an index."""

    def __init__(self, index: ImageIndex, size: int, fit: Fit, workers: int | None = None) -> None:
        self.index, self.size, self.fit, self.workers = index, size, fit, workers
        self.shape = (len(index), size, size, 3)
        self.problems: dict[int, str] = {}  # found so far, by row
        self._lock = threading.Lock()

    def __getitem__(self, rows: Tensor) -> Tensor:
        wanted, problems = rows.tolist(), []

        def write(number: int, pixels: Pixels) -> None:
            if problem := self._decode(wanted[number], pixels):
                problems.append(problem)

        images = fill(len(wanted), self.shape[1:], write, self.workers)
        if problems:
            self._report(sorted(problems), len(wanted))
        return images

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        yield f"decoded by {DECODER} to {self.size}, {self.fit}".encode()
        yield from self.index.identity(rows)

    def _decode(self, row: int, pixels: Pixels) -> _Problem | None:
        """Write the image of a row; return what is wrong with its file."""
        try:
            content = read_file(self.index.path(row))
        except UnreadableImage as error:
            pixels[:] = GREY
            return _Problem(row, str(error), REPLACED)
        try:
            pixels[:] = decode(content, size=self.size, fit=self.fit).numpy()
        except UnreadableImage as error:
            try:
                pixels[:] = decode(content + JPEG_END, size=self.size, fit=self.fit).numpy()
                return _Problem(row, str(error), PARTLY)
            except UnreadableImage:
                pixels[:] = GREY
                return _Problem(row, str(error), REPLACED)
        before = int(self.index.sizes[row])
        if len(content) == before:
            return None
        self.index.drop()
        return _Problem(row, f"It had {before:,} bytes when the folder was scanned, now {len(content):,}.", CHANGED)

    def _report(self, problems: list[_Problem], requested: int) -> None:
        """Warn of files that were not warned of before; too many that cannot be read at all are an error."""
        unreadable = [problem for problem in problems if problem.consequence == REPLACED]
        if len(unreadable) > max(TOLERATED, requested // 10):
            first = unreadable[0]
            raise DataError(
                f"Of {requested:,} files, {len(unreadable):,} cannot be read. {printable(self.index.path(first.row))}: "
                f"{first.reason} Check that {printable(self.index.root)} is mounted and complete."
            )
        with self._lock:
            room = MAX_WARNINGS - len(self.problems)
            new = {
                row: f"{printable(self.index.path(row))}: {reason} {consequence}"
                for row, reason, consequence in problems
                if row not in self.problems
            }
            self.problems |= new
        for message in list(new.values())[: max(room, 0)]:
            warnings.warn(message, EngramWarning, stacklevel=2)
        if 0 <= room < len(new):
            more = f"More files in {printable(self.index.root)} have such problems; they are not named."
            warnings.warn(more, EngramWarning, stacklevel=2)


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
        self.file = path.open("rb", buffering=0)
        self.problems: list[str] = storage.read_json(_record(path))["problems"]

    def __getitem__(self, rows: Tensor) -> Tensor:
        positions, length = self.positions[rows].tolist(), math.prod(self.shape[1:])

        def write(number: int, pixels: Pixels) -> None:
            if os.preadv(self.file.fileno(), [pixels.data], positions[number] * length) != length:
                raise DataError(f"{printable(self.path)} is truncated. Delete it; it is rebuilt when needed.")

        return fill(len(positions), self.shape[1:], write, self.files.workers)

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        """That of the files: a run may continue with or without the cache."""
        return self.files.identity(rows)


def cache_images(files: ImageFiles, rows: Tensor, limit: int, progress: Progress = SILENT) -> LazyImages:
    """The images of these rows from a cache file, which is written first if needed; `files` where that is impossible.

    `limit` is in bytes, for all cache files of one folder: the least recently used are deleted first. A process that
    was killed while it wrote is continued.
    """
    length = math.prod(files.shape[1:])
    folder = folder_cache(files.index.root)
    path = folder / f"images-{_fingerprint(files, rows)}"
    try:
        if len(rows) * length > limit:
            raise EngramError(f"--cache allows {limit / GIGABYTE:,.2f} GB.")
        storage.make_folder(folder)
        cached = _open(files, rows, path)
        if cached is None:
            with storage.waiting(folder / ".writing"):
                if not (path.exists() and _record(path).exists()):  # another process may have written it meanwhile
                    _make_room(folder, path, limit - len(rows) * length)
                    _write(files, rows, path, length, progress)
                cached = _open(files, rows, path)
                assert cached is not None
    except DataError:  # about the images: it would only be raised later
        raise
    except (EngramError, OSError) as error:
        what = f"{len(rows):,} images need {len(rows) * length / GIGABYTE:,.2f} GB and are not cached"
        warnings.warn(f"{what}: {error} They are decoded when they are used.", EngramWarning, stacklevel=2)
        return files
    if cached.problems:
        what = f"{len(cached.problems):,} of the cached images are of damaged, changed or missing files. The first:"
        warnings.warn(f"{what} {cached.problems[0]}", EngramWarning, stacklevel=2)
    return cached


def _open(files: ImageFiles, rows: Tensor, path: Path) -> CachedImages | None:
    """A complete cache file. No lock is needed: an open file stays readable when another process deletes it."""
    try:
        cached = CachedImages(files, rows, path)
        os.utime(path)
    except FileNotFoundError:
        return None
    return cached


def _fingerprint(files: ImageFiles, rows: Tensor) -> str:
    """Identifies the files by their modification times too: in some formats the size never changes."""
    digest = hashlib.sha256(files.index.times[rows].numpy().tobytes())
    for part in files.identity(rows):
        digest.update(part)
    return digest.hexdigest()[:24]


def _record(path: Path) -> Path:
    """The file that says how many images are safely on disk, and what was wrong with their files."""
    return path.with_name(f"{path.name.removesuffix('.part')}.json")


def _make_room(folder: Path, path: Path, room: int) -> None:
    """Delete the least recently used cache files until the others take at most `room` bytes."""
    others = [other for other in folder.glob("images-*") if not other.name.startswith(path.name)]
    for other in sorted(others, key=lambda other: other.stat().st_mtime, reverse=True):
        if other.suffix != ".json":
            room -= other.stat().st_size
            if room < 0:
                other.unlink()
                _record(other).unlink(missing_ok=True)


def _write(files: ImageFiles, rows: Tensor, path: Path, length: int, progress: Progress) -> None:
    """Write the images that are not there yet, then give the file its name."""
    part, record = path.with_name(f"{path.name}.part"), _record(path)
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
