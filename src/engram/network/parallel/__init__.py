"""What many processes change: nothing outside of here asks for a rank.

Every process of a run does the same, in the same order, and calls these functions at the same places. Each trains on
its share of every batch and extracts its share of the samples; what cannot be shared out, the first does once for all.
Where there is one process, every function does just what it is given.
"""

from engram.network.parallel.exchange import (
    all_gather,
    broadcast,
    broadcast_module,
    check_same,
    main_first,
    mean,
    mean_weight,
    on_main,
)
from engram.network.parallel.process_group import process_group, refuse_torchrun
from engram.network.parallel.ranks import Share, is_distributed, is_main, part, share, world_size
from engram.network.parallel.steps import Step, distributed_step

__all__ = [
    "Share",
    "Step",
    "all_gather",
    "broadcast",
    "broadcast_module",
    "check_same",
    "distributed_step",
    "is_distributed",
    "is_main",
    "main_first",
    "mean",
    "mean_weight",
    "on_main",
    "part",
    "process_group",
    "refuse_torchrun",
    "share",
    "world_size",
]
