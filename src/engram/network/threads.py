"""How many threads to compute with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engram.network.extractors import SMALL_SIDE


@contextmanager
def threads_for(shape: tuple[int, ...]) -> Iterator[None]:
    """One thread inside for vectors and images of a few pixels; for larger ones all that torch has chosen.

    The work of a small batch is over before a second thread has woken up, and on a busy machine waiting for it costs
    many times the work. The choice goes by the data alone, so that results do too.
    """
    before = torch.get_num_threads()
    if len(shape) == 1 or min(shape[:2]) < SMALL_SIDE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
