"""Building blocks of the closed-form classifiers: class sums, Gram matrices and regularised solves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram.errors import TrainingError
from engram.features.threads import SMALL, for_each

SUMMED_ROWS = 256  # samples in a block of class sums
GRAM_PANELS = 4  # more skip more of the upper triangle, but make smaller and slower matrix products


def class_sums(features: Tensor, members: Tensor, classes: int | None = None) -> Tensor:
    """Sum the features (n, d) of each class: (K, d). `members` (n,) are the indices of the classes."""
    counts = torch.bincount(members, minlength=classes or 0)  # (K,)
    sums = features.new_zeros(len(counts), features.shape[1])
    # Products with indicators add up in the same order every time, which index_add_ does not on a GPU. Sorted samples
    # have few classes in a block, so the indicators stay small.
    for block in members.argsort(stable=True).split(SUMMED_ROWS):
        found, rows = members[block].unique_consecutive(return_inverse=True)
        indicators = features.new_zeros(len(found), len(block)).scatter_(0, rows[None], 1.0)  # (k, b)
        sums[found] += indicators @ features[block]
    return sums


def add_gram(gram: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to the lower triangle of `gram` (d, d), which is the part that Cholesky reads.

    Skipping most of the upper triangle, which is left incomplete, saves a third of the time.
    """
    width = len(gram)
    step = math.ceil(width / GRAM_PANELS)

    def add(begin: int) -> None:
        panel = slice(begin, begin + step)
        gram[begin:, panel].addmm_(rows[:, begin:].T, rows[:, panel])

    panels = range(0, width, step)
    if len(rows) * width**2 <= SMALL:
        for_each(add, panels)
    else:
        for begin in panels:
            add(begin)


def regularised_factor(gram: Tensor, penalty: float) -> Tensor:
    """Cholesky factor of gram + penalty · I; only the lower triangle of `gram` (d, d) is read."""
    system = gram.clone()
    system.diagonal().add_(penalty)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed:
        raise TrainingError(
            "The system of equations is not positive definite in floating point: the features are too large for this "
            "regularisation. Normalise them, or regularise more."
        )
    return factor


def solved(factor: Tensor, right: Tensor) -> Tensor:
    """Solve A x = b for every row b of `right` (k, d), where `factor` (d, d) is the Cholesky factor of A."""
    return torch.cholesky_solve(right.T, factor).T
