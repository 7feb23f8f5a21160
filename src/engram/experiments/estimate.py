"""How long runs will take and how much they will keep, from a few steps timed here and now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.data import Dataset, Stream, Task
from engram.experiments.plan import Plan
from engram.features import Pairs
from engram.methods import Features, Joint, Learner, Memoryless, Rehearsing, choose_device
from engram.network import Network, extract, make_network, threads_for

STEPS = 3  # timed of each kind; the fastest counts


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine: of an image in training without and with a teacher, of one extracted, of a step."""

    first: float
    taught: float
    extracted: float
    adapter_step: float


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


def measure_costs(learner: Learner, dataset: Dataset) -> Costs:
    """Time a few steps of what this learner would do with this data."""
    samples = dataset.train
    with threads_for(samples.shape):
        batch = samples.batch(torch.arange(min(len(samples), learner.training.batch_size)))
        base = make_network(learner.network, learner.head, samples, seed=0, last_relu=learner.last_relu)
        student = base.grown(len(dataset.class_names), 0).to(choose_device(learner.device))
        teacher = student.frozen()
        first = _fastest(lambda: _step(student.train(), None, batch)) / len(batch)
        taught = _fastest(lambda: _step(student.train(), teacher, batch)) / len(batch)
        some = samples.select(torch.arange(min(len(samples), 500)))
        extracted = _fastest(lambda: extract(teacher, some)) / len(some)
        return Costs(first, taught, extracted, _adapter_step(learner, student.dimension))


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
    classes, image = len(stream.classes), dataset.train.batch(torch.arange(1)).nbytes
    if isinstance(learner, Joint):
        return sum(len(task.train) for task in stream) * image
    counts = _counts(stream.tasks)
    kept = 0
    if isinstance(learner, Rehearsing):
        kept += image * int(counts.clamp(max=learner.exemplars.per_class(classes)).sum())
    if isinstance(learner, Features):
        one = dataset.train.select(torch.arange(1))
        dimension = make_network(learner.network, learner.head, one, seed=0).dimension
        kept += 4 * dimension * int(counts.clamp(max=learner.features_per_class).sum())  # float32
    return kept


def _step(student: Network, teacher: Network | None, batch: Tensor) -> None:
    _, scores = student(batch)
    if teacher is not None:
        with torch.no_grad():
            teacher(batch)
    scores.square().mean().backward()


def _adapter_step(learner: Learner, dimension: int) -> float:
    if not isinstance(learner, Features) or learner.adaptation.adapter == "identity":
        return 0.0
    few = replace(learner.adaptation, adapter_steps=STEPS)
    vectors = torch.randn(few.adapter_batch, dimension)
    pairs = Pairs(vectors, vectors, torch.zeros(len(vectors), dtype=torch.int64))
    return _fastest(lambda: few.fit(pairs, lambda carried, _: carried.sum(), seed=0, task=0), times=1) / STEPS


def _fastest(work: Callable[[], object], times: int = STEPS) -> float:
    work()  # the first time also makes what later ones find made
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
