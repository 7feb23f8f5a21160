"""Building blocks of the closed-form classifiers: class sums, Gram matrices and regularised solves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram.errors import TrainingError

GRAM_PANELS = 4  # more skip more of the upper triangle, but make smaller and slower matrix products


def class_sums(features: Tensor, members: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum the features (n, d) of each class (K, d), in the same order every time; `out` is added to if given."""
    # index_add_ is not deterministic on a GPU, so sort and split instead.
    counts = torch.bincount(members, minlength=0 if out is None else len(out)).tolist()
    sums = features.new_zeros(len(counts), features.shape[1]) if out is None else out
    grouped = features[members.argsort(stable=True)]  # (n, d)
    for row, group in zip(sums, grouped.split(counts), strict=True):
        if len(group):
            row += group.sum(dim=0)
    return sums


def add_gram(gram: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to the lower triangle of `gram` (d, d), which is the part that Cholesky reads.

    Skipping most of the upper triangle, which is left incomplete, saves a third of the time.
    """
    width = len(gram)
    step = math.ceil(width / GRAM_PANELS)
    for begin in range(0, width, step):
        panel = slice(begin, begin + step)
        gram[begin:, panel].addmm_(rows[:, begin:].T, rows[:, panel])


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
