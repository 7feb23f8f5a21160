"""The image files below a folder: one walk, one rule for what is an image file, and an index that is cached on disk.

No image is opened. The modification time of a folder reveals files that were added, removed or renamed; a file that was
overwritten in place is noticed by its size when it is read (`files.py`), and the index is then dropped.
"""

from __future__ import annotations

import hashlib
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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram import storage
from engram.errors import DataError, EngramError, EngramWarning
from engram.progress import SILENT, Progress
from engram.text import printable

# Extensions of the files that a folder is searched for. The content decides how a file is decoded.
EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".heic", ".heif", ".hif")
SUFFIXES = tuple(map(os.fsencode, EXTENSIONS))
# Names, in lower case, that operating systems leave in folders; like hidden files, they are ignored without a report.
SYSTEM_NAMES = frozenset(
    {b"__macosx", b"thumbs.db", b"desktop.ini", b"@eadir", b"$recycle.bin", b"lost+found", b"system volume information"}
)

SCHEMA = 3
THREADS = 8  # that list folders; on a network disk nearly all of the time is waiting
MAX_SKIPPED = 1_000  # skipped files that are recorded; of the others only the number
SETTLED = 2_000_000_000  # ns: a folder that was modified within this time before the scan may change again unnoticed
CHUNK = 65_536  # names that are hashed at a time

Identity = tuple[int, int]  # of a folder: device and inode


@dataclass(frozen=True)
class SkippedFile:
    """A file or folder that is not among the images, and a sentence that says why."""

    path: Path
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"path": str(self.path), "reason": self.reason}

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """The image files below `root`, sorted by folder and name."""

    root: Path
    place: Path  # where the index is cached
    folders: tuple[bytes, ...]  # relative to the root, sorted; the root itself is b""
    changed: Tensor  # int64 (folders,): modification time, ns; 0: too recent to be trusted
    folder_of: Tensor  # int32 (N,): the folder of each file
    names: bytes  # all file names, concatenated
    ends: Tensor  # int64 (N + 1,): the name of file i is names[ends[i] : ends[i + 1]]
    sizes: Tensor  # int64 (N,), bytes
    times: Tensor  # int64 (N,): modification time, ns; not part of `identity`
    skipped: tuple[SkippedFile, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def relative(self, row: int) -> bytes:
        """The path of a file, relative to the root."""
        begin, end = self.ends[row : row + 2].tolist()
        return os.path.join(self.folders[int(self.folder_of[row])], self.names[begin:end])

    def path(self, row: int) -> Path:
        return self.root / os.fsdecode(self.relative(row))

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        """Names and sizes of these files: the same wherever the folder lies."""
        for some in rows.split(CHUNK):
            begins, ends = self.ends[some].tolist(), self.ends[some + 1].tolist()
            located = zip(self.folder_of[some].tolist(), begins, ends, strict=True)
            yield b"\0".join(b"%b/%b" % (self.folders[folder], self.names[a:b]) for folder, a, b in located)
            yield self.sizes[some].numpy().tobytes()

    def drop(self) -> None:
        """Delete the cached index, so that the folder is scanned again next time."""
        with suppress(OSError):  # absent or not writable: no reason to end a run
            self.place.unlink()


def open_index(root: Path, parts: Sequence[str] = (), progress: Progress = SILENT) -> ImageIndex:
    """The index of these sub-folders of `root`, or of all of it: from the cache if no folder has changed."""
    cached = _load(root, _place(root, parts))
    if cached is not None:
        return cached
    index = build_index(root, parts, progress)
    try:
        _save(index)
    except (EngramError, OSError) as error:
        warnings.warn(f"The index of {printable(root)} cannot be cached. {error}", EngramWarning, stacklevel=2)
    return index


def cache_folder() -> Path:
    """The default folder for downloads and caches: $ENGRAM_DATA, or `engram` in the user's cache."""
    if chosen := os.environ.get("ENGRAM_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "engram"


def folder_cache(root: Path) -> Path:
    """The cache of a folder of images: in the user's cache folder, because the folder itself may be read-only."""
    return cache_folder() / "folders" / hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]


def _place(root: Path, parts: Sequence[str]) -> Path:
    return folder_cache(root) / f"index-{'-'.join(parts) or 'all'}.safetensors"


# The walk


class _Listing(NamedTuple):
    folder: bytes
    changed: int
    ancestors: tuple[Identity, ...]  # of the folders in it: the folders above, and itself
    folders: list[bytes]
    names: bytes
    numbers: Tensor  # int64 (n, 3): the length of each name, size, modification time
    skipped: list[tuple[bytes, str]]


def build_index(root: Path, parts: Sequence[str] = (), progress: Progress = SILENT) -> ImageIndex:
    """List these sub-folders of `root`, or all of it, and the folders below, several at a time."""
    begin, top = time.time_ns(), os.fsencode(root)
    listings: list[_Listing] = []
    done: SimpleQueue[Future[_Listing]] = SimpleQueue()
    with progress.phase("scan") as phase, ThreadPoolExecutor(THREADS, "scan") as pool:

        def submit(folder: bytes, ancestors: tuple[Identity, ...]) -> None:
            pool.submit(_list, top, folder, ancestors).add_done_callback(done.put)

        pending = max(len(parts), 1)
        for part in parts or [""]:
            submit(os.fsencode(part), ())
        try:
            while pending:
                listing = done.get().result()
                pending += len(listing.folders) - 1
                for folder in listing.folders:
                    submit(os.path.join(listing.folder, folder), listing.ancestors)
                listings.append(listing)
                phase.advance(len(listing.numbers))
        finally:
            pool.shutdown(cancel_futures=True)
    return _combine(root, _place(root, parts), sorted(listings, key=lambda listing: listing.folder), begin)


def _list(root: bytes, folder: bytes, ancestors: tuple[Identity, ...]) -> _Listing:
    """List one folder. A folder that contains itself, by a link, is not entered again."""
    path = os.path.join(root, folder) if folder else root
    images: list[tuple[bytes, int, int]] = []
    folders: list[bytes] = []
    skipped: list[tuple[bytes, str]] = []
    try:
        status = os.stat(path)
        identity = status.st_dev, status.st_ino
        with os.scandir(path) as entries:
            for entry in () if identity in ancestors else entries:
                if entry.name.startswith(b".") or entry.name.lower() in SYSTEM_NAMES:
                    continue
                found = _inspect(entry)
                if isinstance(found, str):
                    skipped.append((os.path.join(folder, entry.name), found))
                elif stat.S_ISDIR(found.st_mode):
                    folders.append(entry.name)
                else:
                    images.append((entry.name, found.st_size, found.st_mtime_ns))
    except OSError as error:
        raise DataError(f"The folder {printable(os.fsdecode(path))} cannot be read: {error.strerror}.") from error
    if identity in ancestors:
        skipped = [(folder, "This link leads to a folder that contains it.")]
    images.sort()
    names = b"".join(name for name, _, _ in images)
    numbers = np.array([(len(name), size, changed) for name, size, changed in images], dtype=np.int64).reshape(-1, 3)
    above = (*ancestors, identity)
    return _Listing(folder, status.st_mtime_ns, above, folders, names, torch.from_numpy(numbers), sorted(skipped))


def _inspect(entry: os.DirEntry[bytes]) -> os.stat_result | str:
    """The status of a folder or an image file, links followed; or why an entry is neither."""
    try:
        status = entry.stat()
    except OSError:
        return "This link is broken." if entry.is_symlink() else "Its status cannot be read."
    if stat.S_ISDIR(status.st_mode):
        return status
    if not stat.S_ISREG(status.st_mode):
        return "It is not a regular file."
    if not entry.name.lower().endswith(SUFFIXES):
        return f"It does not have the extension of an image: {', '.join(EXTENSIONS)}."
    return status


def _combine(root: Path, place: Path, listings: list[_Listing], begin: int) -> ImageIndex:
    counts = torch.tensor([len(listing.numbers) for listing in listings])
    lengths, sizes, times = torch.cat([listing.numbers for listing in listings]).T.contiguous()
    changed = [listing.changed if listing.changed < begin - SETTLED else 0 for listing in listings]
    skipped = [SkippedFile(root / os.fsdecode(path), why) for listing in listings for path, why in listing.skipped]
    return ImageIndex(
        root,
        place,
        tuple(listing.folder for listing in listings),
        torch.tensor(changed, dtype=torch.int64),
        torch.arange(len(listings), dtype=torch.int32).repeat_interleave(counts),
        b"".join(listing.names for listing in listings),
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        sizes,
        times,
        tuple(at_most(skipped, root)),
    )


def at_most(skipped: list[SkippedFile], root: Path) -> list[SkippedFile]:
    """The first of these, and how many more there are."""
    more = len(skipped) - MAX_SKIPPED
    return skipped if more <= 0 else [*skipped[:MAX_SKIPPED], SkippedFile(root, f"{more:,} more files are skipped.")]


# The cache

TENSORS = ("changed", "folder_of", "ends", "sizes", "times")


def _save(index: ImageIndex) -> None:
    text = {
        "folders": [os.fsdecode(folder) for folder in index.folders],
        "skipped": [(str(left.path.relative_to(index.root)), left.reason) for left in index.skipped],
    }
    tensors = {
        "schema": torch.tensor([SCHEMA]),
        "text": _as_tensor(json.dumps(text).encode()),
        "names": _as_tensor(index.names),
        **{name: getattr(index, name) for name in TENSORS},
    }
    storage.make_folder(index.place.parent)
    storage.sweep_old(index.place.parent)
    storage.save_tensors(index.place, tensors)


def _load(root: Path, place: Path) -> ImageIndex | None:
    """The cached index, if there is one and no folder has changed since."""
    try:
        tensors = storage.load_tensors(place)
        if tensors["schema"].tolist() != [SCHEMA]:
            return None
        text = json.loads(tensors["text"].numpy().tobytes())
        index = ImageIndex(
            root=root,
            place=place,
            folders=tuple(map(os.fsencode, text["folders"])),
            names=tensors["names"].numpy().tobytes(),
            skipped=tuple(SkippedFile(root / path, reason) for path, reason in text["skipped"]),
            **{name: tensors[name] for name in TENSORS},
        )
        times = [os.stat(os.path.join(os.fsencode(root), folder)).st_mtime_ns for folder in index.folders]
        return index if times == index.changed.tolist() else None
    except (DataError, OSError, LookupError, ValueError, TypeError):  # absent, damaged, or a folder is gone
        return None


def _as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
