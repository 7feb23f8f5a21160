"""`Cache`: a folder of networks, features and adapters that several runs share."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch import Tensor

from engram import storage
from engram.errors import DataError
from engram.network import parallel

MAX_BYTES = 2 * 2**30
ENGRAM_VERSION = importlib.metadata.version("engram")  # another one may compute other numbers


class Cache:
    """Tensors on disk, one safetensors file per entry, named by kind and hash of everything the entry depends on.

    A damaged entry counts as missing. When features and adapters together exceed `max_bytes`, the least recently used
    are deleted; networks, which may take hours to train, are kept. Under torchrun only rank 0 accesses the disk.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        parallel.on_main(self._open)

    def _open(self) -> None:
        storage.make_folder(self.folder)
        storage.sweep_old(self.folder)

    def path(self, kind: str, key: Iterable[object]) -> Path:
        """The file of an entry. A key consists of tensors and of objects whose `repr` identifies them."""
        digest = hashlib.sha256(f"{ENGRAM_VERSION} ".encode())
        for part in key:
            if isinstance(part, Tensor):
                digest.update(f"{part.dtype} {tuple(part.shape)} ".encode())
                digest.update(part.detach().cpu().contiguous().numpy().data)
            else:
                digest.update(f"{part!r} ".encode())
        return self.folder / f"{kind}-{digest.hexdigest()[:32]}.safetensors"

    def get(self, kind: str, key: Iterable[object], compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of an entry, computed and stored if it is missing."""
        path = self.path(kind, key)
        tensors = self.load(path)
        if tensors is None:
            tensors = compute()
            self.save(path, tensors)
        return tensors

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Wait until no other process computes this entry, and keep others from computing it."""
        with ExitStack() as stack:
            parallel.on_main(lambda: stack.enter_context(storage.waiting(self.folder / f".{path.stem}.lock")))
            yield

    def load(self, path: Path) -> dict[str, Tensor] | None:
        """The tensors of an entry, or None if it is missing."""
        return parallel.broadcast(lambda: _read(path))

    def save(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Store an entry. If it cannot be written, it is computed again next time."""
        parallel.on_main(lambda: self._write(path, tensors))

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        if _is_evictable(path) and sum(tensor.nbytes for tensor in tensors.values()) > self.max_bytes:
            return
        with suppress(OSError):  # the disk is full, or another process evicts the same file
            storage.save_tensors(path, tensors)
            storage.evict(filter(_is_evictable, self.folder.glob("*.safetensors")), self.max_bytes)


def _is_evictable(path: Path) -> bool:
    return not path.name.startswith("network-")


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        tensors = storage.load_tensors(path)
    except DataError:
        return None
    if _is_evictable(path):
        with suppress(OSError):
            os.utime(path)  # the time of its last use
    return tensors
