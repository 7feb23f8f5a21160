"""Metrics, and their measurement after each task. Only this module reads images of earlier tasks; no learner does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Stream, concatenate
from engram.methods import Learner, class_indices_of
from engram.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured after one task."""

    classes: int
    accuracy: float
    accuracy_top5: float
    head_accuracy: float | None = None
    by_task: list[float]
    omega: float | None = None
    omega_previous: float | None = None
    omega_first: float | None = None
    ceiling: float | None = None
    memory_bytes: int


def measure(learner: Learner, stream: Stream, task: int, origins: Tensor, progress: Progress) -> Measurement:
    """Measure `learner` after it has learned task `task`; `origins` (n, 2) are explained at `origin_of`."""
    seen = stream.tasks[: task + 1]
    test = concatenate(*(each.test for each in seen))
    features = learner.extract(test, progress, "measure")
    scores = learner.classify(features)
    class_indices = class_indices_of(test.labels, learner.classes_)
    groups = torch.arange(len(seen)).repeat_interleave(torch.tensor([len(each.test) for each in seen]))
    measured: dict[str, Any] = {
        "classes": len(learner.classes_),
        "accuracy": top_k_accuracy(scores, class_indices),
        "accuracy_top5": top_k_accuracy(scores, class_indices, 5),
        "by_task": [top_k_accuracy(scores[groups == i], class_indices[groups == i]) for i in range(len(seen))],
        "memory_bytes": learner.memory.nbytes,
    }
    if learner.make_classifier() is None:
        return Measurement(**measured)
    measured["head_accuracy"] = top_k_accuracy(learner.head_scores(features), class_indices)
    stored, statistics = learner.memory.features, learner.memory.statistics
    if not len(stored) and not len(statistics):
        return Measurement(**measured)
    # Statistics are of all training samples.
    samples = concatenate(*(each.train for each in seen)) if len(statistics) else originals(stream, origins)
    true = F.normalize(learner.extract(samples, progress, "measure"))  # (n, d)
    true_indices, arrived = class_indices_of(samples.labels, learner.classes_), stream.tasks[task]
    twin = learner.without_drift(
        arrived, true, true_indices, lambda: learner.extract(arrived.train, progress, "measure")
    )
    measured["ceiling"] = top_k_accuracy(twin.scores(F.normalize(features)), class_indices)
    if not len(statistics):
        among = {"omega": origins[:, 0] >= 0, "omega_previous": origins[:, 0] == task - 1}
        among |= {"omega_first": origins[:, 0] == 0} if task else {}
        measured |= {name: adaptation_quality(stored.rows, true, rows) for name, rows in among.items()}
    return Measurement(**measured)


def originals(stream: Stream, origins: Tensor) -> Samples:
    """The images at these places of the stream, (n, 2) of task and position, in this order."""
    parts = [
        stream.tasks[task].train.select(origins[origins[:, 0] == task, 1]) for task in origins[:, 0].unique().tolist()
    ]
    back = origins[:, 0].argsort(stable=True).argsort()  # where each row went when they were grouped by task
    return concatenate(*parts).select(back)


def top_k_accuracy(scores: Tensor, class_indices: Tensor, k: int = 1) -> float:
    """The share of rows (n, K) whose own class, `class_indices` (n,), is among the k highest scores."""
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices  # (n, k)
    return float((best == class_indices[:, None]).any(1).double().mean())


def average_incremental_accuracy(curve: Sequence[float]) -> float:
    """The mean over tasks of the accuracy on all classes seen: the paper's metric 2."""
    return sum(curve) / len(curve)


def forgetting(matrix: Sequence[Sequence[float]]) -> float:
    """What earlier tasks have lost since their best, on average; `matrix[t][i]` is task i's accuracy after task t."""
    last = len(matrix) - 1
    lost = [max(matrix[t][i] for t in range(i, last)) - matrix[last][i] for i in range(last)]
    return sum(lost) / len(lost) if lost else 0.0


def adaptation_quality(stored: Tensor, true: Tensor, among: Tensor) -> float | None:
    """ω: the mean of vᵀ h_t(x) over the rows `among` (bool, (n,)); None where there are none. Unit vectors (n, d)."""
    if not bool(among.any()):
        return None
    return float((stored[among].double() * true[among].double()).sum(1).mean())


def origin_of(sources: Tensor, task: int, before: Tensor) -> Tensor:
    """Where each stored row came from, (n, 2): (task, position in its training samples).

    `sources` is one field of `MemorySources`; `before` has the origins of the rows stored until then.
    """
    new = torch.stack([torch.full_like(sources, task), sources], 1)
    if not len(before):
        return new
    return torch.where((sources < 0)[:, None], before[(-1 - sources).clamp(min=0)], new)
