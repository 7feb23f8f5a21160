"""Classifiers with a closed form: they share moments, and leave out one sample at a time without refitting."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from engram.features.classifiers.base import Classifier, disqualify_singletons
from engram.features.classifiers.moments import Moments, coarsened
from engram.features.least_squares import regularised_factor

LeaveOneOut = Callable[[Tensor], Tensor]  # indices of samples (b,) -> their held-out scores (b, K)


class ClosedForm(Classifier):
    """A classifier that is computed from `Moments`, so several can share them."""

    @abstractmethod
    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Compute the state: classes (K,), weight (K, d), intercept (K,) and any others."""

    @abstractmethod
    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Return a function that scores samples as if each had been left out; `coarse` allows float32."""

    def tuned(self, moments: Moments) -> Self:
        """Choose the settings that were left open; most classifiers have none."""
        return self

    def held_out(self, moments: Moments, rows: Tensor, coarse: bool = False) -> Tensor:
        """Leave-one-out scores (m, K) of the samples at the indices `rows` (m,), float32."""
        score = self.leave_one_out(moments, coarse)
        scores = torch.empty(len(rows), len(moments.classes), device=moments.samples.device)
        for place in moments.blocks(torch.arange(len(rows), device=rows.device)):
            scores[place] = score(rows[place]).float()
        return disqualify_singletons(scores, moments.members[rows], moments.alone[rows])

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        moments = Moments(features, labels)
        return self.tuned(moments).solve(moments)

    def _held_out(self, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        moments = Moments(features, labels.to(features.device))
        return self.tuned(moments).held_out(moments, rows.to(moments.samples.device))


class Whitening:
    """Solves L z = x, where L Lᵀ = gram + penalty · I, so that inner products of z are those in the metric (L Lᵀ)⁻¹."""

    def __init__(self, gram: Tensor, penalty: float, coarse: bool) -> None:
        self.factor = regularised_factor(coarsened(gram, penalty) if coarse else gram, penalty)  # (r, r)

    def __call__(self, rows: Tensor) -> Tensor:
        """Whiten rows (b, r) into columns (r, b)."""
        whitened: Tensor = torch.linalg.solve_triangular(self.factor, rows.T.to(self.factor.dtype), upper=False)
        return whitened
