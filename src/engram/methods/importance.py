"""Weight importance: weights that mattered for earlier tasks are held near their old values (EWC and MAS)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from engram.methods.objectives import Classification, TrainingContext
from engram.network import Carried, Loss, Network, parallel


@dataclass(frozen=True, kw_only=True)
class WeightImportance(Classification):
    """L_CE of the task's classes + importance / 2 · Σ Ω (θ − θ*)², over the weights θ of the extractor.

    θ* are the weights before the task. Ω, of the same shapes, is carried from task to task.
    """

    carries: ClassVar = True
    of_later_tasks: ClassVar = frozenset({"importance"})

    importance: NonNegativeFloat
    importance_samples: PositiveInt = 500  # images of a task from which Ω is estimated
    importance_decay: NonNegativeFloat = 1.0  # of the earlier tasks' Ω with every task; 1: their sum

    def loss(self, context: TrainingContext) -> Loss:
        student, in_task = context.student, context.in_task
        # Gradient descent diverges if the curvature exceeds about 2 / learning rate.
        most = 1 / context.training.learning_rate
        weights = _weights(student)
        held = [
            (weights[name], weights[name].detach().clone(), (self.importance * omega).clamp(max=most))
            for name, omega in student.carried.tensors().items()
            if name in weights
        ]

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            _, scores = student(inputs)
            total = self.classification(scores, class_indices, in_task)
            for weight, before, curvature in held:
                total = total + (curvature * (weight - before).square()).sum() / 2
            return total

        return loss

    def finish(self, context: TrainingContext) -> None:
        student = context.student
        own, before = parallel.broadcast(lambda: self._importance(context)), student.carried.tensors()
        student.carried = Carried(
            {name: self.importance_decay * before.get(name, 0) + omega for name, omega in own.items()}
        )

    def carried_bytes(self, network: Network) -> int:
        return sum(weight.nbytes for weight in network.extractor.parameters())

    def _importance(self, context: TrainingContext) -> dict[str, Tensor]:
        """Ω of the task: the mean over some of its images of what `weigh` makes of each one's gradient."""
        student, device = context.student.eval(), context.student.mean.device
        weights = _weights(student)
        if not weights:  # only the head was trained
            return {}
        omega = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        some = context.arrived[:: max(1, -(-len(context.arrived) // self.importance_samples))]
        for position in some.split(1):  # one at a time: the square of a mean gradient is not the mean of the squares
            _, scores = student(context.samples.batch(position).to(device))
            output = self.output(scores, context.class_indices[position].to(device), context.in_task)
            gradients = torch.autograd.grad(output, list(weights.values()), materialize_grads=True)
            for total, gradient in zip(omega.values(), gradients, strict=True):
                total += self.weigh(gradient)
        return {name: total / max(1, len(some)) for name, total in omega.items()}

    @abstractmethod
    def output(self, scores: Tensor, class_indices: Tensor, in_task: Tensor) -> Tensor:
        """The number, from the scores (1, K) of one image, whose change a weight should not cause."""

    @abstractmethod
    def weigh(self, gradient: Tensor) -> Tensor:
        """The importance of weights, given the gradient of `output` for one image."""


@dataclass(frozen=True, kw_only=True)
class EWC(WeightImportance):
    """Elastic weight consolidation (Kirkpatrick et al., PNAS 2017), with one running Ω (Schwarz et al., 2018).

    Ω is the diagonal of the empirical Fisher information: squared gradients of the log-likelihood of the labels.
    """

    name: ClassVar = "ewc"

    importance: NonNegativeFloat = 100.0  # λ, Eq. 3; chosen on digits: it depends on the scale of the loss

    def output(self, scores: Tensor, class_indices: Tensor, in_task: Tensor) -> Tensor:
        return self._cross_entropy(scores, class_indices, in_task)

    def weigh(self, gradient: Tensor) -> Tensor:
        return gradient.square()


@dataclass(frozen=True, kw_only=True)
class MAS(WeightImportance):
    """Memory aware synapses (Aljundi et al., ECCV 2018): how much a weight changes the squared length of the scores."""

    name: ClassVar = "mas"

    importance: NonNegativeFloat = 0.001  # 2 λ, Eq. 4; chosen on digits

    def output(self, scores: Tensor, class_indices: Tensor, in_task: Tensor) -> Tensor:
        return scores.square().sum()  # Eq. 3

    def weigh(self, gradient: Tensor) -> Tensor:
        return gradient.abs()


def _weights(network: Network) -> dict[str, Tensor]:
    return {name: weight for name, weight in network.extractor.named_parameters() if weight.requires_grad}
