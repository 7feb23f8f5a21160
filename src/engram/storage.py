"""Files: atomic, durable writes; locks; JSON and tensors from untrusted files.

A file or folder appears under its name complete or not at all: it is written aside, synced, renamed, and its folder
synced. What a killed writer leaves has a name that begins with `ASIDE` and is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import operator
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engram.errors import BusyError, DataError, EngramError

if TYPE_CHECKING:
    from torch import Tensor

LOCK_MODE = 0o666  # the umask restricts it
ASIDE = ".aside-"
STALE = 3600  # seconds after which a temporary file was left by a killed writer
MAX_DEPTH = 32  # of untrusted JSON
MAX_HEADER = 2**24  # bytes of a safetensors file's header
# Types of tensors in safetensors files: their name in torch, and bytes of a number.
DTYPES = {
    **{"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)},
    **{"I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1)},
    **{"U8": ("uint8", 1), "BOOL": ("bool", 1)},
}


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Whether there is a file, folder or link of this name. DataError if the disk does not answer."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"{path} cannot be examined: {error.strerror}.") from error
    return True


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an OSError into an EngramError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise EngramError(f"{what}: {error.strerror or error}. Nothing was changed.") from error


def _aside(path: Path) -> Path:
    return path.with_name(f"{ASIDE}{path.name}-{uuid.uuid4().hex[:8]}")


def sweep(folder: Path) -> list[Path]:
    """Remove what killed writers left, and return it. Only for the holder of the folder's lock."""
    leftovers = sorted(folder.glob(f"{ASIDE}*"))
    for leftover in leftovers:
        is_folder = leftover.is_dir() and not leftover.is_symlink()  # of a link, only the link is removed
        shutil.rmtree(leftover) if is_folder else leftover.unlink(missing_ok=True)
    return leftovers


def sweep_old(folder: Path) -> None:
    """Remove temporary files older than an hour, where several processes write without a lock."""
    for leftover in folder.glob(f"{ASIDE}*"):
        with suppress(OSError):  # its writer has just finished, or another process removes it too
            if leftover.lstat().st_mtime < time.time() - STALE:
                leftover.unlink()


def evict(files: Iterable[Path], room: int) -> list[Path]:
    """Delete the least recently used files until the others take at most `room` bytes; the deleted ones."""
    deleted = []
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        room -= file.stat().st_size
        if room < 0:
            file.unlink()
            deleted.append(file)
    return deleted


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to; without an error it then becomes `path`, atomically and durably."""
    aside = _aside(path)
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically and durably."""
    with writing(path) as aside:
        aside.write_bytes(content)


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill with files; without an error it then becomes `path`, which must not exist."""
    aside = _aside(path)
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            sync(file)
        sync(aside)
        os.rename(aside, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def make_synced_folder(path: Path) -> None:
    """Create a folder durably, unless it exists."""
    if not path.exists():
        path.mkdir()
        sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file or folder: it is renamed first, so a kill never leaves half of it under its name."""
    if not path.exists():
        return
    aside = _aside(path)
    os.rename(path, aside)
    shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically. ValueError for NaN and infinity, which JSON does not have."""
    write_file(path, json_bytes(value, indent=2))


def json_bytes(value: Any, indent: int | None = None) -> bytes:
    """`value` as a line of JSON. Lone surrogates, as in file names that are not UTF-8, are escaped."""
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode("utf-8", errors="backslashreplace")  # the escapes that JSON has too


def read_json(path: Path) -> Any:
    """Read a JSON file; DataError names it if it is damaged."""
    check_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or a number too long
        raise DataError(f"{path} cannot be read as JSON: {error}") from error


@contextmanager
def open_inside(folder: Path, name: str, most: int) -> Iterator[tuple[io.BufferedReader, int]]:
    """The open regular file `folder/name` and its size, at most `most` bytes; no link below `folder` is followed."""
    try:
        descriptor = _descriptor_inside(folder, name)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{name} is not a regular file.")
            if status.st_size > most:
                raise DataError(f"{name} is longer than the {most} bytes it may have.")
            with open(descriptor, "rb", closefd=False) as file:
                yield file, status.st_size
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise DataError(f"{name} is missing.") from error
    except OSError as error:
        reason = "a link leads there" if error.errno in (errno.ELOOP, errno.EMLINK) else error.strerror
        raise DataError(f"{name} cannot be read: {reason}.") from error


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The content of the regular file `folder/name`, at most `most` bytes; no link below `folder` is followed."""
    with open_inside(folder, name, most) as (file, size):
        return file.read(size)


def _descriptor_inside(folder: Path, name: str) -> int:
    """Open part by part, so that no link can replace a part between a check and the read."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for part in name.split("/"):
        try:  # without waiting for a writer, as a pipe would
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
        finally:
            os.close(here)
        here = inner
    return here


def parse_json(content: bytes, name: str) -> Any:
    """Parse untrusted JSON strictly: no NaN, infinity, duplicate names, lone surrogates or deep nesting."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_distinct, parse_constant=_finite, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates can be parsed, but not written
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply." if isinstance(error, RecursionError) else error
        raise DataError(f"{name} cannot be read as JSON: {reason}") from error
    level, depth = [value], 0
    while level:
        nested = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level, depth = [inner for each in nested for inner in each], depth + 1
    if depth > MAX_DEPTH:
        raise DataError(f"{name} cannot be read as JSON: it is nested {depth} deep, which is more than {MAX_DEPTH}.")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is given twice")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a JSON number")
    return number


def tensors_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors that are named `part.…`, without that prefix."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def serialise_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file. The same tensors give the same bytes."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, atomically."""
    # Not safetensors' `save_file`: a kill would leave its own temporary file behind.
    write_file(path, serialise_tensors(tensors))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; DataError if it cannot be read."""
    from safetensors.torch import load_file

    check_file(path)
    with _tensor_errors(str(path)):
        return load_file(path)


@contextmanager
def _tensor_errors(name: str) -> Iterator[None]:
    """Turn whatever reading the safetensors file `name` raises into a DataError."""
    from safetensors import SafetensorError

    # What the library itself does not refuse, such as types that torch lacks, raises one of the others.
    errors = (SafetensorError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
    try:
        yield
    except (OSError, *errors) as error:
        raise DataError(f"{name} cannot be read as safetensors: {type(error).__name__}: {error}") from error


class TensorShape(NamedTuple):
    """The type and the shape of a tensor in a file."""

    dtype: str  # as torch names it, or safetensors if torch has none
    shape: tuple[int, ...]


def read_shapes(file: io.BufferedReader, size: int, name: str) -> dict[str, TensorShape]:
    """The types and shapes of the tensors in the open safetensors file `name` of this size; they are not read."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise DataError(f"{name} cannot be read as safetensors: its header of {length} bytes is too long or too short.")
    header = parse_json(file.read(length), name)
    try:
        header.pop("__metadata__", None)
        kinds = {key: DTYPES[each["dtype"]] for key, each in header.items()}
        sizes = {key: tuple(map(operator.index, each["shape"])) for key, each in header.items()}
    except (AttributeError, LookupError, TypeError) as error:
        raise DataError(f"{name} cannot be read as safetensors: {error!r}") from error
    total = sum(kinds[key][1] * math.prod(shape) for key, shape in sizes.items())
    if min((number for shape in sizes.values() for number in shape), default=0) < 0 or total != size - 8 - length:
        raise DataError(f"{name} cannot be read as safetensors: {total} bytes of tensors in {size - 8 - length}.")
    return {key: TensorShape(kinds[key][0], shape) for key, shape in sizes.items()}


def parse_tensors(content: bytes, name: str) -> dict[str, Tensor]:
    """The tensors in the content of the safetensors file `name`; DataError if it is not one."""
    from safetensors.torch import load

    with _tensor_errors(name):
        return load(content)


def check_file(path: Path) -> None:
    """DataError unless `path` is a regular file: reading a pipe or a device may never end."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file." if path.exists() else f"There is no file {path}.")


def machine_memory() -> int:
    """The bytes of memory that this machine has: untrusted files that would take more are refused."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """The hexadecimal digest of a file."""
    check_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def make_folder(path: Path) -> None:
    """Create a folder with its parents; EngramError if it cannot be created or is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngramError(f"The folder {path} cannot be made: {error.strerror}. Choose another.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise EngramError(f"The folder {path} is not writable. Choose another, or change its permissions.")


@contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, after its current holder. The kernel releases it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, LOCK_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # what was done under the lock is done
            os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[list[Path]]:
    """Hold the folder for one writer; BusyError if another has it. The kernel releases it when the process ends.

    Yields what killed writers left, which is removed.
    """
    descriptor = _lock(folder)
    try:
        yield sweep(folder)
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _lock(folder: Path) -> int:
    path = folder / ".lock"
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, LOCK_MODE)
        except OSError as error:
            only_lock = isinstance(error, PermissionError) and os.access(folder, os.W_OK | os.X_OK)
            what = path if only_lock else f"The folder {folder}"
            raise EngramError(f"{what} is not writable: {error.strerror}. Choose another.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return descriptor
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                message = f"Another process is working in {folder}. Wait for it, or choose another folder."
                raise BusyError(message) from error
            raise EngramError(f"{folder} is on a disk without locks ({error.strerror}). Choose another.") from error
        os.close(descriptor)  # its last holder has removed the file meanwhile, so another process may lock a new one
