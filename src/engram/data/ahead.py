"""Work that is begun before its result is asked for, by threads: in order, a bounded part of it at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from engram.data.lazy import Lazy
from engram.data.samples import Samples

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCHES = 2  # that are made while another is used


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, workers: int, ahead: int
) -> Generator[Result, None, None]:
    """What `work` makes of each item, in order; no more than `ahead` are begun before they are asked for.

    An error of `work` shows where its result would have been. Whoever does not go through to the end closes this: what
    is under way is then waited for, and the rest is not begun.
    """
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, "ahead") as pool:
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > ahead:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def batches_of(samples: Samples, parts: Iterable[Tensor]) -> Generator[Tensor, None, None]:
    """The inputs at the positions of each part, in order. Those that are not in memory are made ahead of their use.

    To be closed by whoever may not go through to the end (`contextlib.closing`).
    """
    if not isinstance(samples.inputs, Lazy):
        yield from map(samples.batch, parts)
        return
    # One thread: a batch is made by several already, and the next one should not take them from it.
    yield from in_order(samples.batch, parts, workers=1, ahead=BATCHES)
