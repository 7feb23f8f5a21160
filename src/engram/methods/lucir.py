"""LUCIR, "Rebalancing" (Hou et al., CVPR 2019): a unified classifier through what is the same for old and new."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.methods.objectives import Objective, TrainingContext
from engram.network import CosineHead, Loss, extract
from engram.network.losses import feature_distillation, margin_ranking, softmax_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Rebalancing(Objective):
    """Cross-entropy of scaled cosines, the less-forget constraint, and margins between old classes and new ones."""

    name: ClassVar = "lucir"
    defaults: ClassVar = {
        **{"head": "cosine", "last_relu": False},  # §3.2 and its note: features of both signs
        **{"epochs": 160, "learning_rate": 0.1, "milestones": (0.5, 0.75), "learning_rate_decay": 10.0},  # §4.1
        **{"weight_decay": 5e-4},  # §4.1
    }
    of_later_tasks: ClassVar = frozenset(
        {"less_forget", "margin_weight", "margin", "top_k", "imprint", "freeze_old_weights"}
        | {"balanced_epochs", "balanced_learning_rate"}
    )

    less_forget: NonNegativeFloat = 5.0  # λ_base, Eq. 7; 10 on ImageNet, §4.1
    margin_weight: NonNegativeFloat = 1.0  # of L_mr in Eq. 9
    margin: NonNegativeFloat = 0.5  # m, §4.1
    top_k: PositiveInt = 2  # K, §4.1: how many new classes each sample of an old one is ranked against
    imprint: bool = True  # §4.1: a new class's weights start at the mean of its features
    freeze_old_weights: bool = True  # the authors' code: the head's weights of old classes are not trained
    balanced_epochs: NonNegativeFloat = 0.0  # §4.4: fine-tuning of the head on balanced classes, as a share of epochs
    balanced_learning_rate: NonNegativeFloat = 0.1  # ... as a share of the learning rate

    def prepare(self, context: TrainingContext) -> None:
        head = context.head(CosineHead)
        if context.teacher is None or not self.imprint:
            return
        class_indices = context.class_indices[context.arrived]
        features = F.normalize(extract(context.teacher, context.samples.select(context.arrived), context.progress))
        for class_index in range(context.old, len(context.in_task)):
            mean = features[class_indices == class_index].mean(0)
            with torch.no_grad():
                head.weight[class_index] = F.normalize(mean, dim=0).to(head.weight.device)

    def loss(self, context: TrainingContext) -> Loss:
        student, teacher, old, head = context.student, context.teacher, context.old, context.head(CosineHead)
        new = context.in_task.clone()
        new[:old] = False  # a known class that gets new images stays old
        # λ = λ_base √(old / new), Eq. 7
        less_forget = self.less_forget * math.sqrt(old / max(1, int(new.sum())))

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            features = student.features(inputs)
            cosines = head.cosines(features, fixed=old if self.freeze_old_weights else 0)
            total = softmax_cross_entropy(head.scale * cosines, class_indices)
            if teacher is None:
                return total
            with torch.no_grad():
                before = teacher.features(inputs)
            total = total + less_forget * feature_distillation(features, before)
            ranking = margin_ranking(cosines, class_indices, new, top_k=self.top_k, margin=self.margin)
            return total + self.margin_weight * ranking

        return loss

    def finish(self, context: TrainingContext) -> None:
        if context.teacher is None:
            return
        if self.freeze_old_weights:
            with torch.no_grad():  # they got no gradient, but weight decay
                context.head(CosineHead).weight[: context.old] = context.teacher.head.weight
        context.fine_tune(self._head_loss(context), self.balanced_epochs, self.balanced_learning_rate)

    def _head_loss(self, context: TrainingContext) -> Loss:
        student = context.student

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            student.extractor.eval()
            with torch.no_grad():
                features = student.features(inputs)
            return softmax_cross_entropy(student.head(features), class_indices)

        return loss
