"""How long runs will take and how much they will keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.data import Dataset, Stream, Task
from engram.experiments.plan import Plan
from engram.methods import Costs, Features, Joint, Learner, Memoryless, Rehearsing, dimension_of


@dataclass(frozen=True)
class Estimate:
    """What one run will take, task by task, and what it will keep at its end."""

    training: tuple[float, ...]  # seconds
    after: tuple[float, ...]  # seconds of everything else, measuring included
    kept_bytes: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.training) + sum(self.after)


def estimate(plan: Plan, dataset: Dataset, costs: Costs) -> Estimate:
    """What a plan will take with these costs, nothing shared."""
    learner, stream = plan.learner(dataset), plan.stream(dataset)
    epochs, training, after, seen = learner.training.epochs, [], [], 0
    for task in stream:
        arriving, tested = len(task.train), sum(len(each.test) for each in stream.tasks[: task.index + 1])
        kept = _images(learner, stream, task.index)
        cost = costs.taught if task.index and not isinstance(learner, Joint) else costs.first
        training.append(epochs * (arriving + kept) * cost)
        passes = 0 if isinstance(learner, Memoryless | Joint) else 2 if isinstance(learner, Features) else 1
        steps = learner.adaptation.steps if isinstance(learner, Features) and task.index else 0
        seen += len(task.classes)
        features = learner.features_per_class * seen if isinstance(learner, Features) else 0
        images = passes * (arriving + kept) + tested + features  # the features' images are looked at in measuring
        after.append(images * costs.extracted + steps * costs.adapter_step)
    return Estimate(tuple(training), tuple(after), _kept_bytes(learner, stream, dataset))


def _images(learner: Learner, stream: Stream, task: int) -> int:
    """How many kept images are trained on again in a task."""
    before = stream.tasks[:task]
    if isinstance(learner, Joint):
        return sum(len(each.train) for each in before)
    if not isinstance(learner, Rehearsing) or not before:
        return 0
    counts = _counts(before)
    return int(counts.clamp(max=learner.exemplars.per_class(len(counts))).sum())


def _counts(tasks: Sequence[Task]) -> Tensor:
    """How many training samples each class of these tasks has, (K,)."""
    return torch.cat([torch.bincount(task.train.labels)[list(task.classes)] for task in tasks])


def _kept_bytes(learner: Learner, stream: Stream, dataset: Dataset) -> int:
    classes, image = len(stream.classes), dataset.train.sample_bytes
    if isinstance(learner, Joint):
        return sum(len(task.train) for task in stream) * image
    counts = _counts(stream.tasks)
    kept = 0
    if isinstance(learner, Rehearsing):
        kept += image * int(counts.clamp(max=learner.exemplars.per_class(classes)).sum())
    if isinstance(learner, Features):
        kept += (
            4 * dimension_of(learner, dataset.train) * int(counts.clamp(max=learner.features_per_class).sum())
        )  # float32
    return kept
