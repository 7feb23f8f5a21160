"""How many threads to compute with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from engram.network.catalogue import is_pretrained
from engram.network.extractors import SMALL_SIDE


@contextmanager
def threads_for(shape: tuple[int, ...], network: str | nn.Module = "auto") -> Iterator[None]:
    """Compute in one thread inside for vectors and images of a few pixels; otherwise in all that torch has chosen.

    The work of a small batch is over before a second thread has woken up, and on a busy machine waiting for it costs
    many times the work. A pretrained network enlarges small images, so it needs all threads. The choice depends only on
    the data and the network, so results do too.
    """
    before = torch.get_num_threads()
    if len(shape) == 1 or (min(shape[:2]) < SMALL_SIDE and not is_pretrained(network)):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
