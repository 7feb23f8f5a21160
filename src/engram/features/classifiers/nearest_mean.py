"""The nearest class mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engram.features.classifiers.closed_form import ClosedForm, LeaveOneOut
from engram.features.classifiers.moments import Moments
from engram.features.least_squares import class_sums


@dataclass
class NearestMean(ClosedForm):
    """The nearest of the normalised class means (iCaRL, Algorithm 1): for unit vectors, cosine similarity."""

    @property
    def description(self) -> str:
        return "nearest mean"

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Normalise the sums of the unit vectors of each class."""
        means = normalize(_unit_sums(moments))  # (K, r)
        # −‖x − m‖² = 2 m·x − ‖m‖² − 1 for a unit vector x.
        intercept = -means.square().sum(dim=1) - 1  # (K,)
        return {"classes": moments.classes, "weight": moments.in_features(2 * means), "intercept": intercept}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Subtract the sample from the sum of its class."""
        precision = torch.float32 if coarse else torch.float64
        sums = _unit_sums(moments, precision)  # (K, r)
        means = normalize(sums)
        squares = means.square().sum(dim=1)  # (K,)

        def score(rows: Tensor) -> Tensor:
            samples, own = normalize(moments.rows(rows, precision)), moments.members[rows]
            scores = 2 * samples @ means.T - squares - 1  # (b, K)
            rest = normalize(sums[own] - samples)  # (b, r)
            without = 2 * (rest * samples).sum(dim=1) - rest.square().sum(dim=1) - 1  # (b,)
            return scores.scatter_(1, own[:, None], without[:, None])

        return score

    def scores(self, features: Tensor) -> Tensor:
        """Minus the squared distance between the normalised features and every class mean: (n, K)."""
        return self._affine(normalize(features.float(), dim=-1))


def _unit_sums(moments: Moments, precision: torch.dtype = torch.float64) -> Tensor:
    """The sums over the normalised samples of each class: (K, r)."""
    sums = moments.zeros(len(moments.classes), precision)
    for block in moments.blocks():
        sums += class_sums(normalize(moments.rows(block, precision)), moments.members[block], len(sums))
    return sums
