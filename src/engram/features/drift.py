"""Drift compensation: class statistics moved from the old network's feature space to the new one's.

To add a method, subclass `Compensation` as a dataclass whose fields are its settings, and enter it in `COMPENSATIONS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.features.adapters import affine_ridge, ridge_regression
from engram.features.memory import Statistics
from engram.network.training import uncompiled
from engram.randomness import generator

# Images of the task, perturbed so that their old features approach a mean: (mean (d,), positions (n,), steps, step
# size) -> old and new features (n, d)
Perturb = Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Drift:
    """How the features of the task's images moved: unit vectors of the old network and of the new one, (n, d)."""

    old: Tensor
    new: Tensor
    perturb: Perturb | None = None
    seed: int = 0
    task: int = 0


@dataclass(kw_only=True, eq=False)
class Compensation(ABC):
    """Estimates, from how the task's features moved, where the statistics of old classes are now."""

    name: ClassVar[str]
    needs_pairs: ClassVar[bool] = True  # extracting them is the costly part

    @abstractmethod
    def __call__(self, statistics: Statistics, drift: Drift) -> Statistics:
        """The statistics in the new feature space."""


@dataclass(kw_only=True, eq=False)
class NoCompensation(Compensation):
    """Leaves statistics as they are: right for a frozen network."""

    name: ClassVar = "identity"
    needs_pairs: ClassVar = False

    def __call__(self, statistics: Statistics, drift: Drift) -> Statistics:
        return statistics


@dataclass(kw_only=True, eq=False)
class SDC(Compensation):
    """Semantic drift compensation (Yu et al., CVPR 2020): a mean moves as the features near it did (Eq. 8-9)."""

    name: ClassVar = "sdc"

    sdc_sigma: PositiveFloat = 0.3  # σ of the Gaussian weights, for unit features

    def __call__(self, statistics: Statistics, drift: Drift) -> Statistics:
        means, old = statistics.means.double(), drift.old.double()
        logits = -torch.cdist(means, old).square() / (2 * self.sdc_sigma**2)  # (K, n)
        return statistics.with_means(means + logits.softmax(1) @ (drift.new.double() - old))


@dataclass(kw_only=True, eq=False)
class LDC(Compensation):
    """Learnable drift compensation (Gomez-Villa et al., ECCV 2024): a linear map learned by gradient descent.

    It starts at the identity; the authors' starts at random.
    """

    name: ClassVar = "ldc"

    ldc_epochs: PositiveInt = 20
    ldc_learning_rate: PositiveFloat = 1e-3  # Adam's
    ldc_batch: PositiveInt = 128

    def __call__(self, statistics: Statistics, drift: Drift) -> Statistics:
        linear = torch.eye(drift.old.shape[1], requires_grad=True)
        adam = uncompiled(torch.optim.Adam)
        optimiser = adam([linear], lr=self.ldc_learning_rate)
        for epoch in range(self.ldc_epochs):
            order = torch.randperm(len(drift.old), generator=generator(drift.seed, "ldc", drift.task, epoch))
            for batch in order.split(self.ldc_batch):
                optimiser.zero_grad()
                F.mse_loss(drift.old[batch] @ linear, drift.new[batch], reduction="sum").backward()
                optimiser.step()
        matrix = linear.detach().double()[None]
        return statistics.moved(matrix, matrix.new_zeros(1, matrix.shape[1]))


@dataclass(kw_only=True, eq=False)
class RidgeMap(Compensation):
    """An affine map in closed form, shrunk towards leaving vectors as they are."""

    name: ClassVar = "ridge"

    drift_penalty: PositiveFloat = 1e-3  # relative to the mean variance of the old features

    def __call__(self, statistics: Statistics, drift: Drift) -> Statistics:
        centre_old, centre_new, change = affine_ridge(drift.old.double(), drift.new.double(), self.drift_penalty)
        linear = torch.eye(len(change)).double() + change
        return statistics.moved(linear[None], (centre_new - centre_old @ linear)[None])


@dataclass(kw_only=True, eq=False)
class DPCR(Compensation):
    """Dual projection (He et al., DPCR, ICML 2025): P U Uᵀ, a ridge map P and the span U of the class's own features.

    The span is that of the old features, so it matters where a class has fewer images than features have dimensions.
    """

    name: ClassVar = "dpcr"

    drift_penalty: PositiveFloat = 1e-3  # relative to the mean square of the old features
    dpcr_span: PositiveFloat = 1e-6  # directions with less than this share of a class's largest variance are dropped

    def __call__(self, statistics: Statistics, drift: Drift) -> Statistics:
        linear = ridge_regression(drift.old.double(), drift.new.double(), self.drift_penalty)[None]  # P, (1, d, d)
        means, covariances = statistics.means.double(), statistics.covariances
        if len(covariances) == len(means):
            # Uncentred second moments, as in the paper: the mean is part of the span.
            moments = covariances + means[:, :, None] * means[:, None, :]
            sizes, directions = torch.linalg.eigh(moments)  # (K, d), (K, d, d)
            spanned = directions * (sizes > self.dpcr_span * sizes[:, -1:])[:, None, :]  # U
            linear = linear @ spanned @ spanned.mT
        return statistics.moved(linear, linear.new_zeros(1, linear.shape[1]))


@dataclass(kw_only=True, eq=False)
class ADC(Compensation):
    """Adversarial drift compensation (Goswami et al., CVPR 2024): images perturbed towards a mean show its drift.

    The gradient of all of a mean's images together is normalised, as in the authors' code.
    """

    name: ClassVar = "adc"

    adc_images: PositiveInt = 100  # perturbed images per old class: those nearest to its mean
    adc_steps: PositiveInt = 3
    # Root mean square of a step's change, in standard deviations of the inputs: α = 25 over √(100 images · 3 · 32 · 32)
    adc_step_size: PositiveFloat = 0.045

    def __call__(self, statistics: Statistics, drift: Drift) -> Statistics:
        assert drift.perturb is not None
        means = statistics.means
        nearest = torch.cdist(means, drift.old).topk(min(self.adc_images, len(drift.old)), largest=False).indices
        moved = []
        for class_index, mean in enumerate(means):
            old, new = drift.perturb(mean, nearest[class_index], self.adc_steps, self.adc_step_size)
            # Only images that the old network now takes for this class count, if there are any.
            reached = torch.cdist(old, means).argmin(1) == class_index
            used = reached if bool(reached.any()) else torch.ones_like(reached)
            moved.append(mean + (new[used] - old[used]).mean(0))
        return statistics.with_means(torch.stack(moved))


COMPENSATIONS: dict[str, type[Compensation]] = {
    kind.name: kind for kind in (NoCompensation, SDC, LDC, RidgeMap, DPCR, ADC)
}
