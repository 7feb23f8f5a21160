"""Closed-form classifiers: ridge regression, LDA, the nearest mean, random projection, and the best of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import normalize

from engram.errors import DataError
from engram.features.classifiers.base import Classifier, regularised_factor, solve, threads_for
from engram.features.classifiers.closed_form import ClosedForm, LeaveOneOut, Moments, Whitening, compare
from engram.settings import INTERNAL

SEED = 2023  # of the random signs; saved models depend on it
PER_SAMPLE = 10  # random features per sample; more did not help on digits
PENALTIES = (0.01, 0.1, 0.001, 1.0)  # ties go to the first
SMALLEST_VARIANCE = 1e-6  # per dimension of a unit vector; one sample of each class would have none


@dataclass
class Ridge(ClosedForm):
    """Least squares on ±1 targets with an L2 penalty, a free intercept and balanced classes.

    The objective of scikit-learn's RidgeClassifier(class_weight="balanced"). Leave-one-out is exact for fixed sample
    weights: those of all n samples, n / (K n_c), which leaving out one sample would barely change.
    """

    label: ClassVar = "ridge (penalty {penalty:g})"
    statistics: ClassVar = "covariances"

    penalty: PositiveFloat = 1.0  # scikit-learn's alpha

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Solve the normal equations of the centred problem."""
        classes = len(moments.classes)
        factor = regularised_factor(moments.total, self.penalty)  # (r, r)
        # The weighted, centred samples sum to zero, so only class sums remain of their products with ±1 targets.
        weight = solve(factor, 2 * len(moments) / classes * moments.centred_means)  # (K, r)
        intercept = 2 / classes - 1 - weight @ moments.centre  # (K,)
        return {"classes": moments.classes, "weight": moments.in_features(weight), "intercept": intercept}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Divide each residual by 1 − h, h being the sample's leverage: the diagonal of the hat matrix."""
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

    label: ClassVar = "LDA (shrinkage {shrinkage:g})"
    statistics: ClassVar = "covariances"

    # Σ = (1 − shrinkage) · within-class covariance + shrinkage · mean variance · I; 1 classifies by the nearest mean.
    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.05

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

    label: ClassVar = "nearest mean"
    statistics: ClassVar = "means"

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


@dataclass
class RandomProjection(ClosedForm):
    """Ridge regression on h = relu(x W / √d), where W (d, width) is random signs (RanPAC, McDonnell et al., 2023).

    `weight_` is (K, width). W is regenerated and not part of the state. The penalty is relative to width / 2d, the
    expected squared length of h for a unit vector x; leave-one-out accuracy chooses it unless it is given.
    """

    saved: ClassVar = (*Classifier.saved, "dimension")
    most_dimensions: ClassVar = 256  # of raw vectors; it adds little to strong features

    width: PositiveInt = field(default=5000, metadata=INTERNAL)  # random features, at most ten per sample
    relative_penalty: PositiveFloat | None = field(default=None, metadata=INTERNAL)

    dimension_: int = field(init=False, repr=False, compare=False)  # d

    @property
    def description(self) -> str:
        width = self.weight_.shape[1] if "weight_" in vars(self) else self.width
        return f"random projection (width {width})"

    def variants(self) -> list[Self]:
        if self.relative_penalty is not None:
            return [self]
        return [replace(self, relative_penalty=penalty) for penalty in PENALTIES]

    def prepare(self, moments: Moments) -> None:
        lifted = self._lifted(moments)[1]
        with threads_for(lifted.multiplications):
            lifted.prepare()

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        ridge, lifted = self._lifted(moments)
        with threads_for(lifted.multiplications):
            return {**ridge.solve(lifted), "dimension": torch.tensor(moments.samples.shape[1])}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        ridge, lifted = self._lifted(moments)
        return ridge.leave_one_out(lifted, coarse)

    def scores(self, features: Tensor) -> Tensor:
        self.check_fitted()
        self._check_width(features, self.dimension_)
        return super().scores(project(features, self._signs))

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        super().restore(tensors)
        self.dimension_ = int(tensors["dimension"])
        self._signs = random_signs(self.dimension_, self.weight_.shape[1])  # not while a graph is traced
        return self

    def _lifted(self, moments: Moments) -> tuple[Ridge, Moments]:
        """The ridge regression to solve, and the moments of the random features."""
        assert self.relative_penalty is not None  # one of the variants
        width = min(self.width, PER_SAMPLE * len(moments))
        if width not in moments.derived:
            signs = random_signs(moments.samples.shape[1], width)
            moments.derived[width] = Moments(moments.samples, moments.labels, lambda rows: project(rows, signs))
        return Ridge(self.relative_penalty * width / (2 * moments.samples.shape[1])), moments.derived[width]


def project(features: Tensor, signs: Tensor) -> Tensor:
    """relu(x W / √d) for every row x of features (n, d) and signs W (d, width): (n, width), float32."""
    return torch.relu(features.detach().float() @ signs.to(features.device) / len(signs) ** 0.5)


@lru_cache(maxsize=4)
def random_signs(dimension: int, width: int) -> Tensor:
    """Random ±1 (dimension, width), float32, the same for ever; fewer columns are the first of more."""
    words = -(-dimension // 64)  # for each column
    # NumPy guarantees the stream of a bit generator, but not that of the distributions drawn from it.
    stream = np.random.PCG64(SEED).random_raw(words * width).astype("<u8")
    bits = np.unpackbits(stream.view(np.uint8), bitorder="little").reshape(width, 64 * words)[:, :dimension]
    return torch.from_numpy(2.0 * bits.T.astype(np.float32) - 1.0).contiguous()


# In order of preference among equally accurate ones. Saved models store an index, so only append to it.
CANDIDATES: tuple[ClosedForm, ...] = (
    *(Ridge(1.0), Ridge(0.3), Ridge(3.0)),
    *(LDA(0.2), LDA(0.5)),
    *(NearestMean(), RandomProjection(2000)),
)
FALLBACK = 5  # the nearest mean, if no class has two samples to compare by
SIGNIFICANT = 2.0  # standard deviations: the best of several on a few samples is mostly luck, and ridge mostly best


@dataclass
class Auto(ClosedForm):
    """Ridge regression, unless LDA, nearest means or random projection have a higher leave-one-out accuracy.

    The accuracy is class-balanced, and measured on at most 5,000 samples. After `fit`, `chosen_` is the classifier;
    `weight_` and `intercept_` are its own. `held_out_scores` are those of `chosen_`: the selection among up to seven
    candidates is not nested, so their accuracy is slightly optimistic. The benchmark measures by how much.
    """

    saved: ClassVar = (*Classifier.saved, "chosen")

    chosen_: ClosedForm = field(init=False, repr=False, compare=False)

    @property
    def description(self) -> str:
        return self.chosen_.description if "chosen_" in vars(self) else "best by leave-one-out"

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        index, chosen = choose(moments)
        return {**chosen.solve(moments), "chosen": torch.tensor(index)}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        fitted = "chosen_" in vars(self)
        chosen = compare(self.chosen_.variants(), moments) if fitted else choose(moments)[1]
        return chosen.leave_one_out(moments, coarse)

    def scores(self, features: Tensor) -> Tensor:
        self.check_fitted()
        return self.chosen_.scores(features)

    def state(self) -> dict[str, Tensor]:
        self.check_fitted()
        return {**self.chosen_.state(), "chosen": torch.tensor(self._index)}

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        super().restore(tensors)
        self._index = int(tensors["chosen"])
        if not 0 <= self._index < len(CANDIDATES):
            raise DataError(f"A saved Auto chose candidate {self._index}, and this version knows {len(CANDIDATES)}.")
        self.chosen_ = copy.copy(CANDIDATES[self._index]).restore(tensors)
        return self


def choose(moments: Moments) -> tuple[int, ClosedForm]:
    """The index in `CANDIDATES` of the most accurate one, and its variant with the most accurate settings."""
    if len(moments.classes) == 1 or not (moments.counts > 1).any():
        return FALLBACK, CANDIDATES[FALLBACK]
    considered = [each for each in enumerate(CANDIDATES) if moments.dimension <= each[1].most_dimensions]
    indices, variants = zip(*((index, form) for index, each in considered for form in each.variants()), strict=True)
    chosen = compare(variants, moments, SIGNIFICANT)
    return indices[variants.index(chosen)], chosen
