"""`Packed`: images that were decoded once and lie ready in one file, beside the index.

Rows are read by their place in the file. It is not mapped into memory: mapped pages count as the process's own, as many
as there are, and a disk that fails would end the process without a word.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram import storage
from engram.data.ahead import in_order
from engram.data.files import Files
from engram.data.index import place_of
from engram.data.lazy import Lazy, Pixels, filled
from engram.errors import DataError, EngramError, EngramWarning
from engram.progress import SILENT, Progress
from engram.text import printable

CHUNK = 256  # images decoded between two writes
SURE = 2**28  # bytes: after so many the disk is made to have them, and the record says so
GIGABYTE = 2**30


class Packed(Lazy):
    """The images that `Files` would give, for some of its rows, from the file `path`."""

    def __init__(self, files: Files, rows: Tensor, path: Path) -> None:
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


def pack(files: Files, rows: Tensor, limit: int, progress: Progress = SILENT) -> Lazy:
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


def _opened(files: Files, rows: Tensor, path: Path) -> Packed | None:
    """What is packed already. Nobody is waited for: a file that is open stays, though others make room for theirs."""
    try:
        packed = Packed(files, rows, path)
        os.utime(path)
    except FileNotFoundError:
        return None
    return packed


def _fingerprint(files: Files, rows: Tensor) -> str:
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


def _fill(files: Files, rows: Tensor, path: Path, length: int, progress: Progress) -> None:
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
        closing(in_order(files.__getitem__, rows[done:].split(CHUNK), workers=1, ahead=1)) as decoded,
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
