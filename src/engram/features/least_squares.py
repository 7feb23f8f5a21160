"""Least squares for many classes at once: their sums, and one factor that solves the equations of all."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.errors import TrainingError


def class_sums(features: Tensor, members: Tensor) -> Tensor:
    """The sum of the features of each class: (K, d)."""
    # Sorting and splitting adds in the same order every time, which index_add does not on a GPU.
    grouped = features[members.argsort(stable=True)]  # (n, d)
    return torch.stack([group.sum(dim=0) for group in grouped.split(torch.bincount(members).tolist())])


def regularised_factor(gram: Tensor, penalty: float) -> Tensor:
    """The Cholesky factor of gram + penalty · I."""
    system = gram.clone()
    system.diagonal().add_(penalty)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed:
        raise TrainingError("The features are too large for so weak a regulariser. Normalise them, or strengthen it.")
    return factor


def solved(factor: Tensor, right: Tensor) -> Tensor:
    """Solve A x = b for every row b of `right` (k, d), where `factor` (d, d) is the Cholesky factor of A."""
    return torch.cholesky_solve(right.T, factor).T
