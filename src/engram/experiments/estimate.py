"""How long a run will take and how much it will store, before it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.data import Stream, Task
from engram.errors import UsageError
from engram.methods import Costs, Learner

COPIES = 3  # of the stored images exist for a moment: themselves, and what is made of them to be saved
GIGABYTE = 2**30


@dataclass(frozen=True)
class Estimate:
    """What one run will take, task by task, and the bytes of its memory at the end."""

    training: tuple[float, ...]  # seconds
    images: tuple[int, ...]  # that are extracted, also to measure: runs of one training share equal ones
    extracting: tuple[float, ...]  # seconds
    adapting: tuple[float, ...]  # seconds
    memory_bytes: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.training) + sum(self.extracting) + sum(self.adapting)


def estimate(learner: Learner, stream: Stream, costs: Costs) -> Estimate:
    """What learning a stream will take with these costs, nothing shared."""
    works, images = [], []
    for task in stream:
        before, after = class_counts(stream.tasks[: task.index]), class_counts(stream.tasks[: task.index + 1])
        decided = learner.decided(task, task.index)
        tunes = decided is None or decided.tunes  # a trial trains for about as long as what it may lead to
        exemplars = learner.stored_images(before) if task.index else 0
        works.append(learner.work(len(task.train) + exemplars, task.index, tunes=tunes))
        tested = sum(len(each.test) for each in stream.tasks[: task.index + 1])
        images.append(works[-1].extracted + tested + learner.stored_features(after))  # ω needs their images
    return Estimate(
        training=tuple(costs.training(work) for work in works),
        images=tuple(images),
        extracting=tuple(each * costs.extracted for each in images),
        adapting=tuple(work.adapter_steps * costs.adapter_step for work in works),
        memory_bytes=learner.memory_bytes(class_counts(stream.tasks), stream.tasks[0].train),
    )


def check_memory(learner: Learner, stream: Stream) -> None:
    """Refuse, before anything is learned, a codec that does not suit the network, or more images than memory holds."""
    counts, samples = class_counts(stream.tasks), stream.tasks[0].train
    learner.memory_bytes(counts, samples)
    images, memory = learner.stored_images(counts), machine_memory()
    if COPIES * images * samples.sample_bytes > memory:
        raise UsageError(
            f"The method '{learner.name}' would store {images:,} images of {samples.sample_bytes:,} bytes, and "
            f"{COPIES} copies of them while they are saved; this machine has {memory / GIGABYTE:,.1f} GB of memory. "
            "Store fewer, make them smaller with --image-size, or take fewer --tasks."
        )


def machine_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def class_counts(tasks: Sequence[Task]) -> Tensor:
    """How many training samples each class has in all of these tasks, (K,)."""
    if not tasks:
        return torch.empty(0, dtype=torch.int64)
    _, counts = torch.cat([task.train.labels for task in tasks]).unique(return_counts=True)
    return counts  # type: ignore[no-any-return]
