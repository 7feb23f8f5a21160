"""Everything that touches a disk: atomic, synced writes; locks; checksums; tensors without pickle.

A file or folder appears under its name whole or not at all: it is written aside, synced, renamed, and its folder
synced. What a killed writer leaves aside has a name beginning with `ASIDE` and is swept away by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.errors import BusyError, DataError, EngramError

if TYPE_CHECKING:
    from torch import Tensor

ASIDE = ".aside-"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(f"{ASIDE}{path.name}-{uuid.uuid4().hex[:8]}")


def sweep(folder: Path) -> None:
    """Remove what killed writers left aside. Only for the holder of the folder's lock."""
    for leftover in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yields a path to write a file to; on leaving without an error it becomes `path`, atomically and synced."""
    aside = _aside(path)
    try:
        yield aside
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def publish_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path`, which must not exist, with what `fill` writes into it, atomically and synced."""
    aside = _aside(path)
    aside.mkdir()
    try:
        fill(aside)
        for file in aside.iterdir():
            _sync(file)
        _sync(aside)
        os.rename(aside, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Remove a file or folder so that a kill leaves it whole, gone, or aside, never half removed under its name."""
    if not path.exists():
        return
    aside = _aside(path)
    os.rename(path, aside)
    shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically. NaN and infinity are refused: they are not JSON."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with writing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file, or say which one is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, atomically. The same tensors give the same bytes."""
    from safetensors.torch import save_file

    flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with writing(path) as aside:
        aside.touch()
        mode = aside.stat().st_mode
        save_file(flat, aside)
        aside.chmod(mode)  # safetensors makes its files private; these are as readable as any other of the folder


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or say why not."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from error


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """The hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def make_folder(path: Path) -> None:
    """Make a folder with its parents, or say in one sentence why it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngramError(f"The folder {path} cannot be made: {error.strerror}. Choose another.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise EngramError(f"The folder {path} is not writable. Choose another, or change its permissions.")


@contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, after whoever holds it now. The kernel lets go when a process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one writer. The kernel lets go when the process ends, however it ends."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise EngramError(f"The folder {folder} is not writable: {error.strerror}. Choose another.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"Another process is working in {folder}. Wait for it, or choose another folder."
            ) from error
        sweep(folder)
        yield
    finally:
        os.close(descriptor)
