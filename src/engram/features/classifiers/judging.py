"""How candidates are compared: class-balanced accuracy on held-out scores."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.features.classifiers.base import positions

MOST_JUDGED = 5000  # samples; the standard error of an accuracy is then at most 0.7 %


def judged_rows(members: Tensor) -> Tensor:
    """Indices of at most `MOST_JUDGED` samples, as many of each class as possible, evenly spaced within it.

    Classes of one sample are excluded, since nothing is left of them when that is held out.
    """
    counts = torch.bincount(members)  # (K,)
    counts = counts.where(counts > 1, 0)
    quotas = range(1, int(counts.max()) + 1)
    quota = max(1, bisect_right(quotas, MOST_JUDGED, key=lambda each: int(counts.clamp(max=each).sum())))
    # Sample j of n_c is judged if q_c j / n_c reaches another integer at j + 1, which happens q_c times.
    numbers, share, size = positions(members), counts.clamp(max=quota)[members], counts[members].clamp(min=1)
    judged = (numbers + 1) * share // size > numbers * share // size
    rows = judged.nonzero().squeeze(1)
    return rows[:: max(1, -(-len(rows) // MOST_JUDGED))]  # thinned if there are more classes than samples allowed


def most_accurate(candidates: Sequence[Tensor], members: Tensor, significance: float | None = None) -> int:
    """The index of the held-out scores (m, K) with the highest balanced accuracy; the first of equals.

    With a `significance` the first candidate is preferred: any other must get more samples right than it does, by so
    many standard deviations of chance.
    """
    first = candidates[0].argmax(dim=1) == members
    accuracies: list[float] = []
    for scores in candidates:
        correct = scores.argmax(dim=1) == members
        wins, losses = int((correct & ~first).sum()), int((first & ~correct).sum())
        chance = 0.0 if significance is None or not accuracies else significance * math.sqrt(wins + losses)
        accuracies.append(balanced_accuracy(scores, members) if wins - losses > chance or not chance else 0.0)
    return accuracies.index(max(accuracies))


def balanced_accuracy(scores: Tensor, members: Tensor) -> float:
    """The mean over classes of the share of a class's samples (of m) whose highest score (m, K) is their own."""
    correct = (scores.argmax(dim=1) == members).double()
    counts = torch.bincount(members)
    right = torch.bincount(members, weights=correct)
    return float((right[counts > 0] / counts[counts > 0]).mean())
