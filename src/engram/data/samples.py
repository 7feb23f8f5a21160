"""`Samples`: images or vectors with their labels, as a view of rows of one source that is never copied or changed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.lazy import BATCHES, Joined, LazyImages, prefetch
from engram.data.scanning import SkippedFile
from engram.errors import DataError
from engram.randomness import generator


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows of `inputs` and their labels.

    Make one with `Samples.of(inputs, labels)`.
    """

    # uint8 images (N, h, w, c) or float32 vectors (N, d), shared by every view; or images that are made when asked for
    inputs: Tensor | LazyImages
    rows: Tensor  # int64 (n,): which rows of `inputs` these samples are
    labels: Tensor  # int64 (n,)

    @classmethod
    def of(cls, inputs: Any, labels: Any) -> Samples:
        """From arrays or tensors: uint8 images (n, h, w, c) or (n, h, w), or vectors (n, d) of any real type."""
        inputs, labels = _tensor(inputs, "inputs"), _tensor(labels, "labels")
        if inputs.ndim == 3 and inputs.dtype == torch.uint8:
            inputs = inputs.unsqueeze(-1)
        if inputs.ndim == 4 and inputs.dtype != torch.uint8:
            raise DataError(f"Images must be uint8, 0 to 255; found {inputs.dtype}. Convert them before.")
        if inputs.ndim == 4 and inputs.shape[-1] not in (1, 3):
            raise DataError(f"Images must be (n, height, width, 1 or 3 channels); found {tuple(inputs.shape)}.")
        if inputs.ndim not in (2, 4):
            raise DataError(f"Inputs must be images (n, h, w, c) or vectors (n, d); found {tuple(inputs.shape)}.")
        if 0 in inputs.shape[1:]:
            raise DataError(f"A sample must have at least one number; found {tuple(inputs.shape)}.")
        if inputs.ndim == 2:
            if inputs.is_complex():
                raise DataError(f"Vectors must be real numbers; found {inputs.dtype}.")
            inputs = inputs.to(torch.float32)
            if not bool(torch.isfinite(inputs).all()):
                raise DataError("The vectors hold NaN or infinity. Remove or fill those rows before.")
        if labels.ndim != 1 or len(labels) != len(inputs):
            raise DataError(
                f"There must be one label per sample; found {len(inputs)} samples, labels {tuple(labels.shape)}."
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise DataError(f"Labels must be whole numbers; found {labels.dtype}.")
        return cls(inputs.contiguous(), torch.arange(len(inputs)), labels.to(torch.int64))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample: (h, w, c) or (d,)."""
        return tuple(self.inputs.shape[1:])

    @property
    def sample_bytes(self) -> int:
        """How many bytes one sample takes in memory."""
        return math.prod(self.shape) * self.inputs.dtype.itemsize

    def batch(self, positions: Tensor) -> Tensor:
        """The inputs at these positions, (len(positions), *shape)."""
        return self.inputs[self.rows[positions]]

    def batches(self, parts: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """The inputs at the positions of each part, in order; images that are not in memory are prefetched.

        Close it (`contextlib.closing`) when it may not be exhausted.
        """
        if not isinstance(self.inputs, LazyImages):
            yield from map(self.batch, parts)
            return
        # One thread: `fill` already decodes each batch with several.
        yield from prefetch(self.batch, parts, workers=1, ahead=BATCHES)

    def select(self, positions: Tensor) -> Samples:
        """The samples at these positions, in this order; nothing is copied but row numbers."""
        return Samples(self.inputs, self.rows[positions], self.labels[positions])

    def of_classes(self, classes: tuple[int, ...]) -> Samples:
        """The samples of these classes, in their present order."""
        return self.select(torch.isin(self.labels, torch.tensor(classes)).nonzero().squeeze(1))

    def classes(self) -> tuple[int, ...]:
        """The labels that occur, ascending."""
        return tuple(self.labels.unique().tolist())

    def fingerprint(self) -> str:
        """A SHA-256 over shapes, inputs, and labels, the same for the same samples.

        Of inputs that are made when asked for, over what tells them apart, such as the names and sizes of files.
        """
        digest = hashlib.sha256(repr((self.inputs.dtype, self.shape, len(self))).encode())
        if isinstance(self.inputs, LazyImages):
            for part in self.inputs.identity(self.rows):
                digest.update(part)
        else:
            for positions in torch.arange(len(self)).split(4096):
                digest.update(self.batch(positions).numpy().tobytes())
        digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values)  # torch takes none that is turned round, as images[..., ::-1] is
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The {what} must be an array or a tensor of numbers: {error}") from error


def concatenate(*parts: Samples) -> Samples:
    """One `Samples` of all parts, in order. Views of the same inputs stay views of them, and files stay unread."""
    labels = torch.cat([part.labels for part in parts])
    if all(part.inputs is parts[0].inputs for part in parts):
        return Samples(parts[0].inputs, torch.cat([part.rows for part in parts]), labels)
    if any(isinstance(part.inputs, LazyImages) for part in parts):
        joined = Joined([(part.inputs, part.rows) for part in parts])
        return Samples(joined, torch.arange(len(labels)), labels)
    inputs = torch.cat([part.batch(torch.arange(len(part))) for part in parts])
    return Samples(inputs, torch.arange(len(labels)), labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named collection to learn from, and one to be tested on."""

    name: str
    train: Samples
    test: Samples
    class_names: tuple[str, ...]  # by label
    skipped: tuple[SkippedFile, ...] = ()  # files that are not among its samples, and why
    published: bool = False  # whether its name tells its samples, wherever they are loaded
    source: Mapping[str, Any] = field(default_factory=dict)  # how `load` was asked for it; empty: made in Python

    def __post_init__(self) -> None:
        labels = torch.cat([self.train.labels, self.test.labels])
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.class_names):
            raise DataError(
                f"The labels of {self.name} run from {int(labels.min())} to {int(labels.max())}, "
                f"but {len(self.class_names)} classes are named."
            )
        if self.train.shape != self.test.shape:
            raise DataError(f"Training samples of {self.name} are {self.train.shape}, test samples {self.test.shape}.")

    @cached_property
    def identity(self) -> str | None:
        """What tells its samples from those of other data sets of its name; None where the name does."""
        if self.published:
            return None
        parts = (self.class_names, self.train.fingerprint(), self.test.fingerprint())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def hold_out(samples: Samples, share: float, seed: int, purpose: str, *, smallest: int = 2) -> tuple[Samples, Samples]:
    """(the rest, the held out), each in its present order: `share` of each class, at least one, but never its last.

    A class of fewer than `smallest` samples gives none.
    """
    held = torch.zeros(len(samples), dtype=torch.bool)
    labels, counts = samples.labels.unique(return_counts=True)
    by_class = samples.labels.argsort(stable=True).split(counts.tolist())
    for label, positions in zip(labels.tolist(), by_class, strict=True):
        count = min(max(round(share * len(positions)), 1), len(positions) - 1)
        count = count if len(positions) >= smallest else 0
        drawn = torch.randperm(len(positions), generator=generator(seed, purpose, label))
        held[positions[drawn[:count]]] = True
    return samples.select((~held).nonzero().squeeze(1)), samples.select(held.nonzero().squeeze(1))
