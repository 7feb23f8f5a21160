"""`Index`: all pictures below a folder, by name and size. Made once, kept, and made anew when a folder has changed.

No picture is opened. A folder's time of change tells of files that were added, removed or renamed; a file whose content
was replaced in place is known by its size when it is read (`files.py`), and the index is then dropped. When each
picture itself had changed last is kept for those who keep its pixels (`packed.py`), and is no part of what it is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import AnyStr, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram import storage
from engram.data.download import cache_folder
from engram.errors import DataError, EngramError, EngramWarning
from engram.progress import SILENT, Progress
from engram.text import printable


@dataclass(frozen=True)
class SkippedFile:
    """A file or folder that is not among the pictures, and a sentence that says why."""

    path: Path
    reason: str

    def to_json(self) -> dict[str, str]:
        """As plain values."""
        return {"path": str(self.path), "reason": self.reason}

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"


# What is looked for in a folder. A picture's content decides how it is decoded, whatever its name.
EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".heic", ".heif", ".hif")

# What systems leave in folders of pictures, besides what begins with a dot; in small letters.
SYSTEM_NAMES = frozenset(
    {"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found", "system volume information"}
)

CIRCLE = "This link leads in a circle, back to a folder that it lies in."

_ENDINGS = tuple(os.fsencode(ending) for ending in EXTENSIONS)
_PASSED_OVER = frozenset(os.fsencode(name) for name in SYSTEM_NAMES)

Identity = tuple[int, int]  # of a folder: device and inode


def is_passed_over(entry: os.DirEntry[AnyStr]) -> bool:
    """Whether an entry is none of a person's: hidden, or left there by a system."""
    name = os.fsencode(entry.name)
    return name.startswith(b".") or name.lower() in _PASSED_OVER


def is_folder(entry: os.DirEntry[AnyStr]) -> bool:
    """Whether an entry is a folder that may be entered, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that may not be entered
        return False


def problem_of(entry: os.DirEntry[AnyStr]) -> str:
    """Why an entry that is no folder is no picture, by its name and kind alone; or nothing."""
    try:
        kind = entry.stat().st_mode
    except OSError:
        return "This link leads nowhere." if entry.is_symlink() else "It cannot be looked at."
    if not stat.S_ISREG(kind):
        return "It is not a file."
    if not os.fsencode(entry.name).lower().endswith(_ENDINGS):
        return f"Its name does not end like that of a picture: {', '.join(EXTENSIONS)}."
    return ""


def identity_of(found: os.stat_result) -> Identity:
    """What tells a folder from all others, however it is reached."""
    return found.st_dev, found.st_ino


SCHEMA = 2
THREADS = 8  # that list folders: on a disk far away most of the time is waiting
NAMED = 1_000  # files that are left out, before only their number is kept
SETTLED = 2_000_000_000  # nanoseconds: a folder that changed less before it was listed could change unnoticed

AT_A_TIME = 65_536  # names that are put together for a fingerprint


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Pictures below `root`, sorted by folder and name; none of them is opened."""

    root: Path
    place: Path  # where it is kept
    folders: tuple[bytes, ...]  # all of them, relative to the root, sorted
    changed: Tensor  # int64 (folders,): when each had changed last as it was listed, in ns; 0: too lately to tell
    folder_of: Tensor  # int32 (N,): which folder each picture is in
    names: bytes  # of all pictures, one after another
    ends: Tensor  # int64 (N + 1,): the name of picture i is names[ends[i] : ends[i + 1]]
    sizes: Tensor  # int64 (N,), bytes
    times: Tensor  # int64 (N,): when each picture had changed last as it was listed, in ns
    skipped: tuple[SkippedFile, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def tops(self) -> list[int]:
        """The numbers of the folders that lie in no other: of the parts that were scanned, or of the root."""
        return [number for number, folder in enumerate(self.folders) if b"/" not in folder] if self.folders[0] else [0]

    def relative(self, row: int) -> bytes:
        """The path of a picture, relative to the root."""
        begin, end = self.ends[row : row + 2].tolist()
        return os.path.join(self.folders[int(self.folder_of[row])], self.names[begin:end])

    def path(self, row: int) -> Path:
        """The path of a picture."""
        return self.root / os.fsdecode(self.relative(row))

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        """Names and sizes of these pictures: the same wherever the folder lies."""
        for some in rows.split(AT_A_TIME):
            begins, ends = self.ends[some].tolist(), self.ends[some + 1].tolist()
            folders = self.folder_of[some].tolist()
            named = zip(folders, begins, ends, strict=True)
            yield b"\0".join(b"%b/%b" % (self.folders[each], self.names[begin:end]) for each, begin, end in named)
            yield self.sizes[some].numpy().tobytes()

    def drop(self) -> None:
        """Have the folder scanned anew the next time."""
        with suppress(OSError):  # there is none, or it is not ours to change: no reason to end a run
            self.place.unlink()


class _Listing(NamedTuple):
    folder: bytes
    changed: int
    inner: list[bytes]  # folders in it
    above: tuple[Identity, ...]  # the folders it lies in, and itself
    names: bytes
    lengths: Tensor
    sizes: Tensor
    times: Tensor
    skipped: list[tuple[bytes, str]]
    more: int  # that are left out besides


def open_index(root: Path, parts: Sequence[str], progress: Progress = SILENT) -> ImageIndex:
    """The index of these folders of `root`, or of all of it where none is named: as it was kept, or made now."""
    place = _place(root, parts)
    kept = _load(root, place)
    if kept is not None:
        return kept
    index = scan(root, parts, progress)
    _keep(index)
    return index


def place_of(root: Path) -> Path:
    """Where all that is kept about a folder of pictures is: in the user's cache, as the folder may be read-only."""
    known = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
    return cache_folder() / "folders" / known


def _place(root: Path, parts: Sequence[str]) -> Path:
    return place_of(root) / f"index-{'-'.join(parts) or 'all'}.safetensors"


# Scanning


def scan(root: Path, parts: Sequence[str], progress: Progress = SILENT, threads: int = THREADS) -> ImageIndex:
    """List these folders of `root`, or all of it where none is named, and all folders in them, several at a time."""
    begin, top = time.time_ns(), os.fsencode(root)
    listings: list[_Listing] = []
    done: SimpleQueue[Future[_Listing]] = SimpleQueue()
    with progress.phase("scan") as phase, ThreadPoolExecutor(threads, "scan") as pool:

        def begin_with(folder: bytes, above: tuple[Identity, ...]) -> None:
            pool.submit(_list, top, folder, above).add_done_callback(done.put)

        waiting = [os.fsencode(part) for part in parts] or [b""]
        for folder in waiting:
            begin_with(folder, ())
        under_way = len(waiting)
        try:
            while under_way:
                listing = done.get().result()
                under_way += len(listing.inner) - 1
                for folder in listing.inner:
                    begin_with(os.path.join(listing.folder, folder), listing.above)
                listings.append(listing)
                phase.advance(len(listing.sizes))
        finally:
            pool.shutdown(cancel_futures=True)
    return _put_together(root, _place(root, parts), sorted(listings, key=lambda listing: listing.folder), begin)


def _list(root: bytes, folder: bytes, above: tuple[Identity, ...]) -> _Listing:
    """What lies in one folder. One that contains itself, by a link, is not entered again."""
    path = os.path.join(root, folder) if folder else root
    pictures: list[tuple[bytes, int, int]] = []
    inner: list[bytes] = []
    skipped: list[tuple[bytes, str]] = []
    try:
        itself = os.stat(path)
        identity = identity_of(itself)
        if identity in above:
            none = torch.empty(0)
            return _Listing(folder, itself.st_mtime_ns, [], above, b"", none, none, none, [(folder, CIRCLE)], 0)
        with os.scandir(path) as entries:
            for entry in entries:
                if is_passed_over(entry):
                    continue
                if is_folder(entry):
                    inner.append(entry.name)
                elif problem := problem_of(entry):
                    skipped.append((os.path.join(folder, entry.name), problem))
                else:
                    found = entry.stat()
                    pictures.append((entry.name, found.st_size, found.st_mtime_ns))
    except OSError as error:
        raise DataError(f"The folder {printable(os.fsdecode(path))} cannot be read: {error.strerror}.") from error
    pictures.sort()
    skipped.sort()
    return _Listing(
        folder,
        itself.st_mtime_ns,
        inner,
        (*above, identity),
        b"".join(name for name, _, _ in pictures),
        torch.tensor([len(name) for name, _, _ in pictures], dtype=torch.int64),
        torch.tensor([size for _, size, _ in pictures], dtype=torch.int64),
        torch.tensor([changed for _, _, changed in pictures], dtype=torch.int64),
        skipped[:NAMED],
        len(skipped[NAMED:]),
    )


def _put_together(root: Path, place: Path, listings: list[_Listing], begin: int) -> ImageIndex:
    counts = torch.tensor([len(listing.sizes) for listing in listings])
    lengths = torch.cat([torch.zeros(1, dtype=torch.int64), *(listing.lengths.long() for listing in listings)])
    changed = [listing.changed if listing.changed < begin - SETTLED else 0 for listing in listings]
    skipped = [SkippedFile(root / os.fsdecode(path), why) for listing in listings for path, why in listing.skipped]
    more = sum(listing.more for listing in listings) + len(skipped[NAMED:])
    if more:
        skipped[NAMED:] = [SkippedFile(root, f"{more:,} more of its files are left out, for such reasons.")]
    return ImageIndex(
        root,
        place,
        tuple(listing.folder for listing in listings),
        torch.tensor(changed, dtype=torch.int64),
        torch.arange(len(listings), dtype=torch.int32).repeat_interleave(counts),
        b"".join(listing.names for listing in listings),
        lengths.cumsum(0),
        torch.cat([listing.sizes.long() for listing in listings]),
        torch.cat([listing.times.long() for listing in listings]),
        tuple(skipped),
    )


# Keeping


def _keep(index: ImageIndex) -> None:
    """Write the index, if that can be done: without it the next time takes longer, and nothing else."""
    folders = torch.tensor([0, *(len(folder) for folder in index.folders)]).cumsum(0)
    skipped = [(str(left.path.relative_to(index.root)), left.reason) for left in index.skipped]
    tensors = {
        "schema": torch.tensor([SCHEMA]),
        "folders": _as_tensor(b"".join(index.folders)),
        "folder_ends": folders,
        "changed": index.changed,
        "folder_of": index.folder_of,
        "names": _as_tensor(index.names),
        "ends": index.ends,
        "sizes": index.sizes,
        "times": index.times,
        "skipped": _as_tensor(json.dumps(skipped).encode()),
    }
    try:
        storage.make_folder(index.place.parent)
        storage.sweep_old(index.place.parent)
        storage.save_tensors(index.place, tensors)
    except (EngramError, OSError) as error:
        warnings.warn(f"What was found in {index.root} cannot be kept. {error}", EngramWarning, stacklevel=3)


def _load(root: Path, place: Path) -> ImageIndex | None:
    """The index that was kept, if no folder has changed since."""
    try:
        tensors = storage.load_tensors(place)
        if tensors["schema"].tolist() != [SCHEMA]:
            return None
        folders, ends = _as_bytes(tensors["folders"]), tensors["folder_ends"].tolist()
        index = ImageIndex(
            root,
            place,
            tuple(folders[begin:end] for begin, end in itertools.pairwise(ends)),
            tensors["changed"],
            tensors["folder_of"],
            _as_bytes(tensors["names"]),
            tensors["ends"],
            tensors["sizes"],
            tensors["times"],
            tuple(SkippedFile(root / path, reason) for path, reason in json.loads(_as_bytes(tensors["skipped"]))),
        )
        return index if _unchanged(index) else None
    except (DataError, LookupError, ValueError):  # there is none, or it is damaged
        return None


def _unchanged(index: ImageIndex) -> bool:
    top = os.fsencode(index.root)
    for folder, changed in zip(index.folders, index.changed.tolist(), strict=True):
        try:
            if os.stat(os.path.join(top, folder)).st_mtime_ns != changed:
                return False
        except OSError:
            return False
    return True


def _as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
