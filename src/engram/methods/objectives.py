"""Objectives: what the training of a network makes small, put together from the losses.

An objective is half of a method; the other half is what is kept. Any goes with any, as far as it makes sense.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples
from engram.features import herd
from engram.network import Loss, Network, Training, extract
from engram.network.losses import (
    feature_distillation,
    fine,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    softmax_distillation,
)
from engram.progress import SILENT, Progress
from engram.randomness import derive


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingContext:
    """The training of one network on one task, as its objective sees it."""

    student: Network  # the network to be trained, its head grown
    teacher: Network | None  # the one before, frozen; None in the first task
    samples: Samples  # what is trained on: the images that were kept first, then the task's
    class_indices: Tensor  # int64 (n,): their classes, as columns of the student's head
    kept: int  # how many of them were kept from earlier tasks
    in_task: Tensor  # bool (K,): the classes of the task; on the student's device
    task_of_class: Tensor  # int64 (K,): the task that brought each class; there too
    held_out: tuple[Samples, Tensor] | None = None  # samples, and columns, that are not trained on
    training: Training
    seed: int
    task: int
    progress: Progress = SILENT

    @property
    def old(self) -> int:
        """How many classes the teacher knows."""
        return self.teacher.classes if self.teacher is not None else 0

    def balanced(self) -> Tensor:
        """Positions of as many images of every class: those kept, and of the task's those that its classes lack.

        These are herded by the student's features.
        """
        kept = torch.bincount(self.class_indices[: self.kept], minlength=len(self.in_task))  # (K,)
        per_class = int(kept.max())
        features = F.normalize(extract(self.student, self.samples, self.progress))
        chosen = [torch.arange(self.kept)]
        for class_index in self.in_task.nonzero().squeeze(1).tolist():
            arrived = (self.class_indices[self.kept :] == class_index).nonzero().squeeze(1) + self.kept
            chosen.append(arrived[herd(features[arrived], per_class - int(kept[class_index]))])
        return torch.cat(chosen)

    def fine_tune(self, loss: Loss, positions: Tensor, **training: Any) -> None:
        """Train the student further on these samples alone, with an own number of epochs, rate, or milestones.

        A kill in this stage goes back to the last snapshot of the one before, from where all is done again.
        """
        replace(self.training, **training).fit(
            self.student,
            self.samples.select(positions),
            self.class_indices[positions],
            loss,
            seed=derive(self.seed, "fine-tuning"),
            task=self.task,
            progress=self.progress,
            phase="fine-tune",
        )


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """Makes the loss of one task's training; may do something before it, and after."""

    name: ClassVar[str] = ""  # the entry of OBJECTIVES; settings record it
    # Settings of the learner that the objective's own paper has otherwise; what is asked for goes before them.
    defaults: ClassVar[Mapping[str, Any]] = {}
    # Whether some of the images are kept apart from training, from the day they come.
    holds_out: ClassVar[bool] = False
    # Its settings that change nothing where there is no teacher: trainings that differ in them share the first task.
    of_later_tasks: ClassVar[frozenset[str]] = frozenset()

    def prepare(self, context: TrainingContext) -> None:  # noqa: B027 (most objectives have nothing to prepare)
        """What is done to the student before training."""

    @abstractmethod
    def loss(self, context: TrainingContext) -> Loss:
        """The loss of a batch."""

    def finish(self, context: TrainingContext) -> None:  # noqa: B027 (nor to finish)
        """What is done to the student after training."""

    def classification(self, scores: Tensor, class_indices: Tensor, among: Tensor) -> Tensor:
        """The loss of scores (n, K) as a classifier's, on the scale it has in training: L_cls of the adapter.

        `among` (bool, (K,)) are the classes of the task.
        """
        return softmax_cross_entropy(scores, class_indices)


@dataclass(frozen=True, kw_only=True)
class Classification(Objective):
    """L_CE (Eq. 2) over all classes, old ones too: an ordinary classifier that knows nothing of tasks."""

    name: ClassVar = "classification"

    loss_function: Literal["sigmoid", "softmax"] = "sigmoid"  # σ, §5.1
    # K: the paper's rate of 2.0 is for L / K, K the data set's classes (iCaRL's code)
    expected_classes: PositiveInt = 100

    def loss(self, context: TrainingContext) -> Loss:
        everything = torch.ones_like(context.in_task)

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            _, scores = context.student(inputs)
            return self.classification(scores, class_indices, everything)

        return loss

    def classification(self, scores: Tensor, class_indices: Tensor, among: Tensor) -> Tensor:
        return self._cross_entropy(scores, class_indices, among) / self.expected_classes

    def _cross_entropy(self, scores: Tensor, class_indices: Tensor, among: Tensor) -> Tensor:
        """L_CE of scores (n, K); with sigmoids only of the classes `among` (bool, (K,))."""
        if self.loss_function == "softmax":
            return softmax_cross_entropy(scores, class_indices)
        targets = F.one_hot(class_indices, scores.shape[1]).to(scores.dtype)
        return sigmoid_cross_entropy(scores[:, among], targets[:, among])


@dataclass(frozen=True, kw_only=True)
class Distillation(Classification):
    """L_CE + λ L_KD + γ L_FD (Eq. 6): learn the task's classes, answer for the others as the teacher does.

    With sigmoids, a class in the task has one-hot targets and any other the teacher's answers alone, not zeros too;
    kept images are no exception (iCaRL, Algorithm 3), unless their own labels are asked for.
    """

    name: ClassVar = "distillation"
    of_later_tasks: ClassVar = frozenset({"distillation", "feature_distillation", "exemplar_targets"})

    distillation: NonNegativeFloat = 1.0  # λ, Eq. 4
    feature_distillation: NonNegativeFloat = 0.05  # γ, Eq. 6; §5.4
    exemplar_targets: Literal["teacher", "label"] = "teacher"  # what a kept image should give for old classes

    def loss(self, context: TrainingContext) -> Loss:
        student, teacher, in_task = context.student, context.teacher, context.in_task

        if teacher is None:  # the first task, or all tasks together: every class of the head is learned
            return super().loss(context)
        old = teacher.classes
        others = ~in_task[:old]  # (K_old,): classes that only the teacher can answer for

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            features, scores = student(inputs)
            with torch.no_grad():
                teacher_features, teacher_scores = teacher(inputs)
            total = self._cross_entropy(scores, class_indices, in_task)
            total = total + self.distillation * self._distil(scores[:, :old], teacher_scores, class_indices, others)
            total = total + self.feature_distillation * feature_distillation(features, teacher_features)
            return total / self.expected_classes

        return loss

    def _distil(self, scores: Tensor, teacher_scores: Tensor, class_indices: Tensor, others: Tensor) -> Tensor:
        """L_KD (Eq. 3) of (n, K_old) scores, on the classes `others`."""
        if not bool(others.any()):  # every known class is in the task: there is none to answer for
            return scores.new_zeros(())
        if self.loss_function == "softmax":
            return softmax_distillation(scores[:, others], teacher_scores[:, others])
        targets = fine(teacher_scores).sigmoid()
        if self.exemplar_targets == "label":
            own = F.one_hot(class_indices, max(len(others), int(class_indices.max()) + 1))[:, : len(others)].to(
                scores.dtype
            )
            kept = (own * others).sum(1, keepdim=True) > 0  # (n, 1): samples of classes that are not in the task
            targets = torch.where(kept, own, targets)
        return sigmoid_cross_entropy(scores[:, others], targets[:, others])
