"""End-to-end incremental learning (Castro et al., ECCV 2018): cross-distilled loss, then balanced fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from engram.methods.objectives import Objective, TrainingContext
from engram.network import Loss, Network
from engram.network.losses import softmax_cross_entropy, softmax_distillation


@dataclass(frozen=True, kw_only=True)
class CrossDistillation(Objective):
    """Cross-entropy over all classes, and distillation of every earlier task's classes as a head of their own.

    A last stage trains on equally many images of all classes. There every head is distilled, the newest too, from the
    network before that stage.
    """

    name: ClassVar = "eeil"
    defaults: ClassVar = {
        **{"head": "linear", "epochs": 40, "learning_rate": 0.1, "milestones": (0.25, 0.5, 0.75)},  # §5.1
        **{"learning_rate_decay": 10.0, "weight_decay": 1e-4},  # §5.1
        **{"brightness": 63.0, "contrast": 0.8, "gradient_noise": 0.3},  # §4.1, §5.1
    }
    of_later_tasks: ClassVar = frozenset(
        {"temperature", "head_distillation", "fine_tuning", "fine_tuning_learning_rate", "fine_tuning_milestones"}
    )

    temperature: PositiveFloat = 2.0  # T, §3.2
    head_distillation: NonNegativeFloat = 1.0  # the weight of every head's distillation in Eq. 1
    fine_tuning: NonNegativeFloat = 0.75  # §5.1: 30 epochs after 40, as a share of the epochs
    fine_tuning_learning_rate: PositiveFloat = 0.1  # §5.1: 0.01 after 0.1, as a share of the learning rate
    fine_tuning_milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (1 / 3, 2 / 3)  # the authors' code

    def loss(self, context: TrainingContext) -> Loss:
        return self._loss(context, None)

    def finish(self, context: TrainingContext) -> None:
        loss = self._loss(context, context.student.frozen())
        milestones = self.fine_tuning_milestones
        context.fine_tune(loss, self.fine_tuning, self.fine_tuning_learning_rate, milestones=milestones)

    def _loss(self, context: TrainingContext, before: Network | None) -> Loss:
        """Eq. 1 with a head per earlier task; in fine-tuning, `before` teaches every head (the authors' code)."""
        student, teacher = context.student, before or context.teacher
        tasks = context.task_of_class[: teacher.classes] if teacher is not None else context.task_of_class[:0]
        heads = [(tasks == task).nonzero().squeeze(1) for task in tasks.unique()]

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            _, scores = student(inputs)
            total = softmax_cross_entropy(scores, class_indices)
            return total if teacher is None else total + self._distil(scores, teacher, inputs, heads)

        return loss

    def _distil(self, scores: Tensor, teacher: Network, inputs: Tensor, heads: list[Tensor]) -> Tensor:
        """The sum over heads of Eq. 3, each with a softmax over its own classes."""
        with torch.no_grad():
            _, targets = teacher(inputs)
        parts = [softmax_distillation(scores[:, head], targets[:, head], self.temperature) for head in heads]
        return self.head_distillation * torch.stack(parts).sum()
