"""Objectives: what the training of a network makes small, put together from the losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.network import Loss, Network
from engram.network.losses import (
    feature_distillation,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    softmax_distillation,
)


class Objective(Protocol):
    """Makes the loss of one task's training."""

    def loss(self, student: Network, teacher: Network | None, in_task: Tensor) -> Loss:
        """The loss of `student`, of whose classes `in_task` (bool, (K,)) are in the task; `teacher`: the one before."""


@dataclass(frozen=True, kw_only=True)
class Classification:
    """L_CE (Eq. 2) over all classes, old ones too: an ordinary classifier that knows nothing of tasks."""

    loss_function: Literal["sigmoid", "softmax"] = "sigmoid"  # σ, §5.1
    expected_classes: PositiveInt = (
        100  # K: the paper's rate of 2.0 is for L / K, K the data set's classes (iCaRL's code)
    )

    def loss(self, student: Network, teacher: Network | None, in_task: Tensor) -> Loss:
        def loss(inputs: Tensor, columns: Tensor) -> Tensor:
            _, scores = student(inputs)
            return self.classification(scores, columns, torch.ones_like(in_task)) / self.expected_classes

        return loss

    def classification(self, scores: Tensor, columns: Tensor, among: Tensor) -> Tensor:
        """L_CE of scores (n, K); with sigmoids only of the classes `among` (bool, (K,))."""
        if self.loss_function == "softmax":
            return softmax_cross_entropy(scores, columns)
        targets = F.one_hot(columns, scores.shape[1]).to(scores.dtype)
        return sigmoid_cross_entropy(scores[:, among], targets[:, among])


@dataclass(frozen=True, kw_only=True)
class Distillation(Classification):
    """L_CE + λ L_KD + γ L_FD (Eq. 6): learn the task's classes, answer for the others as the teacher does.

    With sigmoids, a class in the task has one-hot targets and any other the teacher's answers alone, not zeros too.
    """

    distillation: NonNegativeFloat = 1.0  # λ, Eq. 4
    feature_distillation: NonNegativeFloat = 0.05  # γ, Eq. 6; §5.4

    def loss(self, student: Network, teacher: Network | None, in_task: Tensor) -> Loss:
        def first(inputs: Tensor, columns: Tensor) -> Tensor:
            _, scores = student(inputs)
            return self.classification(scores, columns, in_task) / self.expected_classes

        if teacher is None:
            return first
        old = teacher.classes
        others = ~in_task[:old]  # (K_old,): classes that only the teacher can answer for

        def loss(inputs: Tensor, columns: Tensor) -> Tensor:
            features, scores = student(inputs)
            with torch.no_grad():
                teacher_features, teacher_scores = teacher(inputs)
            total = self.classification(scores, columns, in_task)
            total = total + self.distillation * self._distil(scores[:, :old], teacher_scores, others)
            total = total + self.feature_distillation * feature_distillation(features, teacher_features)
            return total / self.expected_classes

        return loss

    def _distil(self, scores: Tensor, teacher_scores: Tensor, others: Tensor) -> Tensor:
        """L_KD (Eq. 3) of (n, K_old) scores, on the classes `others`."""
        if self.loss_function == "softmax":
            return softmax_distillation(scores[:, others], teacher_scores[:, others])
        return sigmoid_cross_entropy(scores[:, others], teacher_scores[:, others].sigmoid())
