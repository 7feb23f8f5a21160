"""Class-balanced ridge regression on ±1 targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import PositiveFloat
from torch import Tensor

from engram.features.classifiers.closed_form import ClosedForm, LeaveOneOut, Whitening
from engram.features.classifiers.moments import Moments
from engram.features.least_squares import regularised_factor, solved


@dataclass
class Ridge(ClosedForm):
    """Least squares on ±1 targets with an L2 penalty, a free intercept and balanced classes.

    The objective of scikit-learn's RidgeClassifier(class_weight="balanced"). Leave-one-out is exact for fixed sample
    weights: those of all n samples, n / (K n_c), which leaving out one sample would barely change.
    """

    penalty: PositiveFloat = 1.0  # scikit-learn's alpha

    @property
    def description(self) -> str:
        return f"ridge (penalty {self.penalty:g})"

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Solve the normal equations of the centred problem."""
        self._check_positive(penalty=self.penalty)
        classes = len(moments.classes)
        factor = regularised_factor(moments.total, self.penalty)  # (r, r)
        # The weighted, centred samples sum to zero, so only class sums remain of their products with ±1 targets.
        right = 2 * len(moments) / classes * moments.centred_means  # (K, r)
        weight = solved(factor, right)  # (K, r)
        intercept = 2 / classes - 1 - weight @ moments.centre  # (K,)
        return {"classes": moments.classes, "weight": moments.in_features(weight), "intercept": intercept}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Divide each residual by 1 − h, h being the sample's leverage: the diagonal of the hat matrix."""
        self._check_positive(penalty=self.penalty)
        count, classes = len(moments), len(moments.classes)
        whiten = Whitening(moments.total, self.penalty, coarse)
        means = whiten(2 * count / classes * moments.centred_means)  # (K, r)

        def score(rows: Tensor) -> Tensor:
            samples = whiten(moments.centred_rows(rows, whiten.precision))  # (b, r)
            fitted = samples @ means.T + (2 / classes - 1)  # (b, K)
            leverage = moments.weights[rows].to(samples) * (1 / count + samples.square().sum(dim=1))  # (b,)
            targets = torch.full_like(fitted, -1.0).scatter_(1, moments.members[rows][:, None], 1.0)
            remaining = (1 - leverage).clamp(min=torch.finfo(fitted.dtype).eps)[:, None]
            return targets - (targets - fitted) / remaining

        return score

    def scores(self, features: Tensor) -> Tensor:
        """The least-squares estimate of +1 for the class and −1 for the rest: (n, K)."""
        return self._affine(features)
