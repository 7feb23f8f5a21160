"""Everything that touches a disk: atomic, synced writes; locks; checksums; tensors without pickle.

A file or folder appears under its name whole or not at all: it is written aside, synced, renamed, and its folder
synced. What a killed writer leaves aside has a name beginning with `ASIDE` and is swept away by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.errors import BusyError, DataError, EngramError

if TYPE_CHECKING:
    from torch import Tensor

SHARED = 0o666  # of lock files: who else may hold them is for the umask to say, as of all else
ASIDE = ".aside-"
LONG = 3600  # seconds: whoever writes for so long is dead
DEEPEST = 32  # how far JSON from outside may be nested


def sync(path: Path) -> None:
    """Have a file's content, or the names in a folder, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Whether there is a file, folder or link of this name. A disk that does not answer is not taken for a no."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"{path} cannot be looked at: {error.strerror}.") from error
    return True


def _aside(path: Path) -> Path:
    return path.with_name(f"{ASIDE}{path.name}-{uuid.uuid4().hex[:8]}")


def sweep(folder: Path) -> None:
    """Remove what killed writers left aside. Only for the holder of the folder's lock."""
    for leftover in folder.glob(f"{ASIDE}*"):
        folder_itself = leftover.is_dir() and not leftover.is_symlink()  # a link goes; what it leads to stays
        shutil.rmtree(leftover) if folder_itself else leftover.unlink(missing_ok=True)


def sweep_old(folder: Path) -> None:
    """Remove the files that writers left aside an hour ago or more, where several write without a lock."""
    for leftover in folder.glob(f"{ASIDE}*"):
        with suppress(OSError):  # its writer lives and has just finished, or somebody else sweeps too
            if leftover.lstat().st_mtime < time.time() - LONG:
                leftover.unlink()


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yields a path to write a file to; on leaving without an error it becomes `path`, atomically and synced."""
    aside = _aside(path)
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
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
            sync(file)
        sync(aside)
        os.rename(aside, path)
        sync(path.parent)
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
    content = json_bytes(value, indent=2)
    with writing(path) as aside:
        aside.write_bytes(content)


def json_bytes(value: Any, indent: int | None = None) -> bytes:
    """`value` as JSON with a newline. Half characters, as of file names that are not UTF-8, are escaped and so kept."""
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode("utf-8", errors="backslashreplace")  # which writes them as JSON does


def read_json(path: Path) -> Any:
    """Read a JSON file, or say which one is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # of ValueError: no UTF-8, no JSON, a number too long
        raise DataError(f"{path} cannot be read as JSON: {error}") from error


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The content of `name`, its parts joined by /: a regular file in a folder, of `most` bytes, reached by no link."""
    try:
        descriptor = _open_inside(folder, name)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"{name} is not a regular file.")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(min(found.st_size, most) + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise DataError(f"{name} is missing.") from error
    except OSError as error:
        reason = "a link leads there" if error.errno in (errno.ELOOP, errno.EMLINK) else error.strerror
        raise DataError(f"{name} cannot be read: {reason}.") from error
    if len(content) > most:
        raise DataError(f"{name} is longer than the {most} bytes it may have.")
    return content


def _open_inside(folder: Path, name: str) -> int:
    """Step by step from folder to folder, so that no link can take a part's place between a check and the reading."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for part in name.split("/"):
        # Without waiting: a pipe that nobody writes to would take forever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            inner = os.open(part, flags, dir_fd=here)
        finally:
            os.close(here)
        here = inner
    return here


def parse_json(content: bytes, name: str) -> Any:
    """JSON from outside, to the letter: no NaN, no number out of range, no name given twice, no absurd nesting."""
    try:
        value = json.loads(
            content.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_finite, parse_float=_finite
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a character can be read, but never shown
    except RecursionError as error:
        raise DataError(f"{name} cannot be read as JSON: it is nested too deeply.") from error
    except ValueError as error:
        raise DataError(f"{name} cannot be read as JSON: {error}") from error
    level, depth = [value], 0
    while level:
        level = [inner for outer in level for inner in _inside(outer)]
        depth += 1
    if depth > DEEPEST:
        raise DataError(f"{name} cannot be read as JSON: it is nested {depth} deep, which is more than {DEEPEST}.")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is given twice")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a number of JSON")
    return number


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def serialise_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file. The same tensors give the same bytes."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, atomically."""
    # Not safetensors' `save_file`: it writes a temporary file of its own, which a kill would leave behind.
    content = serialise_tensors(tensors)
    with writing(path) as aside:
        aside.write_bytes(content)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or say why not."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from error


def parse_tensors(content: bytes, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file by its content, or why it holds none."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    # What the library does not refuse itself, such as numbers torch has no type for, shows in one of the others.
    errors = (SafetensorError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
    try:
        return load(content)
    except errors as error:
        raise DataError(f"{name} cannot be read as safetensors: {error!r}") from error


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
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, SHARED)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _let_go(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one writer. The kernel lets go when the process ends, however it ends."""
    descriptor = _lock(folder)
    try:
        sweep(folder)
        yield
    finally:
        _let_go(descriptor)


def _let_go(descriptor: int) -> None:
    with suppress(OSError):  # nothing was written to it: what was done under the lock is done
        os.close(descriptor)


def _lock(folder: Path) -> int:
    while True:
        try:
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, SHARED)
        except OSError as error:
            shut = isinstance(error, PermissionError) and os.access(folder, os.W_OK | os.X_OK)
            what = f"{folder / '.lock'}" if shut else f"The folder {folder}"
            raise EngramError(f"{what} is not writable: {error.strerror}. Choose another.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(folder / ".lock")):
                    return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise BusyError(
                f"Another process is working in {folder}. Wait for it, or choose another folder."
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise EngramError(f"{folder} is on a disk without locks ({error.strerror}). Choose another.") from error
        os.close(descriptor)  # its last holder has meanwhile removed it: what is held here, another may hold too
