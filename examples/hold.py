"""Cross-entropy over all classes, and features that stay near the teacher's."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat

from engram.methods import METHODS, OBJECTIVES, Memoryless, Method, Objective
from engram.network.losses import feature_distillation, softmax_cross_entropy


@dataclass(frozen=True, kw_only=True)
class HoldFeatures(Objective):
    """Classify, and keep features near the teacher's."""

    name: ClassVar = "hold"
    defaults: ClassVar = {"learning_rate": 0.1, "weight_decay": 5e-4}  # settings of the learner that go with this loss

    hold: NonNegativeFloat = 5.0  # the weight of feature distillation

    def loss(self, context):
        def loss(inputs, class_indices):
            features, scores = context.student(inputs)
            total = softmax_cross_entropy(scores, class_indices)
            if context.teacher is not None:
                with torch.no_grad():
                    before = context.teacher.features(inputs)
                total = total + self.hold * feature_distillation(features, before)
            return total

        return loss


OBJECTIVES["hold"] = HoldFeatures
METHODS["hold"] = Method(Memoryless, "feature distillation alone", "nothing", "hold")
