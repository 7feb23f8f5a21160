"""Class-balanced moments of labelled samples, from which the closed-form classifiers are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from engram.features.classifiers.base import indexed
from engram.features.least_squares import add_gram, class_sums

BLOCK_ROWS = 4096  # samples that are converted to float64 at a time, which bounds the memory
COARSE_CONDITION = 1e5  # largest condition number at which float32 still ranks the scores reliably


@dataclass(eq=False)
class Moments:
    """Means and scatter of samples (n, d), each class weighing as much as any other; computed when first needed.

    With n_c samples in class c, its samples weigh n / (K n_c), so all weights sum to n. With at most half as many
    samples as dimensions, everything is expressed in an orthonormal basis of their span, which has r = n dimensions;
    otherwise r is the dimension of the lifted samples. Ridge regression, LDA and nearest means are invariant to this.
    """

    samples: Tensor  # (n, d), in any floating-point type; converted in blocks
    labels: Tensor  # (n,)
    lift: Callable[[Tensor], Tensor] | None = None  # applied to rows (b, d): (b, w)
    lifted_width: int | None = None  # w
    derived: dict[object, Moments] = field(default_factory=dict)  # those of lifted samples, by a key of the lift

    def __post_init__(self) -> None:
        if self.samples.device.type == "mps":  # Apple GPUs lack float64
            self.samples, self.labels = self.samples.cpu(), self.labels.cpu()
        self.classes, self.members = indexed(self.labels)
        self.counts = torch.bincount(self.members)  # (K,)
        self.alone = (self.counts == 1)[self.members]  # (n,)
        self.weights = (len(self.samples) / (len(self.classes) * self.counts.double()))[self.members]  # (n,)

    def prepare(self) -> None:
        """Compute everything now, before several threads ask for it."""
        _ = self.total, self.variance  # which need all others

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def dimension(self) -> int:
        """The dimension of the (lifted) samples."""
        return self.samples.shape[1] if self.lifted_width is None else self.lifted_width

    def rows(self, indices: Tensor, precision: torch.dtype = torch.float64) -> Tensor:
        """The samples at these indices (b,), in the basis: (b, r)."""
        if self._span is not None:
            return self._span[0][indices].to(precision)
        return self._lifted(self.samples[indices], precision)

    def centred_rows(self, indices: Tensor, precision: torch.dtype = torch.float64) -> Tensor:
        """The samples at these indices (b,) relative to the centre, in the basis: (b, r)."""
        return self.rows(indices, precision) - self.centre.to(precision)

    def blocks(self, indices: Tensor | None = None) -> Iterator[Tensor]:
        """Split indices (all by default) so that the rows of each block fit in little memory."""
        if indices is None:
            indices = torch.arange(len(self), device=self.samples.device)
        yield from indices.split(BLOCK_ROWS)

    def in_features(self, weight: Tensor) -> Tensor:
        """Convert a weight (K, r) from the basis to the dimensions of the (lifted) samples: (K, dimension)."""
        return weight if self._span is None else weight @ self._span[1]

    def zeros(self, count: int, precision: torch.dtype = torch.float64) -> Tensor:
        """As many rows of zeros, in the basis: (count, r)."""
        return torch.zeros(count, self._rank, dtype=precision, device=self.samples.device)

    @property
    def multiplications(self) -> int:
        """About how many it takes to solve a system of equations and apply it to all samples."""
        return (len(self) + self._rank) * self._rank**2

    @cached_property
    def means(self) -> Tensor:
        """The mean of each class: (K, r)."""
        sums = self.zeros(len(self.classes))
        for block in self.blocks():
            sums += class_sums(self.rows(block), self.members[block], len(self.classes))
        return sums / self.counts[:, None]

    @cached_property
    def centre(self) -> Tensor:
        """The weighted mean of all samples, which is the mean of the class means: (r,)."""
        return self.means.mean(dim=0)

    @cached_property
    def centred_means(self) -> Tensor:
        """The class means relative to the centre: (K, r)."""
        return self.means - self.centre

    @cached_property
    def within(self) -> Tensor:
        """The class-balanced within-class covariance (r, r), lower triangle only."""
        covariance = self.zeros(self._rank)
        scales = (self.weights / len(self)).sqrt()[:, None]  # (n, 1)
        for block in self.blocks():
            add_gram(covariance, (self.rows(block) - self.means[self.members[block]]) * scales[block])
        return covariance

    @cached_property
    def total(self) -> Tensor:
        """The weighted scatter Σ w (x − centre)(x − centre)ᵀ (r, r), lower triangle only."""
        scatter = len(self) * self.within
        add_gram(scatter, (len(self) / len(self.classes)) ** 0.5 * self.centred_means)
        return scatter

    @cached_property
    def variance(self) -> float:
        """The mean over the dimensions of the within-class variance."""
        return float(self.within.diagonal().sum()) / self.dimension

    @cached_property
    def _span(self) -> tuple[Tensor, Tensor] | None:
        """Coordinates (n, n) of the samples in an orthonormal basis (n, d) of their span, if that is worth it."""
        if self._rank == self.dimension:
            return None
        basis, coordinates = torch.linalg.qr(self._lifted(self.samples, torch.float64).T)
        return coordinates.T.contiguous(), basis.T

    @property
    def _rank(self) -> int:
        return len(self) if 2 * len(self) <= self.dimension else self.dimension

    def _lifted(self, samples: Tensor, precision: torch.dtype) -> Tensor:
        return (samples if self.lift is None else self.lift(samples)).to(precision)


def coarsened(gram: Tensor, penalty: float) -> Tensor:
    """The Gram matrix in float32 if gram + penalty · I is surely well conditioned, otherwise as it is."""
    return gram.float() if float(gram.diagonal().sum()) <= COARSE_CONDITION * penalty else gram
