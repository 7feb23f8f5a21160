"""The memory of a learner: `FeatureMemory` holds stored features, `ImageMemory` exemplars.

Rows of a class are contiguous, in herding order, and classes are in the order of their class indices. So labels cost
one count per class, and a class is trimmed by dropping its last rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.errors import EngramWarning
from engram.features.adapters import Adapter, adapt
from engram.features.codecs import Codec, Encoded, Float32, Plain, restore_encoded
from engram.features.herding import herd
from engram.features.statistics import Statistics

MEGABYTE = 2**20  # the paper's MB
COPIED_ROWS = 1024  # at a time: exemplars may take most of the machine's memory
FLOAT32 = Float32()


class _ClassRows:
    """Rows grouped by class."""

    def __init__(self, vectors: Tensor | Encoded, counts: Tensor, held_out: Tensor | None = None) -> None:
        self.vectors = Plain(vectors) if isinstance(vectors, Tensor) else vectors
        self.counts = counts  # int64 (K,): the number of rows of each class
        self.held_out = held_out  # bool (n,), or None where it is not recorded

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def rows(self) -> Tensor:
        """The rows, decoded on each call unless they are stored as they are."""
        return self.vectors.decode()

    @property
    def class_indices(self) -> Tensor:
        """The class of each row, int64 (n,)."""
        return torch.arange(len(self.counts)).repeat_interleave(self.counts)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, codebooks included: the number the paper is about."""
        return self.vectors.nbytes

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, without what all rows share."""
        return self.vectors.row_bytes

    def tensors(self) -> dict[str, Tensor]:
        """All that is stored, by name."""
        marks = {} if self.held_out is None else {"held_out": self.held_out}
        return {**self.vectors.tensors(), "counts": self.counts, **marks}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The memory whose `tensors()` these are."""
        counts = tensors["counts"]
        own = {name: tensor for name, tensor in tensors.items() if name not in ("counts", "held_out")}
        return cls(restore_encoded(own), counts, tensors.get("held_out"))

    def take(self, rows: Tensor, counts: Tensor) -> Self:
        """The memory of these rows (k,) only."""
        return type(self)(self.vectors.take(rows), counts, None if self.held_out is None else self.held_out[rows])


class FeatureMemory(_ClassRows):
    """Unit feature vectors, float32 (n, d), as tensor or encoded.

    `held_out` marks vectors of images that no network was trained on: only those can measure a classifier's accuracy.
    """

    @classmethod
    def empty(cls, dimension: int = 0) -> FeatureMemory:
        """A memory without vectors."""
        return cls(torch.empty(0, dimension), torch.empty(0, dtype=torch.int64))

    @property
    def codec(self) -> str:
        """The name of the codec that the vectors are encoded by."""
        return self.vectors.codec

    def adapted(self, adapter: Adapter, device: torch.device | None = None) -> FeatureMemory:
        """The memory of the adapted vectors, as float32: φ(M)."""
        return FeatureMemory(adapt(adapter, self.rows, device), self.counts)

    def refitted(self) -> FeatureMemory:
        """The same vectors with everything that they share, such as a codebook, computed from them alone."""
        return FeatureMemory(self.vectors.refitted(), self.counts, self.held_out)

    def marked(self, held_out: Tensor) -> FeatureMemory:
        """The same vectors, with those of held-out images marked."""
        return FeatureMemory(self.vectors, self.counts, held_out)

    def rearranged(self, new_rows: Tensor, sources: Tensor, counts: Tensor, codec: Codec = FLOAT32) -> FeatureMemory:
        """The memory of rows `new_rows[s]` for s in `sources` or, where s is negative, of its own rows −1 − s.

        All of them are encoded together.
        """
        # Normalised vectors are no longer where their codes put them, so encoding them again would move them.
        old_rows = self.vectors.approximations() if self.codec == codec.name else self.rows
        return FeatureMemory(codec.encode(_gather(old_rows, new_rows, sources), self.vectors), counts)


class ImageMemory(_ClassRows):
    """Exemplars: images as they came, uint8 (n, h, w, c), or vectors (n, d) where those are the inputs."""

    @classmethod
    def empty(cls, shape: tuple[int, ...] = (0,)) -> ImageMemory:
        """A memory without images."""
        dtype = torch.uint8 if len(shape) == 3 else torch.float32
        return cls(torch.empty(0, *shape, dtype=dtype), torch.empty(0, dtype=torch.int64))

    def rearranged(self, new_rows: Tensor, sources: Tensor, counts: Tensor) -> ImageMemory:
        """The memory of rows `new_rows[s]` for s in `sources` or, where s is negative, of its own rows −1 − s."""
        return ImageMemory(_gather(self.rows, new_rows, sources), counts)


def _gather(old_rows: Tensor, new_rows: Tensor, sources: Tensor) -> Tensor:
    rows = new_rows.new_empty((len(sources), *new_rows.shape[1:]))
    for some in torch.arange(len(sources)).split(COPIED_ROWS):
        old, new = some[sources[some] < 0], some[sources[some] >= 0]
        rows[old], rows[new] = old_rows[-1 - sources[old]], new_rows[sources[new]]
    return rows


@dataclass(frozen=True, eq=False)
class Memory:
    """All that a learner stores of the samples it has seen."""

    features: FeatureMemory
    images: ImageMemory
    statistics: Statistics = field(default_factory=Statistics.empty)
    carried_bytes: int = 0  # of what the objective carries in the network from task to task

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return self.features.nbytes + self.images.nbytes + self.statistics.nbytes + self.carried_bytes

    @property
    def shared_bytes(self) -> int:
        """The part that belongs to no single class, such as a codebook."""
        kinds = (self.features, self.images, self.statistics)
        return self.carried_bytes + sum(kind.nbytes - len(kind) * kind.row_bytes for kind in kinds)


def select(memory: FeatureMemory, vectors: Tensor, class_indices: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
    """Choose at most `per_class` rows of each class from a memory and new vectors (n, d), by herding.

    A class with new vectors is herded anew, from its old rows and the new ones together; any other keeps its first
    rows. Returns (sources, counts) as `rearranged` takes them. Exemplars are chosen by their features, so `memory` then
    holds those of the stored images in the same network.
    """
    unit, rows = F.normalize(vectors), memory.rows
    classes = max(len(memory.counts), int(class_indices.max()) + 1 if len(class_indices) else 0)
    slots = torch.arange(len(memory)).split(memory.counts.tolist())  # the rows of each class so far
    sources: list[Tensor] = []
    for class_index in range(classes):
        arrived = (class_indices == class_index).nonzero().squeeze(1)
        stored = slots[class_index] if class_index < len(slots) else torch.empty(0, dtype=torch.int64)
        chosen = torch.cat([-1 - stored, arrived])
        if len(arrived):
            candidates = torch.cat([rows[stored], unit[arrived]]) if len(stored) else unit[arrived]
            chosen = chosen[herd(candidates, per_class)]
        sources.append(chosen[:per_class])
    counts = torch.tensor([len(part) for part in sources], dtype=torch.int64)
    return torch.cat(sources) if sources else counts, counts


def warn_of_small_classes(counts: Tensor, among: Tensor, asked: int) -> None:
    """Warn if classes `among` (bool, (K,)) have fewer rows than were asked for."""
    short = counts[among & (counts < asked)]
    if len(short):
        who = f"{len(short)} classes have" if len(short) > 1 else "One class has"
        what = f"{who} fewer than {asked} samples (the fewest: {int(short.min())}); all are kept."
        warnings.warn(what, EngramWarning, stacklevel=2)
