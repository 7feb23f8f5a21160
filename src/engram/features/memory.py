"""What is kept of the past: `FeatureMemory` and `ImageMemory`, byte-exact, grouped by class.

Rows of one class lie together, in herding order, and classes in the order of the head's columns: so a label costs
nothing but a count per class, and a class is trimmed by cutting off the end of its rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.errors import EngramWarning
from engram.features.codecs import Codec, Coded, Coding, Plain, coded
from engram.features.herding import herd

MEGABYTE = 2**20  # the paper's MB
AT_A_TIME = 1024  # rows that are copied
EXACT = Coding()


class _Grouped:
    counts: Tensor  # int64 (K,): how many rows each class has

    @property
    def class_indices(self) -> Tensor:
        """Each row's class, as its column in the head, int64 (n,)."""
        return torch.arange(len(self.counts)).repeat_interleave(self.counts)


class FeatureMemory(_Grouped):
    """Unit feature vectors (n, d), given as they are, float32, or as a codec keeps them.

    `held_out` (bool, (n,)) marks those of images that no network was trained on, where somebody keeps account of it:
    only they can show how good a classifier is.
    """

    def __init__(self, vectors: Tensor | Coded, counts: Tensor, held_out: Tensor | None = None) -> None:
        self.vectors = Plain(vectors) if isinstance(vectors, Tensor) else vectors
        self.counts = counts
        self.held_out = held_out

    @classmethod
    def empty(cls, dimension: int = 0) -> FeatureMemory:
        """A memory of nothing."""
        return cls(torch.empty(0, dimension), torch.empty(0, dtype=torch.int64))

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> FeatureMemory:
        """The memory whose `tensors()` these are."""
        own = {name: tensor for name, tensor in tensors.items() if name not in ("counts", "held_out")}
        return cls(coded(own), tensors["counts"], tensors.get("held_out"))

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def rows(self) -> Tensor:
        """The vectors, float32 (n, d). Unless they are kept so, they are decoded each time that one asks."""
        return self.vectors.decoded()

    @property
    def codec(self) -> Codec:
        """How they are kept."""
        return self.vectors.codec

    @property
    def nbytes(self) -> int:
        """The bytes of what is kept, codebooks and all: the number the paper is about."""
        return self.vectors.nbytes

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, without what all rows share."""
        return self.vectors.row_bytes

    def tensors(self) -> dict[str, Tensor]:
        """All that is kept, by name."""
        marks = {} if self.held_out is None else {"held_out": self.held_out}
        return {**self.vectors.tensors(), "counts": self.counts, **marks}

    def chosen(self, rows: Tensor, counts: Tensor) -> FeatureMemory:
        """The memory of these rows (k,) alone, kept in the same way."""
        return FeatureMemory(self.vectors.chosen(rows), counts, None if self.held_out is None else self.held_out[rows])

    def marked(self, held_out: Tensor) -> FeatureMemory:
        """The same vectors, with those of held-out images marked."""
        return FeatureMemory(self.vectors, self.counts, held_out)

    def rearranged(self, new_rows: Tensor, sources: Tensor, counts: Tensor, coding: Coding = EXACT) -> FeatureMemory:
        """The memory of rows `new_rows[s]` for s in `sources` or, where s is negative, of this one's rows −1 − s.

        All of them are encoded together, and kept in the way that `coding` says.
        """
        # Vectors that were brought to unit length are no longer where their codes put them, and would move once more.
        old_rows = self.vectors.numbers() if self.codec == coding.used else self.rows
        return FeatureMemory(coding.encoded(_gathered(old_rows, new_rows, sources), self.vectors), counts)


@dataclass(frozen=True, eq=False)
class ImageMemory(_Grouped):
    """Images as they came, uint8 (n, h, w, c); or vectors (n, d), where those are the inputs."""

    rows: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...] = (0,)) -> ImageMemory:
        """A memory of nothing."""
        dtype = torch.uint8 if len(shape) == 3 else torch.float32
        return cls(torch.empty(0, *shape, dtype=dtype), torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """The bytes of what is kept."""
        return self.rows.nbytes

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return self.rows[:1].nbytes

    def tensors(self) -> dict[str, Tensor]:
        """All that is kept, by name."""
        return {"rows": self.rows, "counts": self.counts}

    def chosen(self, rows: Tensor, counts: Tensor) -> ImageMemory:
        """The memory of these rows (k,) alone."""
        return ImageMemory(self.rows[rows], counts)

    def rearranged(self, new_rows: Tensor, sources: Tensor, counts: Tensor) -> ImageMemory:
        """The memory of rows `new_rows[s]` for s in `sources` or, where s is negative, of this one's rows −1 − s."""
        return ImageMemory(_gathered(self.rows, new_rows, sources), counts)


def _gathered(old_rows: Tensor, new_rows: Tensor, sources: Tensor) -> Tensor:
    rows = new_rows.new_empty((len(sources), *new_rows.shape[1:]))
    for some in torch.arange(len(sources)).split(AT_A_TIME):  # images may be most of what the memory can hold
        old, new = some[sources[some] < 0], some[sources[some] >= 0]
        rows[old], rows[new] = old_rows[-1 - sources[old]], new_rows[sources[new]]
    return rows


@dataclass(frozen=True, eq=False)
class Memory:
    """All that a learner keeps of what it has seen."""

    features: FeatureMemory
    images: ImageMemory

    @property
    def nbytes(self) -> int:
        """The bytes of both."""
        return self.features.nbytes + self.images.nbytes


def select(memory: FeatureMemory, vectors: Tensor, class_indices: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
    """Which rows a memory of at most `per_class` rows of each class holds after new vectors (n, d) arrived.

    A class that receives new vectors is herded anew, from its old rows and the new ones together; any other keeps its
    first rows. Returns (sources, counts) as `rearranged` takes them. Images are chosen by their features, so `memory`
    is then that of the kept images' features in the same network.
    """
    unit, rows = F.normalize(vectors), memory.rows
    classes = max(len(memory.counts), int(class_indices.max()) + 1 if len(class_indices) else 0)
    slots = torch.arange(len(memory)).split(memory.counts.tolist())  # one tensor of rows per class so far
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
    """Say so if classes `among` (bool, (K,)) have fewer rows than were asked for."""
    short = counts[among & (counts < asked)]
    if len(short):
        who = f"{len(short)} classes have" if len(short) > 1 else "One class has"
        warnings.warn(
            f"{who} fewer than {asked} samples (the fewest: {int(short.min())}); all are kept.",
            EngramWarning,
            stacklevel=2,
        )


def preserved_bytes(
    classes: int, *, features_per_class: int = 0, dimension: int = 0, images_per_class: int = 0, image_bytes: int = 0
) -> int:
    """The bytes kept for so many classes, from sizes alone, as the paper counts them: float32 features, raw images."""
    return classes * (features_per_class * dimension * 4 + images_per_class * image_bytes)
