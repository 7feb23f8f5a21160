"""Classifiers by class means: linear discriminant analysis (LDA) and the nearest mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from engram.features.classifiers.closed_form import ClosedForm, LeaveOneOut, Moments, Whitening
from engram.features.linear_algebra import regularised_factor, solve

SMALLEST_VARIANCE = 1e-6  # per dimension of a unit vector; one sample of each class would have none


@dataclass
class LDA(ClosedForm):
    """Linear discriminant analysis: equally likely Gaussian classes that share one covariance.

    The model of scikit-learn's LinearDiscriminantAnalysis(solver="lsqr") with equal priors. It estimates only means
    and one covariance, so it tolerates few and noisy features. Scores are log-likelihoods up to a term that all
    classes share.

    Leave-one-out removes the sample from its class mean and from the covariance, by the Sherman–Morrison formula. The
    class weights n / (K n_c), the divisor n and the scale of the shrinkage target stay those of all samples: they are
    hyperparameters that one sample barely moves.
    """

    statistics: ClassVar = "covariances"

    # Σ = (1 − shrinkage) · within-class covariance + shrinkage · mean variance · I; 1 classifies by the nearest mean.
    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.05

    @property
    def description(self) -> str:
        return f"LDA (shrinkage {self.shrinkage:g})"

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Whiten the centred class means."""
        factor = regularised_factor(*self._covariance(moments))
        weight = solve(factor, moments.centred_means)  # (K, r)
        intercept = -(weight * (moments.means + moments.centre)).sum(dim=1) / 2  # (K,)
        return {"classes": moments.classes, "weight": moments.in_features(weight), "intercept": intercept}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Update inner products in the metric Σ⁻¹ for Σ − b u uᵀ, where u is the sample minus its class mean."""
        whiten = Whitening(*self._covariance(moments), coarse)
        means = whiten(moments.centred_means)  # (K, r)
        squares = means.square().sum(dim=1)  # (K,): ⟨m, m⟩
        others = (moments.counts - 1).clamp(min=1).to(means)  # (K,): n_c − 1; a single sample has u = 0
        removed = (1 - self.shrinkage) / (len(moments.classes) * others)  # (K,): b

        def score(rows: Tensor) -> Tensor:
            own = moments.members[rows]
            x = whiten(moments.centred_rows(rows, whiten.precision))  # (b, r)
            u = x - means[own]  # (b, r)
            mx, mu = x @ means.T, u @ means.T  # (b, K): ⟨m, x⟩ and ⟨m, u⟩
            mm = squares.repeat(len(rows), 1)  # (b, K): ⟨m, m⟩
            ux, uu = (u * x).sum(dim=1, keepdim=True), u.square().sum(dim=1, keepdim=True)  # (b, 1)
            # Without x, the mean of its class is m − u / (n_c − 1).
            class_index, moved = own[:, None], 1 / others[own][:, None]  # (b, 1)
            mm.scatter_add_(1, class_index, moved**2 * uu - 2 * moved * mu.gather(1, class_index))
            mx.scatter_add_(1, class_index, -moved * ux)
            mu.scatter_add_(1, class_index, -moved * uu)
            b = removed[own][:, None]
            gain = b / (1 - b * uu).clamp(min=torch.finfo(uu.dtype).eps)
            return mx + gain * mu * ux - (mm + gain * mu.square()) / 2

        return score

    def _covariance(self, moments: Moments) -> tuple[Tensor, float]:
        """The shrunk within-class covariance (r, r), and what is to be added to its diagonal."""
        return (1 - self.shrinkage) * moments.within, self.shrinkage * max(moments.variance, SMALLEST_VARIANCE)


@dataclass
class NearestMean(ClosedForm):
    """The nearest of the normalised class means (iCaRL, Algorithm 1): for unit vectors, cosine similarity.

    Scores are minus the squared distances between the normalised features and every class mean.
    """

    statistics: ClassVar = "means"

    @property
    def description(self) -> str:
        return "nearest mean"

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Normalise the sums of the unit vectors of each class."""
        means = normalize(moments.unit_sums())  # (K, r)
        # −‖x − m‖² = 2 m·x − ‖m‖² − 1 for a unit vector x.
        intercept = -means.square().sum(dim=1) - 1  # (K,)
        return {"classes": moments.classes, "weight": moments.in_features(2 * means), "intercept": intercept}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Subtract the sample from the sum of its class."""
        precision = torch.float32 if coarse else torch.float64
        sums = moments.unit_sums(precision)  # (K, r)
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
        return super().scores(normalize(features.float(), dim=-1))
