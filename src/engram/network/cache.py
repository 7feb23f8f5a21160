"""What was computed from networks, in a folder, for whoever computes the same again: features, and adapters."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from torch import Tensor

from engram import storage
from engram.errors import DataError
from engram.network import parallel

MOST = 2 * 2**30  # bytes in a folder; what was not asked for longest goes first


class TensorCache:
    """A folder of tensors, each file under the hash of all that they were computed from.

    Of several processes the first alone looks into it. What is damaged or gone is computed anew.
    """

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self.folder, self.most = folder, most
        parallel.on_main(self._open)

    def _open(self) -> None:
        storage.make_folder(self.folder)
        storage.sweep_old(self.folder)

    def path(self, known: Iterable[object]) -> Path:
        """Where the tensors are, if they are: `known` are tensors, and what its `repr` tells from anything else."""
        digest = hashlib.sha256()
        for part in known:
            if isinstance(part, Tensor):
                digest.update(f"{part.dtype} {tuple(part.shape)} ".encode())
                digest.update(part.detach().cpu().contiguous().numpy().data)
            else:
                digest.update(f"{part!r} ".encode())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

    def load(self, path: Path) -> dict[str, Tensor] | None:
        """The tensors, or None where there are none."""
        return parallel.broadcast(lambda: _read(path))

    def save(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Keep them, if there is room; what cannot be written is computed again another time."""
        if sum(tensor.nbytes for tensor in tensors.values()) <= self.most:
            parallel.on_main(lambda: self._write(path, tensors))

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        with suppress(OSError):  # the disk is full, or somebody else makes room too
            storage.save_tensors(path, tensors)
            kept = self.folder.glob("*.safetensors")
            files = [(found.stat().st_mtime_ns, found.stat().st_size, found) for found in kept]
            total = sum(size for _, size, _ in files)
            for _, size, found in sorted(files):
                if total <= self.most:
                    break
                found.unlink()
                total -= size


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        tensors = storage.load_tensors(path)
        os.utime(path)
    except (DataError, OSError):
        return None
    return tensors


_here: ContextVar[TensorCache | None] = ContextVar("cache", default=None)


@contextmanager
def caching(cache: TensorCache | None) -> Iterator[None]:
    """Inside, what was computed before is read instead, and anything else is kept."""
    token = _here.set(cache)
    try:
        yield
    finally:
        _here.reset(token)


def cached(known: Iterable[object], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What was made of all that is `known` before, or what is made now; `known` is looked at where one remembers."""
    cache = _here.get()
    if cache is None:
        return make()
    path = cache.path(known)
    tensors = cache.load(path)
    if tensors is None:
        tensors = make()
        cache.save(path, tensors)
    return tensors
