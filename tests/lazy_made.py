"""Samples of which no image is in memory until it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engram.data import Samples
from engram.data.lazy import LazyImages

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
