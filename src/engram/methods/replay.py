"""Image replay: a few images of every class are kept, chosen by herding, and trained on again with every new task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task
from engram.errors import UsageError
from engram.features import Classifier, FeatureMemory, ImageMemory, Memory, NearestMean, select, warn_of_small_classes
from engram.methods.learner import NOTHING, Learner, MemorySources
from engram.network import Network, extract
from engram.progress import SILENT, Progress
from engram.randomness import generator

PER_CLASS = 20  # P, §5.2, where nothing else is asked for


@dataclass(frozen=True, kw_only=True)
class Exemplars:
    """How many images are kept: so many of each class, or a fixed number in all, shared out among the classes seen."""

    images_per_class: NonNegativeInt | None = None  # P, §5.2; 20 where neither is given
    images_total: PositiveInt | None = None  # iCaRL, §4: 2,000; 20,000 on ImageNet-1000

    def __post_init__(self) -> None:
        if self.images_per_class is not None and self.images_total is not None:
            raise UsageError("Images are kept per class or as a fixed total: give images_per_class or images_total.")

    def numbers(self) -> dict[str, int | None]:
        """Both numbers, the one that holds where none is given filled in."""
        given = self.images_per_class is not None or self.images_total is not None
        per_class = self.images_per_class if given else PER_CLASS
        return {"images_per_class": per_class, "images_total": self.images_total}

    def per_class(self, classes: int) -> int:
        """How many images of each class are kept when so many are known."""
        if self.images_total is None:
            return PER_CLASS if self.images_per_class is None else self.images_per_class
        if self.images_total < classes:
            raise UsageError(
                f"A total of {self.images_total} images cannot be shared out among {classes} classes. Raise it."
            )
        return self.images_total // classes


@dataclass(kw_only=True)
class Rehearsing(Learner):
    """What every method that keeps images does with them."""

    exemplars: Exemplars = field(default_factory=Exemplars)

    def resolved_settings(self, samples: Samples) -> dict[str, object]:
        return {**super().resolved_settings(samples), **self.exemplars.numbers()}

    def training_settings(self, task: int) -> dict[str, object]:
        """In the first task nothing is rehearsed; later, what is depends on how much was kept, be it anything."""
        settings, numbers = super().training_settings(task), self.exemplars.numbers()
        rehearsed = numbers["images_per_class"] != 0 and (task or self.objective.holds_out)
        return {**settings, **numbers} if rehearsed else settings

    def check(self, classes: int) -> None:
        super().check(classes)
        self.exemplars.per_class(classes)

    def images_limit(self, classes: int) -> int:
        return self.exemplars.per_class(classes)

    def keep_images(self, task: Task, features: Tensor) -> tuple[ImageMemory, Tensor]:
        class_indices = self.class_indices(task, task.train.labels)
        images = self.memory_.images if self.tasks_ else ImageMemory.empty(task.train.shape)
        split = len(images)
        memory = FeatureMemory(F.normalize(features[:split]), images.counts)
        per_class = self.exemplars.per_class(len(self.classes_with(task)))
        if self.objective.holds_out:
            sources, counts = _select_apart(memory, features[split:], class_indices, per_class, self.held_out(task))
        else:
            sources, counts = select(memory, features[split:], class_indices, per_class)
        if self.exemplars.images_total is None:
            warn_of_small_classes(counts, self.in_task(task), per_class)
        chosen = sources[sources >= 0]
        # Only the chosen of the task's images are gathered, and the rest are never copied.
        renumbered = sources.clone()
        renumbered[sources >= 0] = torch.arange(len(chosen))
        return images.rearranged(task.train.batch(chosen), renumbered, counts), sources

    def held_out(self, task: Task) -> Tensor:
        apart = super().held_out(task)
        if not self.objective.holds_out:
            return apart
        images = self.memory_.images
        apart[: len(images)] = apart_in(images.counts)
        # As many of every class in the task as of one that was kept, and no fewer than will be kept of it.
        per_class = self.exemplars.per_class(len(self.classes_with(task)))
        per_class = max(per_class, int(images.counts.max())) if len(images) else per_class
        for label in task.classes:
            arrived = (task.train.labels == label).nonzero().squeeze(1)
            count = int(_number_apart(torch.tensor(min(per_class, len(arrived)))))
            order = torch.randperm(len(arrived), generator=generator(self.seed, "held-out", self.tasks_, label))
            apart[len(images) + arrived[order[:count]]] = True
        return apart


@dataclass(kw_only=True)
class Replay(Rehearsing):
    """Keep images. What tells iCaRL, EEIL, LUCIR and BiC apart is the objective, and here who answers."""

    predict_with: Literal["head", "nearest-mean"] = (
        "head"  # nearest-mean: the mean of the kept images' features (iCaRL, §2)
    )

    def check(self, classes: int) -> None:
        super().check(classes)
        if not self.exemplars.per_class(classes):
            raise UsageError(
                f"The method '{self.name}' lives by the images it keeps. Give it one of each class or more."
            )

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        features = extract(network, self.rehearsal(task), progress, cache=self.cache)
        with progress.phase("herd"):
            images, sources = self.keep_images(task, features)
        classifier = self.make_classifier()
        if classifier is not None:
            kept = len(features) - len(task.train)
            rows = features[torch.where(sources < 0, -1 - sources, kept + sources)]
            classifier.fit(F.normalize(rows), images.class_indices)
        self.commit(task, network, Memory(self.memory_.features, images), classifier)
        return MemorySources(NOTHING, sources)

    def refit(self, network: Network, memory: Memory) -> Classifier | None:
        classifier, images = self.make_classifier(), memory.images
        if classifier is None:
            return None
        features = extract(network, Samples.of(images.rows, images.class_indices))
        return classifier.fit(F.normalize(features), images.class_indices)

    def make_classifier(self) -> Classifier | None:
        return NearestMean() if self.predict_with == "nearest-mean" else None


# Images that are never trained on (BiC's validation part) are kept among the others: the 2nd, 12th, 22nd, ... of every
# class. So the share stays one in ten, and nothing else is to be remembered, however often a class is trimmed.


def apart_in(counts: Tensor) -> Tensor:
    """Which rows of a memory with these counts per class are never trained on, bool (n,)."""
    return torch.cat([torch.arange(count) for count in [0, *counts.tolist()]]) % 10 == 1


def _number_apart(size: Tensor) -> Tensor:
    """How many of a class's first `size` rows are never trained on."""
    return (size + 8) // 10


def _select_apart(
    memory: FeatureMemory, vectors: Tensor, class_indices: Tensor, per_class: int, held_out: Tensor
) -> tuple[Tensor, Tensor]:
    """As `select`, for those trained on and those held out each on their own, put together again in their places."""
    size, classes = len(memory), max(len(memory.counts), int(class_indices.max()) + 1)
    parts: list[list[Tensor]] = []
    for part in (~held_out, held_out):
        old, new = part[:size].nonzero().squeeze(1), part[size:].nonzero().squeeze(1)
        stored = torch.bincount(memory.class_indices[old], minlength=len(memory.counts))
        sources, counts = select(FeatureMemory(memory.rows[old], stored), vectors[new], class_indices[new], per_class)
        # From places in the part to places in the whole: negative ones point into the memory.
        whole = torch.cat([new, (-1 - old).flip(0)])[sources]
        groups = list(whole.split(counts.tolist()))
        parts.append(groups + [NOTHING] * (classes - len(groups)))
    merged = [in_their_places(trained, apart, per_class) for trained, apart in zip(*parts, strict=True)]
    return torch.cat(merged), torch.tensor([len(group) for group in merged], dtype=torch.int64)


def in_their_places(trained: Tensor, apart: Tensor, per_class: int) -> Tensor:
    """One class's rows, those held out at their places: as many as there are of both kinds for."""
    sizes = torch.arange(per_class + 1)
    needed = _number_apart(sizes)
    size = int(sizes[(needed <= len(apart)) & (sizes - needed <= len(trained))].max())
    places = apart_in(torch.tensor([size]))
    merged = torch.empty(size, dtype=torch.int64)
    merged[places], merged[~places] = apart[: int(places.sum())], trained[: int((~places).sum())]
    return merged
