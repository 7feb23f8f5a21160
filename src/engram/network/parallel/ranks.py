"""Which process this is, of how many, and which part of the work is its own."""

from __future__ import annotations

import os
from typing import NamedTuple

from torch import distributed


def world_size() -> int:
    """How many processes work as one; 1 outside of a `process_group`."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return distributed.get_rank() if world_size() > 1 else 0


def is_distributed() -> bool:
    """Whether this process is one of several."""
    return world_size() > 1


def is_main() -> bool:
    """Whether this is the process that writes files and talks to people: of several, the first."""
    return rank() == 0


def part(count: int) -> slice:
    """This process's part of so many: contiguous, in the processes' order, and as large as any other within one."""
    least, left = divmod(count, world_size())
    start = rank() * least + min(rank(), left)
    return slice(start, start + least + (rank() < left))


class Share(NamedTuple):
    """A process's rows of a batch, and what their mean counts for.

    The mean over the processes of weight times mean is then the mean over the batch, although some have a row more.
    """

    rows: slice
    weight: float


def share(count: int) -> Share:
    """This process's share of a batch of so many rows. Of fewer rows than processes, each takes all."""
    if count < world_size():
        return Share(slice(0, count), 1.0)
    rows = part(count)
    return Share(rows, (rows.stop - rows.start) * world_size() / count)


class Place(NamedTuple):
    """Where a launcher has put this process: by its number among all, and among those of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int


def place() -> Place | None:
    """The place that torchrun, or whoever sets the same variables, has given this process; None for a lone one."""
    if any(name not in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    return Place(number, count, int(local_rank), int(local_size)) if count > 1 else None
