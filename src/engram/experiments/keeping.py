"""What a learner will keep of a stream, counted before it learns, and whether this machine can hold it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.data import Stream, Task
from engram.errors import UsageError
from engram.methods import Features, Joint, Learner, Rehearsing, dimension_of

COPIES = 3  # of the kept images are there for a moment: themselves, and what is made of them to be saved
GIGABYTE = 2**30


def images_before(learner: Learner, stream: Stream, task: int) -> int:
    """How many kept images are trained on again in a task."""
    return _images(learner, stream.tasks[:task]) if task else 0


def memory_bytes(learner: Learner, stream: Stream) -> int:
    """The bytes of all that is kept at the end."""
    kept = _images(learner, stream.tasks) * stream.tasks[0].train.sample_bytes
    if isinstance(learner, Features):
        vectors = int(_counts(stream.tasks).clamp(max=learner.features_per_class).sum())
        kept += learner.coding.nbytes(vectors, dimension_of(learner, stream.tasks[0].train))
    return kept


def check_memory(learner: Learner, stream: Stream) -> None:
    """Refuse, before anything is learned, what cannot be kept, or more images than this machine has memory for."""
    memory_bytes(learner, stream)  # a codec may not suit the network's vectors
    images, each = _images(learner, stream.tasks), stream.tasks[0].train.sample_bytes
    memory = machine_memory()
    if COPIES * images * each > memory:
        raise UsageError(
            f"The method '{learner.name}' would keep {images:,} images of {each:,} bytes, "
            f"{images * each / GIGABYTE:,.1f} GB, and {COPIES} times that while they are saved; this machine has "
            f"{memory / GIGABYTE:,.1f} GB of memory. Keep fewer, make them smaller with --image-size, or take fewer "
            "--tasks."
        )


def machine_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _images(learner: Learner, tasks: Sequence[Task]) -> int:
    """How many images are kept after these tasks."""
    if isinstance(learner, Joint):
        return sum(len(task.train) for task in tasks)
    if not isinstance(learner, Rehearsing):
        return 0
    counts = _counts(tasks)
    return int(counts.clamp(max=learner.exemplars.per_class(len(counts))).sum())


def _counts(tasks: Sequence[Task]) -> Tensor:
    """How many training samples each class has in all of these tasks, (K,)."""
    _, counts = torch.cat([task.train.labels for task in tasks]).unique(return_counts=True)
    return counts  # type: ignore[no-any-return]
