"""Ridge regression on ±1 targets with balanced classes: on the features, or on random nonlinear ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from engram.features.classifiers.base import Classifier
from engram.features.classifiers.closed_form import ClosedForm, LeaveOneOut, Moments, Whitening
from engram.features.linear_algebra import regularised_factor, solve, threads_for
from engram.settings import INTERNAL

SEED = 2023  # of the random signs; saved models depend on it
PER_SAMPLE = 10  # random features per sample; more did not help on digits
PENALTIES = (0.01, 0.1, 0.001, 1.0)  # ties go to the first


@dataclass
class Ridge(ClosedForm):
    """Least squares on ±1 targets with an L2 penalty, a free intercept and balanced classes.

    The objective of scikit-learn's RidgeClassifier(class_weight="balanced"). Leave-one-out is exact for fixed sample
    weights: those of all n samples, n / (K n_c), which leaving out one sample would barely change.
    """

    statistics: ClassVar = "covariances"

    penalty: PositiveFloat = 1.0  # scikit-learn's alpha

    @property
    def description(self) -> str:
        return f"ridge (penalty {self.penalty:g})"

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
        """One for each penalty, unless it is given."""
        if self.relative_penalty is not None:
            return [self]
        return [replace(self, relative_penalty=penalty) for penalty in PENALTIES]

    def prepare(self, moments: Moments) -> None:
        """Compute the moments of the random features."""
        lifted = self._lifted(moments)[1]
        with threads_for(lifted.multiplications):
            lifted.prepare()

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Solve ridge regression on the random features."""
        ridge, lifted = self._lifted(moments)
        with threads_for(lifted.multiplications):
            return {**ridge.solve(lifted), "dimension": torch.tensor(moments.samples.shape[1])}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Leave out samples of ridge regression on the random features."""
        ridge, lifted = self._lifted(moments)
        return ridge.leave_one_out(lifted, coarse)

    def scores(self, features: Tensor) -> Tensor:
        self.check_fitted()
        self._check_width(features, self.dimension_)
        return super().scores(project(features, self._signs))

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "dimension": torch.tensor(self.dimension_)}

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
            moments.derived[width] = Moments(moments.samples, moments.labels, lambda rows: project(rows, signs), width)
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
