"""Learning without memorizing (Dhar et al., CVPR 2019): the network keeps looking where the previous one looked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from engram.methods.objectives import Distillation, TrainingContext
from engram.network import Loss, Network
from engram.network.losses import fine


@dataclass(frozen=True, kw_only=True)
class AttentionDistillation(Distillation):
    """(L_CE + λ L_KD + attention L_AD) / K (Eq. 5), where L_AD is the distance between two maps of attention.

    They are the Grad-CAM maps, for the class that the teacher predicts, of the two extractors' last layers. Extractors
    of vectors have no maps, so L_AD is 0.
    """

    name: ClassVar = "lwm"
    of_later_tasks: ClassVar = Distillation.of_later_tasks | {"attention"}

    feature_distillation: NonNegativeFloat = 0.0  # not part of the method
    attention: NonNegativeFloat = 1.0  # γ, Eq. 5

    def loss(self, context: TrainingContext) -> Loss:
        student, teacher, others = context.student, context.teacher, super().loss(context)
        if teacher is None:
            return others

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            with last_map(student) as own, last_map(teacher) as before:
                total = others(inputs, class_indices)
            if not own:
                return total
            preferred = teacher.head(fine(before[0]).mean((2, 3))).argmax(1)  # (n,)
            maps = attention(student, own[0], preferred), attention(teacher, before[0], preferred).detach()
            return total + self.attention * attention_distance(*maps) / self.expected_classes

        return loss


@contextmanager
def last_map(network: Network) -> Iterator[list[Tensor]]:
    """A list that will hold the last map (n, c, h, w) of the extractor, whose mean over positions are the features."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            found[:] = [output]

    hooks = [module.register_forward_hook(keep) for module in network.extractor.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def attention(network: Network, maps: Tensor, class_indices: Tensor) -> Tensor:
    """Grad-CAM (n, h, w) of one class per image: ReLU of the maps (n, c, h, w), weighted by the score's gradient."""
    with torch.enable_grad():
        features = fine(maps).mean((2, 3))
        features = features if features.requires_grad else features.requires_grad_()
        scores = network.head(features).gather(1, class_indices[:, None]).sum()
        (gradient,) = torch.autograd.grad(scores, features, create_graph=True)  # the same at every position, times h w
    return (fine(maps) * gradient[:, :, None, None]).sum(1).relu()


def attention_distance(maps: Tensor, others: Tensor) -> Tensor:
    """L_AD (Eq. 4): the mean over images of the L1 distance between maps (n, h, w) of unit length."""
    unit, other = F.normalize(maps.flatten(1)), F.normalize(others.flatten(1))
    return (unit - other).abs().sum(1).mean()
