"""BiC, "Large scale incremental learning" (Wu et al., CVPR 2019): distil, then correct the bias toward new classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from engram.methods.objectives import Objective, TrainingContext
from engram.network import CorrectedHead, Loss, Training, extract
from engram.network.losses import softmax_cross_entropy, softmax_distillation
from engram.network.training import uncompiled


@dataclass(frozen=True, kw_only=True)
class BiasCorrection(Objective):
    """(1 − λ) cross-entropy + λ distillation, λ the share of old classes (Eq. 3).

    With a corrected head, α and β are then fitted on held-out images (Eq. 4, 5). They correct the scores of the newest
    classes, also when this network is the next teacher. With another head nothing is corrected.
    """

    name: ClassVar = "bic"
    defaults: ClassVar = {
        **{"head": "corrected", "epochs": 250, "learning_rate": 0.1, "learning_rate_decay": 10.0},  # §5.2
        **{"milestones": (0.4, 0.6, 0.8), "weight_decay": 2e-4},  # §5.2
    }
    holds_out: ClassVar[bool] = True  # §3.3: one in ten exemplars, and as many samples of each new class
    of_later_tasks: ClassVar = frozenset({"temperature", "distillation_share", "beta_penalty", "weight_decay_falls"})

    temperature: PositiveFloat = 2.0  # T, §5.2
    distillation_share: NonNegativeFloat | None = None  # λ, Eq. 3; None: the share of classes that are not in the task
    beta_penalty: NonNegativeFloat = 0.1  # of ½ β², the authors' code; here also of ½ (α − 1)², see `fit_correction`

    weight_decay_falls: bool = False  # to 1 / t in task t from 1: on ImageNet, in the authors' code

    def training_of(self, training: Training, task: int) -> Training:
        if not self.weight_decay_falls:
            return training
        return replace(training, weight_decay=training.weight_decay / (task + 1))

    def loss(self, context: TrainingContext) -> Loss:
        student, teacher, old = context.student, context.teacher, context.old
        share = self.distillation_share
        if share is None:
            share = int((~context.in_task).sum()) / len(context.in_task)

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            _, scores = student(inputs)  # a head that has just grown corrects nothing
            classification = softmax_cross_entropy(scores, class_indices)
            if teacher is None:
                return classification
            with torch.no_grad():
                _, teacher_scores = teacher(inputs)  # corrected
            distillation = softmax_distillation(scores[:, :old], teacher_scores, self.temperature)
            return (1 - share) * classification + share * distillation

        return loss

    def finish(self, context: TrainingContext) -> None:
        head = context.student.head
        if not isinstance(head, CorrectedHead) or context.held_out is None or not context.exemplars:
            return
        samples, class_indices = context.held_out
        features = extract(context.student, samples, context.progress, "correct")
        with torch.no_grad():
            scores = head.uncorrected(features.to(head.weight.device)).cpu()
        alpha, beta = fit_correction(scores, class_indices, context.in_task.cpu(), self.beta_penalty)
        head.correct(alpha, beta, context.in_task)


def fit_correction(scores: Tensor, class_indices: Tensor, newest: Tensor, penalty: float) -> tuple[float, float]:
    """α and β that minimise the cross-entropy of scores (n, K), where the classes `newest` have scores α s + β.

    The authors take some steps of gradient descent; here the problem is solved. The penalty must then keep α near 1 as
    well as β near 0: if the few held-out images are separable, the loss falls for ever as α grows.
    """
    if not bool(newest[class_indices].any()) or bool(newest[class_indices].all()):
        return 1.0, 0.0  # samples of one kind alone say nothing about a bias between the two
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
