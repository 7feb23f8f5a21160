"""LUCIR, "Rebalancing" (Hou et al., CVPR 2019): a unified classifier through what is the same for old and new."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.errors import UsageError
from engram.methods.objectives import Lesson, Objective
from engram.network import CosineHead, Loss, extract
from engram.network.losses import feature_distillation, margin_ranking, softmax_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Rebalancing(Objective):
    """Cross-entropy of scaled cosines, the less-forget constraint, and margins between old classes and new ones."""

    defaults: ClassVar = {
        **{"head": "cosine", "last_relu": False},  # §3.2 and its note: features of both signs
        **{"epochs": 160, "rate": 0.1, "milestones": (0.5, 0.75), "decay": 10.0, "weight_decay": 5e-4},  # §4.1
    }
    of_later_tasks: ClassVar = frozenset(
        {
            *{"less_forget", "margin_weight", "margin", "hardest", "imprint", "fix_old"},
            *{"balanced_epochs", "balanced_rate"},
        }
    )

    less_forget: NonNegativeFloat = 5.0  # λ_base, Eq. 7; 10 on ImageNet, §4.1
    margin_weight: NonNegativeFloat = 1.0  # of L_mr in Eq. 9
    margin: NonNegativeFloat = 0.5  # m, §4.1
    hardest: PositiveInt = 2  # K, §4.1: how many new classes a sample of an old one is held against
    imprint: bool = True  # §4.1: a new class's weights begin at the mean of its features
    fix_old: bool = True  # the authors' code: the weights of old classes stay as they were
    balanced_epochs: NonNegativeFloat = 0.0  # §4.4: the head alone fine-tuned on as many of each class; share of epochs
    balanced_rate: NonNegativeFloat = 0.1  # ... as a share of the rate

    def prepare(self, lesson: Lesson) -> None:
        head = _cosine(lesson)
        if lesson.teacher is None or not self.imprint:
            return
        arrived = torch.arange(lesson.kept, len(lesson.columns))
        columns = lesson.columns[arrived]
        features = F.normalize(extract(lesson.teacher, lesson.samples.select(arrived), lesson.progress))
        for column in range(lesson.old, len(lesson.in_task)):
            mean = features[columns == column].mean(0)
            with torch.no_grad():
                head.weight[column] = F.normalize(mean, dim=0).to(head.weight.device)

    def loss(self, lesson: Lesson) -> Loss:
        student, teacher, old, head = lesson.student, lesson.teacher, lesson.old, _cosine(lesson)
        new = lesson.in_task.clone()
        new[:old] = False  # a known class that receives images is old all the same: its weights stay
        # λ = λ_base √(old / new), Eq. 7
        less_forget = self.less_forget * math.sqrt(old / max(1, int(new.sum())))

        def loss(inputs: Tensor, columns: Tensor) -> Tensor:
            features = student.features(inputs)
            cosines = head.cosines(features, fixed=old if self.fix_old else 0)
            total = softmax_cross_entropy(head.scale * cosines, columns)
            if teacher is None:
                return total
            with torch.no_grad():
                before = teacher.features(inputs)
            total = total + less_forget * feature_distillation(features, before)
            ranking = margin_ranking(cosines, columns, new, hardest=self.hardest, margin=self.margin)
            return total + self.margin_weight * ranking

        return loss

    def finish(self, lesson: Lesson) -> None:
        if lesson.teacher is None:
            return
        if self.fix_old:
            with torch.no_grad():  # nothing was learned through these rows, but weight decay has shortened them
                _cosine(lesson).weight[: lesson.old] = lesson.teacher.head.weight
        epochs = round(self.balanced_epochs * lesson.training.epochs)
        if lesson.kept and epochs:
            loss, rate = self._head_loss(lesson), self.balanced_rate * lesson.training.rate
            lesson.fine_tune(loss, lesson.balanced(), epochs=epochs, rate=rate)

    def _head_loss(self, lesson: Lesson) -> Loss:
        student = lesson.student

        def loss(inputs: Tensor, columns: Tensor) -> Tensor:
            student.extractor.eval()
            with torch.no_grad():
                features = student.features(inputs)
            return softmax_cross_entropy(student.head(features), columns)

        return loss


def _cosine(lesson: Lesson) -> CosineHead:
    if not isinstance(lesson.student.head, CosineHead):
        raise UsageError("The objective 'lucir' needs a cosine head. Leave out --set head=…")
    return lesson.student.head
