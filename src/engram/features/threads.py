"""How many threads compute: one for something small, or several small things side by side.

Threads that share one small matrix product mostly wait for each other, on a busy machine for many times the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALL = 2**33  # multiplications: a few tenths of a second of one processor

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
