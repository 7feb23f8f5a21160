"""Images that are produced on request, and prefetching: results computed by threads before they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Pixels = npt.NDArray[np.uint8]
Item = TypeVar("Item")
Result = TypeVar("Result")

BATCHES = 2  # prefetched while another is used


class LazyImages(ABC):
    """Images (N, h, w, c) that are in memory only when indexed; `Samples` uses it in place of a tensor."""

    dtype = torch.uint8
    shape: tuple[int, ...]

    @abstractmethod
    def __getitem__(self, rows: Tensor) -> Tensor:
        """The images of these rows, uint8 (len(rows), h, w, c); a new tensor."""

    @abstractmethod
    def identity(self, rows: Tensor) -> Iterator[bytes]:
        """Bytes that identify the images of these rows, without producing them."""


class Joined(LazyImages):
    """Rows of several sources, some of them tensors, one after another. Nothing is copied."""

    def __init__(self, parts: Sequence[tuple[Tensor | LazyImages, Tensor]]) -> None:
        self.parts = tuple(parts)  # (inputs, rows of them)
        self.ends = torch.tensor([len(rows) for _, rows in self.parts]).cumsum(0)
        self.shape = (int(self.ends[-1]), *self.parts[0][0].shape[1:])

    def __getitem__(self, rows: Tensor) -> Tensor:
        images = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for positions, inputs, own in self._by_part(rows):
            images[positions] = inputs[own]
        return images

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        for positions, inputs, own in self._by_part(rows):
            yield positions.numpy().tobytes()
            if isinstance(inputs, LazyImages):
                yield from inputs.identity(own)
            else:
                yield from (inputs[some].numpy().tobytes() for some in own.split(4096))

    def _by_part(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor | LazyImages, Tensor]]:
        """For each part that owns some of the rows: their positions among `rows`, its inputs, its own row numbers."""
        owners = torch.searchsorted(self.ends, rows, right=True)
        for number, (inputs, own) in enumerate(self.parts):
            positions = (owners == number).nonzero().squeeze(1)
            if len(positions):
                yield positions, inputs, own[rows[positions] - self.ends[number] + len(own)]


def fill(count: int, shape: tuple[int, ...], write: Callable[[int, Pixels], None], workers: int | None) -> Tensor:
    """Images (count, *shape), each written by `write(number, pixels)` in threads: decoders release the GIL.

    By default there are as many workers as torch may use threads, so that one setting limits both.
    """
    images = torch.empty((count, *shape), dtype=torch.uint8)
    pixels = images.numpy()  # numpy copies start no threads; torch's could, in every worker
    threads = min(count, workers or torch.get_num_threads())
    if threads < 2:
        for number in range(count):
            write(number, pixels[number])
        return images
    with ThreadPoolExecutor(threads, "decode") as pool:
        list(pool.map(write, range(count), pixels))  # raises the first error; the rest is not started
    return images


def prefetch(
    work: Callable[[Item], Result], items: Iterable[Item], *, workers: int, ahead: int
) -> Generator[Result, None, None]:
    """`work(item)` for each item, in order; at most `ahead` are started before they are asked for.

    An error is raised in the place of its result. Close the generator if it may not be exhausted: running work is
    waited for, and no more is started.
    """
    started: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, "prefetch") as pool:
        try:
            for item in items:
                started.append(pool.submit(work, item))
                if len(started) > ahead:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
