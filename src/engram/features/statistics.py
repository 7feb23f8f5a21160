"""Statistics of classes in place of their features: counts, means and, where they are wanted, covariances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engram.features.linear_algebra import class_sums

Covariance = Literal["none", "shared", "class"]


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
        """The statistics of no class."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, dimension), torch.empty(0, _size(dimension)))

    @classmethod
    def of(cls, features: Tensor, class_indices: Tensor, classes: int, covariance: Covariance) -> Statistics:
        """Those of features (n, d) of so many classes, some of which may have no sample."""
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
        """All that is stored, by name."""
        return {"counts": self.counts, "means": self.means, "triangles": self.triangles}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Statistics:
        """The statistics whose `tensors()` these are."""
        return cls(tensors["counts"], tensors["means"], tensors["triangles"]) if tensors else cls.empty()

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
        between = (before * share)[:, None, None] * shift[:, :, None] * shift[:, None, :]  # (K, d, d)
        scatters = [statistics._scatters(len(other)) for statistics in (self, other)]
        total = scatters[0] + scatters[1]
        if len(total):
            total = total + (between if len(total) == len(counts) else between.sum(0, keepdim=True))
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
        """The same with other means (K, d)."""
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


def statistics_bytes(classes: int, dimension: int, covariance: Covariance) -> int:
    """The bytes of the statistics of so many classes."""
    matrices = {"none": 0, "shared": 1, "class": classes}[covariance]
    return 4 * (classes * dimension + matrices * _size(dimension))


def _size(dimension: int) -> int:
    return dimension * (dimension + 1) // 2


def _packed(covariances: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(*covariances.shape[1:])
    return covariances[:, rows, columns].float()
