"""Objectives: what training minimises, composed from the losses. Any objective goes with any learner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from engram.data import Samples
from engram.errors import UsageError
from engram.features import herd
from engram.network import GradientHook, Loss, Network, Training, extract, unchanged_statistics
from engram.network.losses import (
    feature_distillation,
    fine,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    softmax_distillation,
)
from engram.network.network import HEADS, Head
from engram.progress import SILENT, Progress
from engram.randomness import derive, seeded

HeadKind = TypeVar("HeadKind", bound=Head)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingContext:
    """The training of one network on one task, as its objective sees it."""

    student: Network  # the network to be trained, its head grown
    teacher: Network | None  # the previous network, frozen; None on the first task
    samples: Samples  # the training samples: exemplars first, then the task's
    class_indices: Tensor  # int64 (n,): their classes, as rows of the student's head
    exemplars: int  # how many of the samples are exemplars
    in_task: Tensor  # bool (K,): which classes are in the task; on the student's device
    task_of_class: Tensor  # int64 (K,): the task that brought each class; on the student's device
    held_out: tuple[Samples, Tensor] | None = None  # samples and class indices that are not trained on
    training: Training
    seed: int
    task: int
    progress: Progress = SILENT

    @property
    def old(self) -> int:
        """How many classes the teacher knows."""
        return self.teacher.classes if self.teacher is not None else 0

    @property
    def arrived(self) -> Tensor:
        """Positions of the task's own samples, which follow the exemplars, int64 (m,)."""
        return torch.arange(self.exemplars, len(self.samples))

    def head(self, kind: type[HeadKind]) -> HeadKind:
        """The student's head, or an error if it is not of this kind."""
        head = self.student.head
        if not isinstance(head, kind):
            name = next(name for name, each in HEADS.items() if each is kind)
            raise UsageError(f"This objective needs the head '{name}'. Leave out --set head=…")
        return head

    def balanced(self) -> Tensor:
        """Positions of equally many samples of every class: all exemplars, and the task's herded up to that number."""
        counts = torch.bincount(self.class_indices[: self.exemplars], minlength=len(self.in_task))  # (K,)
        per_class = int(counts.max())
        features = F.normalize(extract(self.student, self.samples, self.progress))
        chosen = [torch.arange(self.exemplars)]
        for class_index in self.in_task.nonzero().squeeze(1).tolist():
            arrived = (self.class_indices[self.exemplars :] == class_index).nonzero().squeeze(1) + self.exemplars
            chosen.append(arrived[herd(features[arrived], per_class - int(counts[class_index]))])
        return torch.cat(chosen)

    def fine_tune(self, loss: Loss, epochs: float, learning_rate: float, **training: Any) -> None:
        """Train the student further on balanced samples; `epochs` and `learning_rate` are shares of those of training.

        Without exemplars nothing happens. There are no checkpoints: after a kill, the stage before resumes from its
        last one.
        """
        count = round(epochs * self.training.epochs)
        if not self.exemplars or not count:
            return
        positions = self.balanced()
        replace(self.training, epochs=count, learning_rate=learning_rate * self.training.learning_rate, **training).fit(
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
    """The loss of one task's training, and what is done to the student before and after."""

    name: ClassVar[str] = ""  # the key in OBJECTIVES
    defaults: ClassVar[Mapping[str, Any]] = {}  # settings of the learner that its paper chose differently
    holds_out: ClassVar[bool] = False  # whether some samples of each class are never trained on
    replays: ClassVar[bool] = True  # whether stored images are among those that the loss is of
    carries: ClassVar[bool] = False  # whether `finish` lets the network carry tensors to the next task
    # Settings without effect if there is no teacher: trainings that differ in them share the first task.
    of_later_tasks: ClassVar[frozenset[str]] = frozenset()

    # The share of rotated images' loss: an auxiliary head learns class and rotation together (Zhu et al., PASS, CVPR
    # 2021, §3.2, where one head has all four rotations). It doubles the time of training. Later tasks drift more with
    # it; on the first there is no drift.
    rotation_labels: NonNegativeFloat = 0.0
    rotation_tasks: Literal["first", "every"] = "every"

    def prepare(self, context: TrainingContext) -> None:  # noqa: B027 (most objectives have nothing to prepare)
        """Called before training."""

    @abstractmethod
    def loss(self, context: TrainingContext) -> Loss:
        """The loss of a batch, as a function of inputs and class indices."""

    def finish(self, context: TrainingContext) -> None:  # noqa: B027 (nor to finish)
        """Called after training."""

    def training_loss(self, context: TrainingContext) -> Loss:
        """The loss of a batch with that of its rotated images, if the settings ask for it."""
        loss = self.loss(context)
        return _with_rotations(loss, self, context) if self.rotates(context.teacher is not None) else loss

    def training_of(self, training: Training, task: int) -> Training:
        """The settings of training on task `task` from 0: the same for all, unless an objective changes them."""
        return training

    def gradient_hook(self, context: TrainingContext) -> GradientHook | None:
        """What changes the gradients between backward and step, if anything does."""
        return None

    def rotates(self, taught: bool) -> bool:
        """Whether rotated images are learned too, with a teacher or without."""
        return self.rotation_labels > 0 and (not taught or self.rotation_tasks == "every")

    def carried_bytes(self, network: Network) -> int:
        """The bytes of what the network carries to the next task."""
        return 0

    def classification(self, scores: Tensor, class_indices: Tensor, among: Tensor) -> Tensor:
        """L_cls of the adapter: the classification part of the loss, on its scale in training.

        `scores` are (n, K); `among` (bool, (K,)) are the classes of the task.
        """
        return softmax_cross_entropy(scores, class_indices)


@dataclass(frozen=True, kw_only=True)
class Classification(Objective):
    """L_CE (Eq. 2) over all classes: an ordinary classifier that knows nothing of tasks."""

    name: ClassVar[str] = "classification"

    loss_function: Literal["sigmoid", "softmax"] = "sigmoid"  # σ, §5.1
    expected_classes: PositiveInt = 100  # K: the loss is L / K, for which the learning rate is 2.0 (iCaRL's code)

    def loss(self, context: TrainingContext) -> Loss:
        everything = torch.ones_like(context.in_task)

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            _, scores = context.student(inputs)
            return self.classification(scores, class_indices, everything)

        return loss

    def classification(self, scores: Tensor, class_indices: Tensor, among: Tensor) -> Tensor:
        return self._cross_entropy(scores, class_indices, among) / self.expected_classes

    def _cross_entropy(self, scores: Tensor, class_indices: Tensor, among: Tensor) -> Tensor:
        """L_CE of scores (n, K), only of the classes `among` (bool, (K,))."""
        if self.loss_function == "softmax":
            return softmax_cross_entropy(scores.masked_fill(~among, -torch.inf), class_indices)
        targets = F.one_hot(class_indices, scores.shape[1]).to(scores.dtype)
        return sigmoid_cross_entropy(scores[:, among], targets[:, among])


@dataclass(frozen=True, kw_only=True)
class Distillation(Classification):
    """L_CE + λ L_KD + γ L_FD (Eq. 6): learn the task's classes, and score the others as the teacher does.

    L_CE and L_KD are divided by K, γ L_FD is not: only so are ω and the effect of γ at 70 epochs those of the paper.
    With sigmoids, classes in the task have one-hot targets and the others the teacher's scores. The same holds for
    exemplars (iCaRL, Algorithm 3), unless `exemplar_targets` is "label".
    """

    name: ClassVar[str] = "distillation"
    of_later_tasks: ClassVar = frozenset({"distillation", "feature_distillation", "exemplar_targets", "temperature"})

    distillation: NonNegativeFloat = 1.0  # λ, Eq. 4
    feature_distillation: NonNegativeFloat = 0.05  # γ, Eq. 6; §5.4
    exemplar_targets: Literal["teacher", "label"] = "teacher"  # targets of exemplars for old classes
    # T of a softmax, by which scores are divided in L_KD, without a factor T² (Li & Hoiem); 2 is usual, with λ = 10
    temperature: PositiveFloat = 1.0

    def loss(self, context: TrainingContext) -> Loss:
        student, teacher, in_task, old = context.student, context.teacher, context.in_task, context.old
        if teacher is None:
            return super().loss(context)
        others = ~in_task[:old]  # (K_old,): classes that are distilled
        among = in_task
        if self.loss_function == "softmax":  # exemplars are classified too
            among = in_task.index_fill(0, context.class_indices.unique().to(in_task.device), True)
        penalty = self.drift_penalty(context)

        def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
            features, scores = student(inputs)
            with torch.no_grad():
                teacher_features, teacher_scores = teacher(inputs)
            total = self._cross_entropy(scores, class_indices, among)
            total = total + self.distillation * self._distil(scores[:, :old], teacher_scores, class_indices, others)
            return total / self.expected_classes + penalty(features, teacher_features)

        return loss

    def drift_penalty(self, context: TrainingContext) -> Callable[[Tensor, Tensor], Tensor]:
        """What features (n, d) cost that differ from the teacher's: γ L_FD."""
        return lambda features, before: self.feature_distillation * feature_distillation(features, before)

    def _distil(self, scores: Tensor, teacher_scores: Tensor, class_indices: Tensor, others: Tensor) -> Tensor:
        """L_KD (Eq. 3) of scores (n, K_old), on the classes `others`."""
        if not bool(others.any()):
            return scores.new_zeros(())
        if self.loss_function == "softmax":
            return softmax_distillation(scores[:, others], teacher_scores[:, others], self.temperature)
        targets = fine(teacher_scores).sigmoid()
        if self.exemplar_targets == "label":
            classes = max(len(others), int(class_indices.max()) + 1)
            labels = F.one_hot(class_indices, classes)[:, : len(others)].to(scores.dtype)  # (n, K_old)
            exemplars = (labels * others).sum(1, keepdim=True) > 0  # (n, 1): samples of classes not in the task
            targets = torch.where(exemplars, labels, targets)
        return sigmoid_cross_entropy(scores[:, others], targets[:, others])


def _with_rotations(loss: Loss, objective: Objective, context: TrainingContext) -> Loss:
    """The loss, plus that of every image rotated by 90, 180 or 270 degrees, as one of three more classes per class."""
    if len(context.samples.shape) != 3:
        raise UsageError(
            "rotation_labels rotates images, and these inputs are vectors. Leave out --set rotation_labels."
        )
    student, classes = context.student, context.in_task.nonzero().squeeze(1)
    with seeded(context.seed, "rotation head", context.task):
        student.auxiliary["rotations"] = nn.Linear(student.dimension, 3 * len(classes)).to(classes.device)
    every = torch.ones(3 * len(classes), dtype=torch.bool, device=classes.device)

    def both(inputs: Tensor, class_indices: Tensor) -> Tensor:
        turns = torch.randint(1, 4, (len(inputs),))  # seeded by the training loop
        turned = torch.stack([torch.rot90(image, int(turn), (0, 1)) for image, turn in zip(inputs, turns, strict=True)])
        with unchanged_statistics(student):  # of upright images, as in inference
            scores: Tensor = student.auxiliary["rotations"](student.features(turned))
        own = torch.searchsorted(classes, class_indices).clamp(max=len(classes) - 1)
        among = classes[own] == class_indices  # exemplars of other classes have no such class
        labels = 3 * own + turns.to(own.device) - 1
        total = loss(inputs, class_indices)
        if not bool(among.any()):
            return total + 0 * scores.sum()
        return total + objective.rotation_labels * objective.classification(scores[among], labels[among], every)

    return both
