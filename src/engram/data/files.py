"""`Files`: the pictures of an index as images, each decoded when it is asked for.

A run of days must not end because of one file. Of a JPEG that is cut short, what there is of it is used; a grey image
stands in for what cannot be decoded at all. Each such file is named in a warning, once.
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
from engram.data.images import JPEG_END, Fit, UnreadableImage, check_side, content_of, decode
from engram.data.lazy import LazyImages, Pixels, filled, prefetch
from engram.data.scanning import ImageIndex, place_of
from engram.errors import DataError, EngramError, EngramWarning, UsageError, unknown
from engram.progress import SILENT, Progress
from engram.text import printable


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What may be asked of a data set of files. None leaves it to the data set."""

    size: int | None = None  # pixels a side of the squares that pictures become
    fit: Fit | None = None  # how they become squares
    class_list: Path | None = None  # a file that names the classes to take, one a line
    cache: int | None = None  # bytes that decoded images may take on disk, to be read instead of the files; None: none
    workers: int | None = None  # threads that read and decode; None: as many as torch may use

    def __post_init__(self) -> None:
        if self.size is not None:
            check_side(self.size)
        if self.fit is not None and self.fit not in get_args(Fit):
            raise unknown("fit", self.fit, get_args(Fit))
        if self.cache is not None and self.cache < 1:
            raise UsageError(f"A cache has at least one byte; found {self.cache}.")
        if self.class_list is not None:
            object.__setattr__(self, "class_list", Path(self.class_list))
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"At least one worker must read the files; found {self.workers}.")

    def told(self) -> dict[str, Any]:
        """What was asked of the images themselves, as plain values for the record."""
        told = {
            "image_size": self.size,
            "fit": self.fit,
            "class_list": self.class_list and printable(self.class_list.name),
        }
        return {name: value for name, value in told.items() if value is not None}

    @property
    def asked(self) -> bool:
        """Whether anything is asked for at all."""
        return self != DecodeOptions()


DECODING = 1  # to be counted up when the same file gives another image than before
GREY = 128
NAMED = 20  # files that warnings name
FEW = 10  # unreadable files among those asked for at once, or a tenth of them: with more, the disk or the data is wrong

PARTLY = "What there is of it is used."
NOT_AT_ALL = "A grey image stands in for it."
CHANGED = "What it holds now is used, and the next run will see other data."


class _Problem(NamedTuple):
    row: int
    reason: str
    consequence: str


class ImageFiles(LazyImages):
    """Images (N, size, size, 3) of all pictures of an index."""

    def __init__(self, index: ImageIndex, size: int, fit: Fit, workers: int | None = None) -> None:
        self.index, self.size, self.fit, self.workers = index, size, fit, workers
        self.shape = (len(index), size, size, 3)
        self.problems: dict[int, str] = {}  # what was found wrong so far, by row
        self._telling = threading.Lock()

    def __getitem__(self, rows: Tensor) -> Tensor:
        asked, found = rows.tolist(), []

        def make(number: int, pixels: Pixels) -> None:
            if problem := self._decode(asked[number], pixels):
                found.append(problem)

        images = filled(len(asked), self.shape[1:], make, self.workers)
        if found:
            self._tell(sorted(found), len(asked))
        return images

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        yield f"decoded by {DECODING} to {self.size}, {self.fit}".encode()
        yield from self.index.identity(rows)

    def _decode(self, row: int, pixels: Pixels) -> _Problem | None:
        """Write the image of a row; what was wrong with its file, if anything."""
        try:
            content = content_of(self.index.path(row))
        except UnreadableImage as error:
            pixels[:] = GREY
            return _Problem(row, str(error), NOT_AT_ALL)
        try:
            pixels[:] = decode(content, size=self.size, fit=self.fit).numpy()
        except UnreadableImage as error:
            try:
                pixels[:] = decode(content + JPEG_END, size=self.size, fit=self.fit).numpy()
                return _Problem(row, str(error), PARTLY)
            except UnreadableImage:
                pixels[:] = GREY
                return _Problem(row, str(error), NOT_AT_ALL)
        before = int(self.index.sizes[row])
        if len(content) == before:
            return None
        self.index.drop()
        return _Problem(row, f"It had {before:,} bytes when it was found, and has {len(content):,} now.", CHANGED)

    def _tell(self, found: list[_Problem], asked: int) -> None:
        """Warn of files that were not warned of before. Where too many cannot be read at all, it is no accident."""
        unreadable = [problem for problem in found if problem.consequence == NOT_AT_ALL]
        if len(unreadable) > max(FEW, asked // 10):
            first = unreadable[0]
            raise DataError(
                f"Of {asked:,} files, {len(unreadable):,} cannot be read. {printable(self.index.path(first.row))}: "
                f"{first.reason} See whether {printable(self.index.root)} is there, and whole."
            )
        with self._telling:
            new = [problem for problem in found if problem.row not in self.problems]
            room = max(NAMED - len(self.problems), -1)
            sentences = [
                f"{printable(self.index.path(row))}: {reason} {consequence}" for row, reason, consequence in new
            ]
            self.problems |= {problem.row: sentence for problem, sentence in zip(new, sentences, strict=True)}
        for sentence in sentences[: max(room, 0)]:
            warnings.warn(sentence, EngramWarning, stacklevel=2)
        if 0 <= room < len(new):
            warnings.warn(f"More files in {printable(self.index.root)} are like these.", EngramWarning, stacklevel=2)


CHUNK = 256  # images decoded between two writes
SURE = 2**28  # bytes: after so many the disk is made to have them, and the record says so
GIGABYTE = 2**30


class CachedImages(LazyImages):
    """The images that `Files` would give, for some of its rows, from the file `path`."""

    def __init__(self, files: ImageFiles, rows: Tensor, path: Path) -> None:
        self.files, self.path = files, path
        self.shape = files.shape
        self.places = torch.full((len(files.index),), -1)
        self.places[rows] = torch.arange(len(rows))
        self.file = path.open("rb", buffering=0)
        self.problems: list[str] = storage.read_json(_record(path))["problems"]

    def __getitem__(self, rows: Tensor) -> Tensor:
        places, length = self.places[rows].tolist(), math.prod(self.shape[1:])

        def make(number: int, pixels: Pixels) -> None:
            if os.preadv(self.file.fileno(), [pixels.data], places[number] * length) != length:
                raise DataError(f"{printable(self.path)} is cut short. Remove it: it is made anew the next time.")

        return filled(len(places), self.shape[1:], make, self.files.workers)

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        """As of the files: a run that began with these may go on with those."""
        return self.files.identity(rows)


def pack(files: ImageFiles, rows: Tensor, limit: int, progress: Progress = SILENT) -> LazyImages:
    """The images of these rows from a file, made now if it is not there; `files` where that takes too many bytes.

    `limit` is for all that is packed of one folder: what was not used for longest gives way. Whoever is killed while
    packing goes on from there.
    """
    length = math.prod(files.shape[1:])
    folder = place_of(files.index.root)
    path = folder / f"packed-{_fingerprint(files, rows)}"
    try:
        if len(rows) * length > limit:
            raise EngramError(f"--cache allows {limit / GIGABYTE:,.2f} GB.")
        storage.make_folder(folder)
        packed = _opened(files, rows, path)
        if packed is None:
            with storage.waiting(folder / ".packing"):
                if not (path.exists() and _record(path).exists()):  # nor made while others packed
                    _make_room(folder, path, limit - len(rows) * length)
                    _fill(files, rows, path, length, progress)
                packed = _opened(files, rows, path)
                assert packed is not None
    except DataError:  # of the pictures: it would only come later
        raise
    except (EngramError, OSError) as error:
        what = f"{len(rows):,} images take {len(rows) * length / GIGABYTE:,.2f} GB, and are not packed"
        warnings.warn(f"{what}: {error} They are decoded when they are used.", EngramWarning, stacklevel=2)
        return files
    if problems := packed.problems:
        what = f"{len(problems):,} of the packed images are of files that are not whole, or are no more. One of them:"
        warnings.warn(f"{what} {problems[0]}", EngramWarning, stacklevel=2)
    return packed


def _opened(files: ImageFiles, rows: Tensor, path: Path) -> CachedImages | None:
    """What is packed already. Nobody is waited for: a file that is open stays, though others make room for theirs."""
    try:
        packed = CachedImages(files, rows, path)
        os.utime(path)
    except FileNotFoundError:
        return None
    return packed


def _fingerprint(files: ImageFiles, rows: Tensor) -> str:
    """What is packed: these files as they were found, by their times of change too, for some sizes never change."""
    digest = hashlib.sha256(files.index.times[rows].numpy().tobytes())
    for part in files.identity(rows):
        digest.update(part)
    return digest.hexdigest()[:24]


def _record(path: Path) -> Path:
    """How many images are in a file for certain, and what was wrong with theirs."""
    return path.with_name(f"{path.name.removesuffix('.part')}.json")


def _make_room(folder: Path, path: Path, room: int) -> None:
    """Remove what was packed before, the least lately used first, until no more than `room` bytes of it are left."""
    others = [other for other in folder.glob("packed-*") if not other.name.startswith(path.name)]
    for other in sorted(others, key=lambda other: other.stat().st_mtime, reverse=True):
        if other.suffix != ".json":
            room -= other.stat().st_size
            if room < 0:
                other.unlink()
                _record(other).unlink(missing_ok=True)


def _fill(files: ImageFiles, rows: Tensor, path: Path, length: int, progress: Progress) -> None:
    """Write the images of the rows, beginning with those that are not there yet, and give the file its name."""
    part, record = path.with_name(f"{path.name}.part"), _record(path)
    begun = part.exists() and record.exists()
    before: dict[str, Any] = storage.read_json(record) if begun else {"images": 0, "problems": []}
    done = sure = int(before["images"])
    if (len(rows) - done) * length > (free := shutil.disk_usage(path.parent).free):
        raise EngramError(f"{path.parent} has {free / GIGABYTE:,.2f} GB free.")
    with (
        part.open("r+b" if done else "wb") as file,
        progress.phase("pack", len(rows)) as phase,
        closing(prefetch(files.__getitem__, rows[done:].split(CHUNK), workers=1, ahead=1)) as decoded,
    ):
        file.truncate(done * length)
        file.seek(done * length)
        phase.advance(done)
        for images in decoded:
            file.write(images.numpy().data)
            done += len(images)
            phase.advance(len(images))
            if (done - sure) * length >= SURE or done == len(rows):
                file.flush()
                os.fsync(file.fileno())
                sure = done
                problems = [*before["problems"], *files.problems.values()]
                storage.write_json(record, {"images": done, "problems": problems})
    os.replace(part, path)
    storage.sync(path.parent)
