"""What the classifiers compute with: threads, class sums, Gram matrices and regularised systems of equations.

Threads that share one small matrix product mostly wait for each other, on a busy machine for many times the work. So
small problems are computed in one thread, or several of them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from engram.errors import TrainingError

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALL = 2**33  # multiplications: a few tenths of a second of one processor
SUMMED_ROWS = 256  # samples in a block of class sums
GRAM_PANELS = 4  # more skip more of the upper triangle, but make smaller and slower matrix products

_available: ContextVar[int] = ContextVar("available")  # threads that torch had before `threads_for`


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """Compute in one thread inside, or in all that torch has if there are many multiplications."""
    before = torch.get_num_threads()
    available = _available.get(before)
    token = _available.set(available)
    torch.set_num_threads(available if multiplications > SMALL else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _available.reset(token)


def for_each(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Do the work for every item, in as many threads as torch has, each computing alone."""
    threads = _available.get(torch.get_num_threads())
    if threads == 1:
        return [work(item) for item in items]
    with threads_for(0), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def widest(features: Tensor) -> Tensor:
    """The features in the widest floating-point type of their device."""
    return features.to(torch.float32 if features.device.type == "mps" else torch.float64)  # Apple GPUs lack float64


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


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """Solve A x = b for every row b of `right` (k, d), where `factor` (d, d) is the Cholesky factor of A."""
    return torch.cholesky_solve(right.T, factor).T
