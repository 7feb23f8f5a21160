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
    """Cross-entropy over all classes, and for every earlier task's classes, as a head of their own, distillation.

    A last stage trains on as many images of new classes as of old ones; there the network of the stage before teaches
    the newest head too.
    """

    name: ClassVar = "eeil"
    defaults: ClassVar = {
        **{
            "head": "linear",
            "epochs": 40,
            "learning_rate": 0.1,
            "milestones": (0.25, 0.5, 0.75),
            "learning_rate_decay": 10.0,
        },  # §5.1
        **{"weight_decay": 1e-4, "brightness": 63.0, "contrast": 0.8, "gradient_noise": 0.3},  # §4.1, §5.1
    }
    of_later_tasks: ClassVar = frozenset(
        {"temperature", "head_distillation", "fine_tuning", "fine_tuning_learning_rate", "fine_tuning_milestones"}
    )

    temperature: PositiveFloat = 2.0  # T, §3.2
    head_distillation: NonNegativeFloat = 1.0  # the weight of every head's distillation in Eq. 1
    fine_tuning: NonNegativeFloat = 0.75  # §5.1: 30 epochs after 40, as a share of the epochs
    fine_tuning_learning_rate: PositiveFloat = 0.1  # §5.1: 0.01 after 0.1, as a share of the rate
    # the authors' code: 10 of the 30 epochs at each of three rates
    fine_tuning_milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (1 / 3, 2 / 3)

    def loss(self, context: TrainingContext) -> Loss:
        return self._loss(context, None)

    def finish(self, context: TrainingContext) -> None:
        epochs = round(self.fine_tuning * context.training.epochs)
        if not context.kept or not epochs:
            return
        loss = self._loss(context, context.student.frozen())
        learning_rate = self.fine_tuning_learning_rate * context.training.learning_rate
        context.fine_tune(
            loss, context.balanced(), epochs=epochs, learning_rate=learning_rate, milestones=self.fine_tuning_milestones
        )

    def _loss(self, context: TrainingContext, before: Network | None) -> Loss:
        """Eq. 1, F heads of old classes included; `before`: who teaches the newest head as well, in fine-tuning."""
        student, teacher, old = context.student, context.teacher, context.old
        heads = [
            (context.task_of_class[:old] == task).nonzero().squeeze(1) for task in context.task_of_class[:old].unique()
        ]
        newest = torch.arange(old, len(context.in_task), device=context.in_task.device)

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            _, scores = student(inputs)
            total = softmax_cross_entropy(scores, class_indices)
            if teacher is not None:
                with torch.no_grad():
                    _, answers = teacher(inputs)
                total = total + self._distil(scores, answers, heads)
            if before is not None and len(newest):
                with torch.no_grad():
                    _, answers = before(inputs)
                total = total + self._distil(scores, answers, [newest])
            return total

        return loss

    def _distil(self, scores: Tensor, answers: Tensor, heads: list[Tensor]) -> Tensor:
        """The sum over heads of Eq. 3: each a softmax over its own classes, not one over all."""
        parts = [softmax_distillation(scores[:, head], answers[:, head], self.temperature) for head in heads]
        return self.head_distillation * torch.stack(parts).sum()
