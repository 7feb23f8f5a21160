"""Herding against the loop that is commonly written for it; the picks are those of the greedy definition."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from side_by_side import Outcome, in_turns, milliseconds, ratio, show
from torch.nn import functional as F

from engram.features import herd


def main() -> None:
    outcomes = []
    for count, dimension, keep, goal in ((1300, 512, 250, 10), (500, 64, 20, 8)):
        random = torch.Generator().manual_seed(0)
        vectors = F.normalize(torch.randn(count, dimension, generator=random).clamp(min=0))
        points = vectors.double().numpy()
        picks = herd(vectors, keep).tolist()
        if picks != common(points, keep):
            raise SystemExit("The picks are not those of the greedy definition: no comparison.")
        ours, theirs = in_turns(
            lambda vectors=vectors, keep=keep: herd(vectors, keep),
            lambda points=points, keep=keep: common(points, keep),
            rounds=5,
        )
        outcomes.append(
            Outcome(
                f"herding, n = {count:,}, d = {dimension}, keep {keep}",
                "the common numpy loop, which sums anew and deletes",
                ratio(theirs, ours),
                goal,
                detail=f"{milliseconds(ours)} against {milliseconds(theirs)}; the same picks.",
            )
        )
    show(*outcomes)


def common(points: NDArray[np.float64], keep: int) -> list[int]:
    """Each pick is the one that brings the mean of the picked nearest to the mean of all."""
    mean = points.mean(axis=0)
    left, indices = points.copy(), np.arange(len(points))
    picked: list[NDArray[np.float64]] = []
    picks = []
    for number in range(1, keep + 1):
        total = np.sum(picked, axis=0) if picked else np.zeros_like(mean)
        best = np.argmin(np.sqrt(np.sum((mean - (total + left) / number) ** 2, axis=1)))
        picked.append(left[best])
        picks.append(int(indices[best]))
        left, indices = np.delete(left, best, axis=0), np.delete(indices, best)
    return picks


if __name__ == "__main__":
    main()
