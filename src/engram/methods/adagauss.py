"""AdaGauss (Rypeść et al., NeurIPS 2024): distillation through a projection, and features that do not collapse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from engram.methods.objectives import Distillation, TrainingContext
from engram.network import Loss
from engram.network.losses import fine
from engram.randomness import seeded

RIDGE = 1e-4  # added to the covariance of a batch, which may be singular


@dataclass(frozen=True, kw_only=True)
class ProjectedDistillation(Distillation):
    """(L_CE + λ L_KD + projected ‖q(f(x)) − f_{t−1}(x)‖² + anti_collapse L_AC) / K (Eq. 4 and 6); its authors' λ is 0.

    q is an MLP from the new features to the old ones, trained with the network and then dropped: the new features need
    only determine the old ones. L_AC, in the first task too, rewards a large variance in every direction.
    """

    name: ClassVar = "adagauss"
    of_later_tasks: ClassVar = Distillation.of_later_tasks | {"projected", "projection_width"}

    feature_distillation: NonNegativeFloat = 0.0  # has no effect: the penalty on drift is another
    projected: NonNegativeFloat = 10.0  # λ, §4.1
    anti_collapse: NonNegativeFloat = 1.0  # β, §4.1
    projection_width: PositiveInt = 32  # hidden units of q, as a multiple of d; §4.1

    def loss(self, context: TrainingContext) -> Loss:
        if context.teacher is not None:
            return super().loss(context)
        student, everything = context.student, torch.ones_like(context.in_task)

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            features, scores = student(inputs)
            penalty = self.anti_collapse * collapse(fine(features)) / self.expected_classes
            return self.classification(scores, class_indices, everything) + penalty

        return loss

    def drift_penalty(self, context: TrainingContext) -> Callable[[Tensor, Tensor], Tensor]:
        student, d = context.student, context.student.dimension
        with seeded(context.seed, "projection", context.task):
            hidden = nn.Linear(d, self.projection_width * d)
            student.auxiliary["projection"] = nn.Sequential(hidden, nn.GELU(), nn.Linear(self.projection_width * d, d))
        projection = student.auxiliary["projection"].to(student.mean.device)

        def penalty(features: Tensor, before: Tensor) -> Tensor:
            distance = F.mse_loss(fine(projection(features)), fine(before))
            return (self.projected * distance + self.anti_collapse * collapse(fine(features))) / self.expected_classes

        return penalty


def collapse(features: Tensor) -> Tensor:
    """L_AC (Eq. 6): minus the mean diagonal, at most 1 each, of the Cholesky factor of the batch's covariance."""
    covariance = torch.cov(features.T) + RIDGE * torch.eye(features.shape[1], device=features.device)
    factor: Tensor = torch.linalg.cholesky(covariance)
    return -factor.diagonal().clamp(max=1).mean()
