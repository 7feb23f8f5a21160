"""BiC, "Large scale incremental learning" (Wu et al., CVPR 2019): distil, then correct the bias toward new classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from engram.methods.objectives import Objective, TrainingContext
from engram.network import CorrectedHead, Loss, extract
from engram.network.losses import softmax_cross_entropy, softmax_distillation
from engram.network.training import uncompiled


@dataclass(frozen=True, kw_only=True)
class BiasCorrection(Objective):
    """(1 − λ) cross-entropy + λ distillation, λ the share of old classes (Eq. 3).

    With a corrected head, two numbers are then fitted on held-out images: they correct the scores of the newest
    classes, also those the next network is taught. With another head nothing is corrected.
    """

    name: ClassVar = "bic"
    defaults: ClassVar = {
        **{
            "head": "corrected",
            "epochs": 250,
            "learning_rate": 0.1,
            "milestones": (0.4, 0.6, 0.8),
            "learning_rate_decay": 10.0,
        },  # §5.2
        "weight_decay": 2e-4,  # §5.2
    }
    holds_out: ClassVar[bool] = True  # §3.3: one in ten of the kept images, and as many of new classes
    of_later_tasks: ClassVar = frozenset({"temperature", "distillation_share", "beta_penalty"})

    temperature: PositiveFloat = 2.0  # T, §5.2
    distillation_share: NonNegativeFloat | None = None  # λ, Eq. 3; None: the share of classes that are not in the task
    beta_penalty: NonNegativeFloat = 0.1  # on ½ β², the authors' code; ours also on ½ (α − 1)²: see `fit_correction`

    def loss(self, context: TrainingContext) -> Loss:
        student, teacher, old = context.student, context.teacher, context.old
        share = (
            self.distillation_share
            if self.distillation_share is not None
            else int((~context.in_task).sum()) / len(context.in_task)
        )

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            _, scores = student(inputs)  # a head that has just grown corrects nothing
            classification = softmax_cross_entropy(scores, class_indices)
            if teacher is None:
                return classification
            with torch.no_grad():
                _, answers = teacher(inputs)  # corrected
            distillation = softmax_distillation(scores[:, :old], answers, self.temperature)
            return (1 - share) * classification + share * distillation

        return loss

    def finish(self, context: TrainingContext) -> None:
        head = context.student.head
        if not isinstance(head, CorrectedHead) or context.held_out is None or not context.kept:
            return
        samples, class_indices = context.held_out
        features = extract(context.student, samples, context.progress, "correct")
        with torch.no_grad():
            scores = head.uncorrected(features.to(head.weight.device)).cpu()
        alpha, beta = fit_correction(scores, class_indices, context.in_task.cpu(), self.beta_penalty)
        head.correct(alpha, beta, context.in_task)


def fit_correction(scores: Tensor, class_indices: Tensor, newest: Tensor, penalty: float) -> tuple[float, float]:
    """α and β that make the cross-entropy of scores (n, K) smallest, those of the classes `newest` being α s + β.

    The authors take some steps of gradient descent; here the problem of two numbers is solved. So what keeps β near 0
    must keep α near 1: the few images that are held out may be told apart without a fault, and the more surely the
    larger α is.
    """
    if not bool(newest[class_indices].any()) or bool(newest[class_indices].all()):
        return 1.0, 0.0  # samples of one side alone say nothing of a bias between the two
    scores, neutral = scores.double(), torch.tensor([1.0, 0.0], dtype=torch.float64)
    pair = neutral.clone().requires_grad_()
    optimiser = uncompiled(torch.optim.LBFGS)(
        [pair], max_iter=200, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        corrected = torch.where(newest, pair[0] * scores + pair[1], scores)
        value = F.cross_entropy(corrected, class_indices) + penalty / 2 * (pair - neutral).square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    alpha, beta = pair.detach().tolist()
    return alpha, beta
