"""Samples whose images are loaded when they are indexed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.data import Samples, files
from engram.data.samples import LazyImages
from engram.data.scanning import build_index

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (20, 4, 5, 3), dtype=np.uint8))
LABELS = torch.arange(20) % 4


class Counted(LazyImages):
    """The images above, and the rows that were loaded."""

    def __init__(self) -> None:
        self.shape = tuple(IMAGES.shape)
        self.made: list[int] = []

    def __getitem__(self, rows: Tensor) -> Tensor:
        self.made += rows.tolist()
        return IMAGES[rows]

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        yield rows.numpy().tobytes()


def lazy() -> Samples:
    return Samples(Counted(), torch.arange(20), LABELS)


class FromMemory(LazyImages):
    """The images of a tensor as lazy images."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.shape = images, tuple(images.shape)

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.images[rows]

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        yield rows.numpy().tobytes()


def as_lazy(samples: Samples) -> Samples:
    """The same samples with lazy images."""
    assert isinstance(samples.inputs, Tensor)
    return Samples(FromMemory(samples.inputs), samples.rows, samples.labels)


class Mortal(files.ImageFiles):
    """Image files whose process is killed at the third access."""

    left = 3

    def __getitem__(self, rows: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(rows)


def killed_while_caching(root: Path, rows: list[int], cache: str) -> None:
    """Write the cache two images at a time, and be killed before the last of these rows."""
    os.environ["ENGRAM_DATA"] = cache
    files.CHUNK, files.SYNC = 2, 2 * 192
    files.cache_images(Mortal(build_index(root), 8, "stretch"), torch.tensor(rows), 2**20)
