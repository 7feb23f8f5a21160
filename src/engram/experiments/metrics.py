"""What is measured, as functions of scores, vectors and accuracies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
