"""Classifiers with a closed form: they share moments, and leave out one sample at a time without refitting."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engram.features.classifiers.base import (
    SMALL,
    Classifier,
    disqualify_singletons,
    for_each,
    positions,
    regularised_factor,
    threads_for,
)
from engram.features.memory import Statistics, class_sums

GRAM_PANELS = 4  # more skip more of the upper triangle, but make smaller and slower matrix products
BLOCK_ROWS = 4096  # samples that are converted to float64 at a time, which bounds the memory
COARSE_CONDITION = 1e5  # largest condition number at which float32 still ranks the scores reliably
MOST_JUDGED = 5000  # samples; the standard error of an accuracy is then at most 0.7 %

Form = TypeVar("Form", bound="ClosedForm")
LeaveOneOut = Callable[[Tensor], Tensor]  # indices of samples (b,) -> their held-out scores (b, K)


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
    derived: dict[object, Moments] = field(default_factory=dict)  # those of lifted samples, by a key of the lift

    def __post_init__(self) -> None:
        if self.samples.device.type == "mps":  # Apple GPUs lack float64
            self.samples, self.labels = self.samples.cpu(), self.labels.cpu()
        self.dimension = self._lifted(self.samples[:1], torch.float64).shape[1]  # w, or d without a lift
        self.rank = len(self) if 2 * len(self) <= self.dimension else self.dimension  # r
        self.classes, self.members = self.labels.unique(return_inverse=True)  # (K,), (n,)
        self.counts = torch.bincount(self.members)  # (K,)
        self.alone = (self.counts == 1)[self.members]  # (n,)
        self.weights = (len(self.samples) / (len(self.classes) * self.counts.double()))[self.members]  # (n,)

    def prepare(self) -> None:
        """Compute everything now, before several threads ask for it."""
        _ = self.total, self.variance  # which need all others

    def __len__(self) -> int:
        return len(self.samples)

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
        yield from (torch.arange(len(self), device=self.samples.device) if indices is None else indices).split(
            BLOCK_ROWS
        )

    def in_features(self, weight: Tensor) -> Tensor:
        """Convert a weight (K, r) from the basis to the dimensions of the (lifted) samples: (K, dimension)."""
        return weight if self._span is None else weight @ self._span[1]

    def zeros(self, count: int, precision: torch.dtype = torch.float64) -> Tensor:
        """As many rows of zeros, in the basis: (count, r)."""
        return torch.zeros(count, self.rank, dtype=precision, device=self.samples.device)

    @property
    def multiplications(self) -> int:
        """About how many it takes to solve a system of equations and apply it to all samples."""
        return (len(self) + self.rank) * self.rank**2

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
        return self.means - self.centre

    @cached_property
    def within(self) -> Tensor:
        """The class-balanced within-class covariance (r, r), lower triangle only."""
        covariance = self.zeros(self.rank)
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

    def unit_sums(self, precision: torch.dtype = torch.float64) -> Tensor:
        """The sums over the normalised samples of each class: (K, r)."""
        sums = self.zeros(len(self.classes), precision)
        for block in self.blocks():
            sums += class_sums(normalize(self.rows(block, precision)), self.members[block], len(sums))
        return sums

    @cached_property
    def _span(self) -> tuple[Tensor, Tensor] | None:
        """Coordinates (n, n) of the samples in an orthonormal basis (n, d) of their span, if that is worth it."""
        if self.rank == self.dimension:
            return None
        basis, coordinates = torch.linalg.qr(self._lifted(self.samples, torch.float64).T)
        return coordinates.T.contiguous(), basis.T

    def _lifted(self, samples: Tensor, precision: torch.dtype) -> Tensor:
        return (samples if self.lift is None else self.lift(samples)).to(precision)


class GaussianMoments(Moments):
    """The moments of classes of whose unit vectors only the statistics are known."""

    def __init__(self, statistics: Statistics) -> None:
        self.samples = statistics.means[:0]
        self.counts, self.classes = statistics.counts, torch.arange(len(statistics))
        self.dimension = self.rank = statistics.means.shape[1]
        self.means, covariances = statistics.means.double(), statistics.covariances
        self.within = covariances.mean(0).tril() if len(covariances) else self.zeros(self.rank)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def unit_sums(self, precision: torch.dtype = torch.float64) -> Tensor:
        return (self.counts[:, None] * self.means).to(precision)


class ClosedForm(Classifier):
    """A classifier that is computed from `Moments`, so several can share them."""

    leaves_one_out: ClassVar = True
    most_dimensions: ClassVar[float] = math.inf  # of features for which `Auto` considers it

    @abstractmethod
    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Compute the state: classes (K,), weight (K, d), intercept (K,) and any others."""

    @abstractmethod
    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Return a function that scores samples as if each had been left out; `coarse` allows float32."""

    def variants(self) -> Sequence[Self]:
        """The settings among which leave-one-out accuracy is to choose; most classifiers leave none open."""
        return [self]

    def prepare(self, moments: Moments) -> None:
        """Compute what candidates share, before each of them is judged in a thread of its own."""
        moments.prepare()

    def solve_statistics(self, statistics: Statistics) -> dict[str, Tensor]:
        return self.solve(GaussianMoments(statistics))

    def held_out(self, moments: Moments, rows: Tensor, coarse: bool = False) -> Tensor:
        """Leave-one-out scores (m, K) of the samples at the indices `rows` (m,), float32."""
        score = self.leave_one_out(moments, coarse)
        scores = torch.empty(len(rows), len(moments.classes), device=moments.samples.device)
        for place in moments.blocks(torch.arange(len(rows), device=rows.device)):
            scores[place] = score(rows[place]).float()
        return disqualify_singletons(scores, moments.members[rows], moments.alone[rows])

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        moments = Moments(features, labels)
        with threads_for(moments.multiplications):
            return compare(self.variants(), moments).solve(moments)

    def _held_out(self, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        moments = Moments(features, labels)
        with threads_for(moments.multiplications):
            return compare(self.variants(), moments).held_out(moments, rows.to(moments.samples.device))


def add_gram(gram: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to the lower triangle of `gram` (d, d), which is the part that Cholesky reads.

    Skipping most of the upper triangle, which is left incomplete, saves a third of the time.
    """
    width = len(gram)
    step = math.ceil(width / GRAM_PANELS)

    def add(begin: int) -> None:
        panel = slice(begin, begin + step)
        gram[begin:, panel].addmm_(rows[:, begin:].T, rows[:, panel])

    panels = range(0, width, step)
    if len(rows) * width**2 <= SMALL:
        for_each(add, panels)
    else:
        for begin in panels:
            add(begin)


class Whitening:
    """Maps x to z = L⁻¹x, where L Lᵀ = A = gram + penalty · I, so that z·z' = xᵀA⁻¹x'.

    With `coarse`, it computes in float32 if A is surely well conditioned.
    """

    def __init__(self, gram: Tensor, penalty: float, coarse: bool) -> None:
        if coarse and float(gram.diagonal().sum()) <= COARSE_CONDITION * penalty:
            gram = gram.float()
        self.factor = regularised_factor(gram, penalty)  # (r, r)
        self.precision = self.factor.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.precision)
        whitened: Tensor = torch.linalg.solve_triangular(self.factor.T, rows, upper=True, left=False)
        return whitened


def compare(candidates: Sequence[Form], moments: Moments, significance: float = 0.0) -> Form:
    """The candidate with the highest leave-one-out accuracy; the first of equals, or if no class has two samples.

    With a `significance` the first candidate is preferred: any other must get more samples right than it does, by so
    many standard deviations of chance.
    """
    rows = judged_rows(moments.members)
    if len(candidates) == 1 or not len(rows):
        return candidates[0]
    for candidate in candidates:
        candidate.prepare(moments)
    scores = for_each(lambda candidate: candidate.held_out(moments, rows, coarse=True), candidates)
    members = moments.members[rows]
    correct = [each.argmax(dim=1) == members for each in scores]
    accuracies = [balanced_accuracy(scores[0], members)]
    for own, right in zip(scores[1:], correct[1:], strict=True):
        wins, losses = int((right & ~correct[0]).sum()), int((correct[0] & ~right).sum())
        chance = significance * math.sqrt(wins + losses)
        accuracies.append(balanced_accuracy(own, members) if not chance or wins - losses > chance else 0.0)
    return candidates[accuracies.index(max(accuracies))]


def judged_rows(members: Tensor) -> Tensor:
    """Indices of at most `MOST_JUDGED` samples, as many of each class as possible, evenly spaced within it.

    Classes of one sample are excluded, since nothing is left of them when that is held out.
    """
    counts = torch.bincount(members)  # (K,)
    counts = counts.where(counts > 1, 0)
    quotas = range(1, int(counts.max()) + 1)
    quota = max(1, bisect_right(quotas, MOST_JUDGED, key=lambda each: int(counts.clamp(max=each).sum())))
    # Sample j of n_c is judged if q_c j / n_c reaches another integer at j + 1, which happens q_c times.
    numbers, share, size = positions(members), counts.clamp(max=quota)[members], counts[members].clamp(min=1)
    judged = (numbers + 1) * share // size > numbers * share // size
    rows = judged.nonzero().squeeze(1)
    return rows[:: max(1, -(-len(rows) // MOST_JUDGED))]  # thinned if there are more classes than samples allowed


def balanced_accuracy(scores: Tensor, members: Tensor) -> float:
    """The mean over classes of the share of a class's samples (of m) whose highest score (m, K) is their own."""
    correct = (scores.argmax(dim=1) == members).double()
    counts = torch.bincount(members)
    right = torch.bincount(members, weights=correct)
    return float((right[counts > 0] / counts[counts > 0]).mean())
