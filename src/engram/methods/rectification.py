"""Scores corrected after training, because a few stored images make a network prefer new classes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch.nn import functional as F

from engram.methods.objectives import Classification, Distillation, TrainingContext
from engram.network import Loss, Network, ShiftedHead, extract


@dataclass(frozen=True, kw_only=True)
class IL2M(Classification):
    """L_CE over all classes; then the dual memory of Belouadah & Popescu (IL2M, ICCV 2019) rectifies old classes.

    Where a new class has the highest score, the probability of each old class is multiplied by its mean over the
    class's images when they were new, divided by the present mean over the stored ones, and by the network's mean
    confidence now, divided by that of the network then (Eq. 1).
    """

    name: ClassVar = "il2m"
    defaults: ClassVar = {"head": "shifted"}

    loss_function: Literal["sigmoid", "softmax"] = "softmax"

    def prepare(self, context: TrainingContext) -> None:
        context.head(ShiftedHead)

    def finish(self, context: TrainingContext) -> None:
        head = context.head(ShiftedHead)
        features = extract(context.student, context.samples, context.progress, "correct").to(head.weight.device)
        with torch.no_grad():
            probabilities = head(features).softmax(1)  # (n, K); the head has just been trained, without a shift
        class_indices = context.class_indices.to(probabilities.device)
        own = probabilities.gather(1, class_indices[:, None])[:, 0]
        counts = torch.bincount(class_indices, minlength=head.weight.shape[0])  # (K,)
        means = own.new_zeros(len(counts)).index_add_(0, class_indices, own) / counts.clamp(min=1)  # (K,)
        confidence = probabilities[context.exemplars :].amax(1).mean()
        known = ~context.in_task & (counts > 0) & (head.first_score > 0)
        factors = head.first_score / means * (confidence / head.first_confidence)
        head.set_shift(torch.where(known, factors.clamp(min=1e-30).log(), 0.0), context.in_task)
        head.first_score = torch.where(context.in_task, means, head.first_score)
        head.first_confidence = torch.where(context.in_task, confidence, head.first_confidence)


@dataclass(frozen=True, kw_only=True)
class ThresholdMoving(Distillation):
    """L_CE + λ L_KD; then the probability of each class is divided by its share of the targets in training.

    After Javed & Shafait, "Revisiting distillation and incremental classifier learning" (ACCV 2018, §5). A class's
    share counts the labels of its samples, and λ times the teacher's probabilities for all samples.
    """

    name: ClassVar = "threshold-moving"
    defaults: ClassVar = {"head": "shifted"}

    loss_function: Literal["sigmoid", "softmax"] = "softmax"

    def prepare(self, context: TrainingContext) -> None:
        context.head(ShiftedHead)

    def loss(self, context: TrainingContext) -> Loss:
        teacher = context.teacher
        return super().loss(context if teacher is None else replace(context, teacher=_unshifted(teacher)))

    def finish(self, context: TrainingContext) -> None:
        head, classes = context.head(ShiftedHead), len(context.in_task)
        targets = F.one_hot(context.class_indices, classes).double().sum(0)  # (K,)
        if context.teacher is not None:
            teacher = _unshifted(context.teacher)
            features = extract(teacher, context.samples, context.progress, "correct").to(head.weight.device)
            probabilities = (teacher.head(features).detach() / self.temperature).softmax(1).double().sum(0).cpu()
            targets[: context.old] += self.distillation * probabilities
        shares = (targets / targets.sum()).clamp(min=torch.finfo(torch.float32).tiny)
        head.set_shift(-shares.log(), torch.ones(classes, dtype=torch.bool))


def _unshifted(teacher: Network) -> Network:
    """The teacher with the scores that it was trained to give."""
    network = copy.deepcopy(teacher)
    if isinstance(network.head, ShiftedHead):
        network.head.set_shift(torch.zeros_like(network.head.shift), torch.zeros_like(network.head.preferred))
    return network
