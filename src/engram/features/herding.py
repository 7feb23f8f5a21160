"""Herding: choose the few vectors whose running mean stays nearest to the mean of all (iCaRL, Algorithm 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from engram.errors import DataError, TrainingError, UsageError
from engram.network import parallel

LARGEST_GRAM = 8192  # vectors whose Gram matrix is worth its memory: 512 MB at the most
ROUNDING = 1e-12  # two scores nearer than this, relative to the lengths they come from, are a tie


def herd(vectors: Tensor, keep: int) -> Tensor:
    """Indices of `min(keep, n)` of the vectors (n, d), in the order the greedy definition picks them; int64.

    The k-th pick is the x, of those not yet picked, that minimises ‖mean − (sum of the picked + x) / k‖.
    Ties go to the lowest index.
    """
    if vectors.ndim != 2:
        raise DataError(f"Herding needs vectors of shape (n, d), and got the shape {tuple(vectors.shape)}.")
    if keep < 0:
        raise UsageError(f"Herding cannot keep {keep} vectors. Give 0 or more.")
    count = min(keep, len(vectors))
    if not count:
        return from_numpy(np.empty(0, np.int64))
    return parallel.broadcast(lambda: from_numpy(_greedy(vectors.detach().cpu().double().numpy(), count)))


def _greedy(points: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    # With every x measured from the mean, k times the distance is ‖x + sum of the picked‖. Half its square is, but for
    # a term that all candidates share, ½‖x‖² + x · (sum of the picked): one inner product more after every pick.
    with np.errstate(invalid="ignore", over="ignore"):  # reported just below
        points = points - np.full(len(points), 1 / len(points)) @ points  # (n, d); a product is faster than a mean
        squares = np.einsum("nd,nd->n", points, points)  # (n,)
    if not np.isfinite(squares).all():
        raise TrainingError("Herding got vectors with NaN or infinity. Lower the learning rate, or check the images.")
    rounding = ROUNDING * np.sqrt(squares.max() * squares)  # (n,): how far each score may be off
    scores, width = squares / 2 - rounding, 2 * rounding  # (n,): the lowest that each may be, and how far up it may go
    # In float64: float32 inner products are too coarse to tell the candidates apart. All of them at once is fastest,
    # unless few are needed of many.
    gram = points @ points.T if len(points) <= min(LARGEST_GRAM, 16 * count) else None  # (n, n)
    picks, products = np.empty(count, np.int64), np.empty(len(points))
    for k in range(count):
        best = scores.argmin()
        pick = (scores <= scores[best] + width[best]).argmax()  # the first of those that tie with the best
        picks[k] = pick
        scores += np.dot(points, points[pick], out=products) if gram is None else gram[pick]
        scores[pick] = np.inf
    return picks
