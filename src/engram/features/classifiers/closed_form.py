"""Classifiers with a closed form: they share moments, and leave out one sample at a time without refitting."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

from engram.features.classifiers.base import Classifier, disqualify_singletons
from engram.features.classifiers.judging import judged_rows, most_accurate
from engram.features.classifiers.moments import Moments, coarsened
from engram.features.least_squares import regularised_factor
from engram.features.threads import for_each, threads_for

Form = TypeVar("Form", bound="ClosedForm")
LeaveOneOut = Callable[[Tensor], Tensor]  # indices of samples (b,) -> their held-out scores (b, K)


class ClosedForm(Classifier):
    """A classifier that is computed from `Moments`, so several can share them."""

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
            return best(self.variants(), moments).solve(moments)

    def _held_out(self, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        moments = Moments(features, labels.to(features.device))
        with threads_for(moments.multiplications):
            return best(self.variants(), moments).held_out(moments, rows.to(moments.samples.device))


def best(candidates: Sequence[Form], moments: Moments) -> Form:
    """The candidate with the highest leave-one-out accuracy; the first of equals, or if no class has two samples."""
    return compare(candidates, moments)[0]


def compare(
    candidates: Sequence[Form], moments: Moments, significance: float | None = None
) -> tuple[Form, Tensor, Tensor]:
    """The best candidate, the samples that candidates were compared on (m,), and its held-out scores of them (m, K).

    With a `significance`, the first, unless another is better by so many standard deviations.
    """
    rows = judged_rows(moments.members)
    if len(candidates) == 1 or not len(rows):
        return candidates[0], rows[:0], torch.empty(0, len(moments.classes))
    for candidate in candidates:
        candidate.prepare(moments)
    scores = for_each(lambda candidate: candidate.held_out(moments, rows, coarse=True), candidates)
    chosen = most_accurate(scores, moments.members[rows], significance)
    return candidates[chosen], rows, scores[chosen]


class Whitening:
    """Maps x to z = L⁻¹x, where L Lᵀ = A = gram + penalty · I, so that z·z' = xᵀA⁻¹x'; `coarse` allows float32."""

    def __init__(self, gram: Tensor, penalty: float, coarse: bool) -> None:
        self.factor = regularised_factor(coarsened(gram, penalty) if coarse else gram, penalty)  # (r, r)
        self.precision = self.factor.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        """Whiten rows (b, r)."""
        rows = rows.to(self.precision)
        whitened: Tensor = torch.linalg.solve_triangular(self.factor.T, rows, upper=True, left=False)
        return whitened
