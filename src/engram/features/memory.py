"""The memory of a learner: stored features, exemplars, statistics of classes; and herding, which chooses rows.

Rows of a class are contiguous, in herding order, and classes are in the order of their class indices. So labels cost
one count per class, and a class is trimmed by dropping its last rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from engram.errors import DataError, EngramWarning, TrainingError, UsageError
from engram.features.codecs import Codec, Encoded, Float32, Plain, restore_encoded
from engram.network import parallel

MEGABYTE = 2**20  # the paper's MB
COPIED_ROWS = 1024  # at a time: exemplars may take most of the machine's memory
ADAPTED_ROWS = 4096  # at a time: their hidden units are in memory
SUMMED_ROWS = 256  # samples in a block of class sums
LARGEST_GRAM = 8192  # vectors whose Gram matrix is worth its memory: 512 MB at the most
ROUNDING = 1e-12  # two scores nearer than this, relative to the lengths they come from, are a tie
FLOAT32 = Float32()

Covariance = Literal["none", "shared", "class"]


class _ClassRows:
    """Rows grouped by class."""

    def __init__(self, vectors: Tensor | Encoded, counts: Tensor, held_out: Tensor | None = None) -> None:
        self.vectors = Plain(vectors) if isinstance(vectors, Tensor) else vectors
        self.counts = counts  # int64 (K,): the number of rows of each class
        self.held_out = held_out  # bool (n,), or None where it is not recorded

    @classmethod
    def empty(cls, dimension: int = 0) -> Self:
        return cls(torch.empty(0, dimension), torch.empty(0, dtype=torch.int64))

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
        return self.vectors.row_bytes

    def tensors(self) -> dict[str, Tensor]:
        marks = {} if self.held_out is None else {"held_out": self.held_out}
        return {**self.vectors.tensors(), "counts": self.counts, **marks}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Self:
        counts = tensors["counts"]
        own = {name: tensor for name, tensor in tensors.items() if name not in ("counts", "held_out")}
        return cls(restore_encoded(own), counts, tensors.get("held_out"))

    def take(self, rows: Tensor, counts: Tensor) -> Self:
        return type(self)(self.vectors.take(rows), counts, None if self.held_out is None else self.held_out[rows])


class FeatureMemory(_ClassRows):
    """Unit feature vectors, float32 (n, d), as tensor or encoded.

    `held_out` marks vectors of images that no network was trained on: only those can measure a classifier's accuracy.
    """

    @property
    def codec(self) -> str:
        return self.vectors.codec

    def adapted(self, adapter: Callable[[Tensor], Tensor], device: torch.device | None = None) -> FeatureMemory:
        """The memory of the adapted vectors, as float32: φ(M)."""
        return FeatureMemory(adapt(adapter, self.rows, device), self.counts)

    def refitted(self) -> FeatureMemory:
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

    def rearranged(self, new_rows: Tensor, sources: Tensor, counts: Tensor) -> ImageMemory:
        """The memory of rows `new_rows[s]` for s in `sources` or, where s is negative, of its own rows −1 − s."""
        return ImageMemory(_gather(self.rows, new_rows, sources), counts)


def adapt(adapter: Callable[[Tensor], Tensor], vectors: Tensor, device: torch.device | None = None) -> Tensor:
    """The adapted vectors (n, d), computed in blocks on `device`; with several processes, each computes a part."""
    own = vectors[parallel.part(len(vectors))]
    return parallel.all_gather(torch.cat([adapter(block.to(device)).cpu() for block in own.split(ADAPTED_ROWS)]))


def _gather(old_rows: Tensor, new_rows: Tensor, sources: Tensor) -> Tensor:
    rows = new_rows.new_empty((len(sources), *new_rows.shape[1:]))
    for some in torch.arange(len(sources)).split(COPIED_ROWS):
        old, new = some[sources[some] < 0], some[sources[some] >= 0]
        rows[new] = new_rows[sources[new]]
        if len(old):
            rows[old] = old_rows[-1 - sources[old]]
    return rows


@dataclass(frozen=True, eq=False)
class Statistics:
    """Count and mean of every class, and covariances: one per class, one that all classes share, or none.

    Covariances are symmetric, so only their lower triangles are stored.
    """

    counts: Tensor  # int64 (K,): the samples behind the statistics of each class
    means: Tensor  # float32 (K, d)
    triangles: Tensor  # float32 (m, d (d + 1) / 2), where m is K, 1 or 0

    @classmethod
    def empty(cls, dimension: int = 0) -> Statistics:
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, dimension), torch.empty(0, _size(dimension)))

    @classmethod
    def of(cls, features: Tensor, class_indices: Tensor, classes: int, covariance: Covariance) -> Statistics:
        """The statistics of features (n, d) of so many classes; a class may have no sample."""
        features, dimension = features.double(), features.shape[1]
        counts = torch.bincount(class_indices, minlength=classes)  # (K,)
        means = class_sums(features, class_indices, classes) / counts.clamp(min=1)[:, None]
        centred = features - means[class_indices]
        if covariance == "none":
            scatters = features.new_empty(0, dimension, dimension)
        elif covariance == "shared":
            scatters = (centred.T @ centred)[None]
        else:
            rows = [centred[class_indices == class_index] for class_index in range(classes)]
            scatters = torch.stack([each.T @ each for each in rows])
        return cls._from_scatters(counts, means, scatters)

    @classmethod
    def _from_scatters(cls, counts: Tensor, means: Tensor, scatters: Tensor) -> Statistics:
        """From Σ (x − μ)(x − μ)ᵀ, (m, d, d), over the samples of each class or of all of them."""
        divisors = counts if len(scatters) == len(counts) else counts.sum()[None][: len(scatters)]
        return cls(counts, means.float(), _packed(scatters / divisors.clamp(min=1)[:, None, None]))

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        """The bytes of means and covariances; counts are labels, as in a memory of features."""
        return self.means.nbytes + self.triangles.nbytes

    @property
    def row_bytes(self) -> int:
        """The bytes of one class, without a covariance that all share."""
        own = len(self.triangles) == len(self)
        return 4 * (self.means.shape[1] + (self.triangles.shape[1] if own else 0))

    @property
    def covariances(self) -> Tensor:
        """Float64 (m, d, d)."""
        dimension = self.means.shape[1]
        rows, columns = torch.tril_indices(dimension, dimension)
        whole = torch.zeros(len(self.triangles), dimension, dimension, dtype=torch.float64)
        whole[:, rows, columns] = whole[:, columns, rows] = self.triangles.double()
        return whole

    def tensors(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "means": self.means, "triangles": self.triangles}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Statistics:
        return cls(**tensors) if tensors else cls.empty()

    def joined(self, other: Statistics) -> Statistics:
        """The statistics of the samples behind both; `other` has at least as many classes and the same covariances."""
        if not len(self):
            return other
        more = len(other) - len(self)
        before = torch.cat([self.counts, self.counts.new_zeros(more)])
        counts = before + other.counts
        means = torch.cat([self.means, self.means.new_zeros(more, self.means.shape[1])]).double()
        shift = other.means.double() - means  # (K, d)
        share = other.counts / counts.clamp(min=1)  # (K,)
        # Chan's formula: scatters add up, and so does the distance between the two means of a class.
        total = self._scatters(len(other)) + other._scatters(len(other))
        if len(total):
            rule = "k,ki,kj->kij" if len(total) == len(counts) else "k,ki,kj->ij"
            total = total + torch.einsum(rule, before * share, shift, shift)
        return self._from_scatters(counts, means + share[:, None] * shift, total)

    def _scatters(self, classes: int) -> Tensor:
        covariances = self.covariances
        if len(covariances) == len(self) and len(self):
            scatters = covariances * self.counts[:, None, None]
            return torch.cat([scatters, scatters.new_zeros(classes - len(self), *scatters.shape[1:])])
        return covariances * self.counts.sum()

    def moved(self, linear: Tensor, offset: Tensor) -> Statistics:
        """The statistics of x A + b: A (m, d, d) and b (m, d) for each covariance, or (1, …) for all classes."""
        means = (self.means.double()[:, None] @ linear).squeeze(1) + offset
        return Statistics(self.counts, means.float(), _packed(linear.mT @ self.covariances @ linear))

    def with_means(self, means: Tensor) -> Statistics:
        return Statistics(self.counts, means.float(), self.triangles)

    def sampled(self, per_class: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """Features (n, d) drawn from a Gaussian per class, and their class indices; without covariances, the means."""
        dimension, covariances = self.means.shape[1], self.covariances
        if not len(covariances):
            return self.means, torch.arange(len(self))
        sizes, directions = torch.linalg.eigh(covariances)  # few samples have a singular covariance
        factors = directions * sizes.clamp(min=0).sqrt()[:, None, :]  # (m, d, d)
        noise = torch.randn(len(self), per_class, dimension, generator=draws, dtype=torch.float64)
        rows = self.means.double()[:, None] + noise @ factors.mT  # (K, n, d)
        return rows.flatten(0, 1).float(), torch.arange(len(self)).repeat_interleave(per_class)

    def regrouped(self, groups: Sequence[Sequence[int]]) -> Statistics:
        """One class of each group of class indices; the others are dropped. Exact, but for a shared covariance."""
        if not len(self):
            return self
        counts = torch.stack([self.counts[list(group)].sum() for group in groups])
        weights = [
            self.counts[list(group)].double() / count.clamp(min=1) for group, count in zip(groups, counts, strict=True)
        ]
        own = self.means.double()
        means = torch.stack([weight @ own[list(group)] for group, weight in zip(groups, weights, strict=True)])
        if len(self.triangles) != len(self):
            return Statistics(counts, means.float(), self.triangles)
        covariances = []
        for group, weight, mean in zip(groups, weights, means, strict=True):
            shift = own[list(group)] - mean  # (g, d)
            inside = torch.einsum("g,gij->ij", weight, self.covariances[list(group)])
            covariances.append(inside + (shift * weight[:, None]).T @ shift)
        return Statistics(counts, means.float(), _packed(torch.stack(covariances)))


def class_sums(features: Tensor, members: Tensor, classes: int | None = None) -> Tensor:
    """Sum the features (n, d) of each class: (K, d). `members` (n,) are the indices of the classes."""
    counts = torch.bincount(members, minlength=classes or 0)  # (K,)
    sums = features.new_zeros(len(counts), features.shape[1])
    # Products with indicators add up in the same order every time, which index_add_ does not on a GPU. Sorted samples
    # have few classes in a block, so the indicators stay small.
    for block in members.argsort(stable=True).split(SUMMED_ROWS):
        found, rows = members[block].unique_consecutive(return_inverse=True)
        indicators = features.new_zeros(len(found), len(block)).scatter_(0, rows[None], 1.0)  # (k, b)
        sums[found] += indicators @ features[block]
    return sums


def statistics_bytes(classes: int, dimension: int, covariance: Covariance) -> int:
    """The bytes of the statistics of so many classes."""
    matrices = {"none": 0, "shared": 1, "class": classes}[covariance]
    return 4 * (classes * dimension + matrices * _size(dimension))


def _size(dimension: int) -> int:
    return dimension * (dimension + 1) // 2


def _packed(covariances: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(*covariances.shape[1:])
    return covariances[:, rows, columns].float()


@dataclass(frozen=True, eq=False)
class Memory:
    """All that a learner stores of the samples it has seen."""

    features: FeatureMemory = field(default_factory=FeatureMemory.empty)
    images: ImageMemory = field(default_factory=ImageMemory.empty)
    statistics: Statistics = field(default_factory=Statistics.empty)
    carried_bytes: int = 0  # of what the objective carries in the network from task to task

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + self.images.nbytes + self.statistics.nbytes + self.carried_bytes

    @property
    def shared_bytes(self) -> int:
        """The part that belongs to no single class, such as a codebook."""
        kinds = (self.features, self.images, self.statistics)
        return self.carried_bytes + sum(kind.nbytes - len(kind) * kind.row_bytes for kind in kinds)


def herd(vectors: Tensor, keep: int) -> Tensor:
    """Indices of `min(keep, n)` of the vectors (n, d), in the order the greedy definition picks them; int64.

    The k-th pick is the x, of those not yet picked, that minimises ‖mean − (sum of the picked + x) / k‖.
    Ties go to the lowest index.
    """
    if vectors.ndim != 2:
        raise DataError(f"Herding needs vectors of shape (n, d), and got the shape {tuple(vectors.shape)}.")
    if keep < 0:
        raise UsageError(f"Herding cannot keep {keep} vectors. Give 0 or more.")
    count = min(keep, len(vectors))
    if not count:
        return torch.empty(0, dtype=torch.int64)
    return parallel.broadcast(lambda: torch.from_numpy(_greedy(vectors.detach().cpu().double().numpy(), count)))


def _greedy(points: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    # With every x measured from the mean, k times the distance is ‖x + sum of the picked‖. Half its square is, but for
    # a term that all candidates share, ½‖x‖² + x · (sum of the picked): one inner product more after every pick.
    with np.errstate(invalid="ignore", over="ignore"):  # reported just below
        points = points - np.full(len(points), 1 / len(points)) @ points  # (n, d); a product is faster than a mean
        squares = np.einsum("nd,nd->n", points, points)  # (n,)
    if not np.isfinite(squares).all():
        raise TrainingError("Herding got vectors with NaN or infinity. Lower the learning rate, or check the images.")
    rounding = ROUNDING * np.sqrt(squares.max() * squares)  # (n,): how far each score may be off
    scores, width = squares / 2 - rounding, 2 * rounding  # (n,): the lowest that each may be, and how far up it may go
    # In float64: float32 inner products are too coarse to tell the candidates apart. All of them at once is fastest,
    # unless few are needed of many.
    gram = points @ points.T if len(points) <= min(LARGEST_GRAM, 16 * count) else None  # (n, n)
    picks, products = np.empty(count, np.int64), np.empty(len(points))
    for k in range(count):
        best = scores.argmin()
        pick = (scores <= scores[best] + width[best]).argmax()  # the first of those that tie with the best
        picks[k] = pick
        scores += np.dot(points, points[pick], out=products) if gram is None else gram[pick]
        scores[pick] = np.inf
    return picks


def select(memory: FeatureMemory, vectors: Tensor, class_indices: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
    """Choose at most `per_class` rows of each class from a memory and new vectors (n, d), by herding.

    A class with new vectors is herded anew, from its old rows and the new ones together; any other keeps its first
    rows. Returns (sources, counts) as `rearranged` takes them. Exemplars are chosen by their features, so `memory` then
    holds those of the stored images in the same network.
    """
    groups = select_among(memory, vectors, class_indices, per_class)
    return torch.cat([memory.counts[:0], *groups]), torch.tensor([len(group) for group in groups], dtype=torch.int64)


def select_among(
    memory: FeatureMemory, vectors: Tensor, class_indices: Tensor, per_class: int, among: Tensor | None = None
) -> list[Tensor]:
    """As `select`, the sources of each class; `among` (bool, (m + n,)) limits it to some stored and new rows."""
    unit, rows = F.normalize(vectors), memory.rows
    sources = torch.cat([-1 - torch.arange(len(memory)), torch.arange(len(unit))])
    members = torch.cat([memory.class_indices, class_indices])
    chosen = []
    for class_index in range(len(torch.bincount(members, minlength=len(memory.counts)))):
        own = sources[members == class_index if among is None else (members == class_index) & among]
        if bool((own >= 0).any()):
            own = own[herd(_gather(rows, unit, own), per_class)]
        chosen.append(own[:per_class])
    return chosen


def warn_of_small_classes(counts: Tensor, among: Tensor, asked: int) -> None:
    """Warn if classes `among` (bool, (K,)) have fewer rows than were asked for."""
    short = counts[among & (counts < asked)]
    if len(short):
        who = f"{len(short)} classes have" if len(short) > 1 else "One class has"
        what = f"{who} fewer than {asked} samples (the fewest: {int(short.min())}); all are kept."
        warnings.warn(what, EngramWarning, stacklevel=2)
