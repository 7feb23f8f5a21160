"""Inputs that are made when they are asked for: rows of files, or of several sources put one after another."""

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


class LazyImages(ABC):
    """Images (N, h, w, c) of which none is in memory until it is asked for; to `Samples` it is what a tensor is."""

    dtype = torch.uint8
    shape: tuple[int, ...]

    @abstractmethod
    def __getitem__(self, rows: Tensor) -> Tensor:
        """The images of these rows, uint8 (len(rows), h, w, c), which may be changed."""

    @abstractmethod
    def identity(self, rows: Tensor) -> Iterator[bytes]:
        """What tells the images of these rows from others, found without making them."""


class Joined(LazyImages):
    """Rows of several sources, some of them in memory, one after another. Nothing is copied."""

    def __init__(self, parts: Sequence[tuple[Tensor | LazyImages, Tensor]]) -> None:
        self.parts = tuple(parts)  # (inputs, rows of them)
        self.ends = torch.tensor([len(rows) for _, rows in self.parts]).cumsum(0)
        self.shape = (int(self.ends[-1]), *self.parts[0][0].shape[1:])

    def __getitem__(self, rows: Tensor) -> Tensor:
        images = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for places, inputs, own in self._shared_out(rows):
            images[places] = inputs[own]
        return images

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        for places, inputs, own in self._shared_out(rows):
            yield places.numpy().tobytes()
            if isinstance(inputs, LazyImages):
                yield from inputs.identity(own)
            else:
                yield from (inputs[some].numpy().tobytes() for some in own.split(4096))

    def _shared_out(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor | LazyImages, Tensor]]:
        """For each part that has some of the rows: where they are among them, the part's inputs, its own rows."""
        owners = torch.searchsorted(self.ends, rows, right=True)
        for number, (inputs, own) in enumerate(self.parts):
            places = (owners == number).nonzero().squeeze(1)
            if len(places):
                yield places, inputs, own[rows[places] - self.ends[number] + len(own)]


def filled(count: int, shape: tuple[int, ...], make: Callable[[int, Pixels], None], workers: int | None) -> Tensor:
    """Images (count, *shape), each written by `make(number, pixels)`, by threads: decoders release Python's lock.

    Where no number of workers is asked for they are as many as torch may use, so that one setting limits both.
    """
    images = torch.empty((count, *shape), dtype=torch.uint8)
    # As numpy's: a copy by torch could start threads of its own in every one of these.
    pixels = images.numpy()
    threads = min(count, workers or torch.get_num_threads())
    if threads < 2:
        for number in range(count):
            make(number, pixels[number])
        return images
    with ThreadPoolExecutor(threads, "decode") as pool:
        list(pool.map(make, range(count), pixels))  # after an error, which shows here, the rest is not begun
    return images


Item = TypeVar("Item")
Result = TypeVar("Result")

BATCHES = 2  # that are made while another is used


def prefetch(
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
