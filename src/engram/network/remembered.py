"""Extracted features in a folder, for whoever extracts the same samples by the same network again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from torch import Tensor

from engram import storage
from engram.data import Samples
from engram.errors import DataError
from engram.network import parallel
from engram.network.network import Network

MOST = 2 * 2**30  # bytes in a folder; what was not asked for longest goes first


class Remembered:
    """A folder of features, each under the hash of the network's weights and of the samples.

    Of several processes the first alone looks into it. What is damaged or gone is extracted anew.
    """

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self.folder, self.most = folder, most
        parallel.on_first(lambda: storage.make_folder(folder))

    def path(self, network: Network, samples: Samples) -> Path:
        """Where the features are, if they are."""
        known = (repr(network.extractor), network.side, network.mean.device.type)
        digest = hashlib.sha256(repr(known).encode())
        for name, tensor in network.state_dict().items():
            if not name.startswith("head."):
                digest.update(name.encode() + tensor.cpu().numpy().tobytes())
        digest.update(samples.fingerprint().encode())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

    def load(self, path: Path) -> Tensor | None:
        """Features (n, d), or None where there are none."""
        return parallel.once(lambda: _read(path))

    def save(self, path: Path, features: Tensor) -> None:
        """Keep them, if there is room; what cannot be written is extracted again another time."""
        if features.nbytes <= self.most:
            parallel.on_first(lambda: self._write(path, features))

    def _write(self, path: Path, features: Tensor) -> None:
        with suppress(OSError):  # the disk is full, or somebody else makes room too
            storage.save_tensors(path, {"features": features})
            kept = self.folder.glob("*.safetensors")
            files = [(found.stat().st_mtime_ns, found.stat().st_size, found) for found in kept]
            total = sum(size for _, size, _ in files)
            for _, size, found in sorted(files):
                if total <= self.most:
                    break
                found.unlink()
                total -= size


def _read(path: Path) -> Tensor | None:
    try:
        features = storage.load_tensors(path)["features"]
        os.utime(path)
    except (DataError, KeyError, OSError):
        return None
    return features


_here: ContextVar[Remembered | None] = ContextVar("remembered", default=None)


@contextmanager
def remembering(remembered: Remembered | None) -> Iterator[None]:
    """Inside, features that were extracted before are read instead, and others are kept."""
    token = _here.set(remembered)
    try:
        yield
    finally:
        _here.reset(token)


def remembered_here() -> Remembered | None:
    """Where features are kept at the moment, if they are."""
    return _here.get()
