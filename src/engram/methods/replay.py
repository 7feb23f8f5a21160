"""Image replay: exemplars of every class, chosen by herding, are trained on again with every new task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task
from engram.errors import UsageError
from engram.features import Classifier, FeatureMemory, ImageMemory, Memory, NearestMean, warn_of_small_classes
from engram.features.memory import select_among
from engram.methods.learner import Learner, MemorySources
from engram.network import Network, extract
from engram.progress import SILENT, Progress
from engram.randomness import generator

PER_CLASS = 20  # P, §5.2: if neither number is given


@dataclass(frozen=True, kw_only=True)
class Exemplars:
    """How many images are stored: so many of each class, or a fixed total, shared equally by the classes seen."""

    images_per_class: NonNegativeInt | None = None  # P, §5.2; 20 if neither is given
    images_total: PositiveInt | None = None  # iCaRL, §4: 2,000; 20,000 on ImageNet-1000

    def __post_init__(self) -> None:
        if self.images_per_class is not None and self.images_total is not None:
            raise UsageError("Images are stored per class or as a fixed total: give images_per_class or images_total.")

    def numbers(self) -> dict[str, int | None]:
        """Both numbers, the default filled in."""
        neither = self.images_per_class is None and self.images_total is None
        return {"images_per_class": PER_CLASS if neither else self.images_per_class, "images_total": self.images_total}

    def per_class(self, classes: int) -> int:
        """How many images of each class are stored when so many classes are known."""
        if self.images_total is None:
            return PER_CLASS if self.images_per_class is None else self.images_per_class
        if self.images_total < classes:
            raise UsageError(f"images_total={self.images_total} is less than one image of each of {classes} classes.")
        return self.images_total // classes


@dataclass(kw_only=True)
class Rehearsing(Learner):
    """The base of methods that store images and train on them again."""

    exemplars: Exemplars = field(default_factory=Exemplars)

    def training_settings(self, task: int) -> dict[str, object]:
        settings, numbers = super().training_settings(task), self.exemplars.numbers()
        rehearses = numbers["images_per_class"] != 0 and (task or self.objective.holds_out)
        return {**settings, **numbers} if rehearses else settings

    def resolved_settings(self, samples: Samples) -> dict[str, Any]:
        return {**super().resolved_settings(samples), **self.exemplars.numbers()}

    def images_limit(self, classes: int) -> int:
        return self.exemplars.per_class(classes)

    def check(self, classes: int) -> None:
        super().check(classes)
        self.exemplars.per_class(classes)

    def select_images(self, task: Task, features: Tensor) -> tuple[ImageMemory, Tensor]:
        images, class_indices = self.memory_.images, self.class_indices(task, task.train.labels)
        old = len(images)
        memory, arrived = FeatureMemory(F.normalize(features[:old]), images.counts), features[old:]
        per_class = self.exemplars.per_class(len(self.classes_with(task)))
        if self.objective.holds_out:
            held_out = self.held_out(task)
            parts = (select_among(memory, arrived, class_indices, per_class, part) for part in (~held_out, held_out))
            groups = [merge_parts(trained, validation, per_class) for trained, validation in zip(*parts, strict=True)]
        else:
            groups = select_among(memory, arrived, class_indices, per_class)
        sources, counts = torch.cat(groups), torch.tensor([len(group) for group in groups])
        if self.exemplars.images_total is None:
            warn_of_small_classes(counts, self.in_task(task), per_class)
        chosen = sources[sources >= 0]  # only these of the task's images are copied
        renumbered = sources.clone()
        renumbered[sources >= 0] = torch.arange(len(chosen))
        return images.rearranged(task.train.batch(chosen), renumbered, counts), sources

    def held_out(self, task: Task) -> Tensor:
        held_out, images = super().held_out(task), self.memory_.images
        if not self.objective.holds_out:
            return held_out
        held_out[: len(images)] = held_out_rows(images.counts)
        # Hold out as many of each class in the task as of a stored class, and at least one in ten that will be stored.
        per_class = self.exemplars.per_class(len(self.classes_with(task)))
        per_class = max(per_class, int(images.counts.max())) if len(images) else per_class
        for label in task.classes:
            arrived = (task.train.labels == label).nonzero().squeeze(1)
            order = torch.randperm(len(arrived), generator=generator(self.seed, "held-out", self.tasks_, label))
            held_out[len(images) + arrived[order[: _held_out_of(min(per_class, len(arrived)))]]] = True
        return held_out


@dataclass(kw_only=True)
class Replay(Rehearsing):
    """Store images. iCaRL, EEIL, LUCIR and BiC differ in the objective and in what predicts."""

    # nearest-mean: the class whose exemplars have the nearest mean feature (iCaRL, §2)
    predict_with: Literal["head", "nearest-mean"] = "head"
    # Whether the means are also of the exemplars' mirror images (iCaRL's code), if training mirrors images.
    mirrored_means: bool = True

    def check(self, classes: int) -> None:
        super().check(classes)
        if not self.exemplars.per_class(classes):
            raise UsageError(f"The method '{self.name}' needs at least one stored image of each class.")

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        features = extract(network, self.rehearsal(task), progress, cache=self.cache)  # (n, d)
        with progress.phase("herd"):
            images, sources = self.select_images(task, features)
        old = len(features) - len(task.train)
        rows = features[torch.where(sources < 0, -1 - sources, old + sources)]
        classifier = None if self.make_classifier() is None else self._fitted(network, images, rows, progress)
        self.commit(task, network, Memory(self.memory_.features, images), classifier)
        return MemorySources(images=sources)

    def refit(self, network: Network, memory: Memory, groups: Sequence[Sequence[int]]) -> Classifier | None:
        if self.make_classifier() is None:
            return None
        images = memory.images
        return self._fitted(network, images, extract(network, Samples.of(images.rows, images.class_indices)))

    def _fitted(
        self, network: Network, images: ImageMemory, features: Tensor, progress: Progress = SILENT
    ) -> Classifier:
        """The nearest mean of exemplars with these features (n, d) and, if training mirrors, of their mirror images."""
        features, class_indices = F.normalize(features), images.class_indices
        if self.mirrored_means and self.training.flip and images.rows.dim() == 4:
            mirrored = extract(network, Samples.of(images.rows.flip(2), class_indices), progress, cache=self.cache)
            features = torch.cat([features, F.normalize(mirrored)])
            class_indices = torch.cat([class_indices, class_indices])
        return NearestMean().fit(features, class_indices)

    def make_classifier(self) -> Classifier | None:
        return NearestMean() if self.predict_with == "nearest-mean" else None


# Held-out images (BiC's validation part) are stored among the others: the 2nd, 12th, 22nd, ... of every class. So one
# in ten is held out, and no other record is needed, however often a class is trimmed.


def held_out_rows(counts: Tensor) -> Tensor:
    """Which rows of a memory with these counts per class are held out, bool (n,)."""
    return torch.cat([torch.arange(count) for count in [0, *counts.tolist()]]) % 10 == 1


def _held_out_of(size: int) -> int:
    """How many of a class's first `size` rows are held out."""
    return (size + 8) // 10


def merge_parts(trained: Tensor, held_out: Tensor, per_class: int) -> Tensor:
    """One class's rows, the held-out ones at their positions: as many as both parts suffice for."""
    size = max(
        size
        for size in range(per_class + 1)
        if _held_out_of(size) <= len(held_out) and size - _held_out_of(size) <= len(trained)
    )
    positions = held_out_rows(torch.tensor([size]))
    merged = torch.empty(size, dtype=torch.int64)
    merged[positions], merged[~positions] = held_out[: int(positions.sum())], trained[: int((~positions).sum())]
    return merged
