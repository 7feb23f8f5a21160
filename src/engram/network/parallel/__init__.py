"""Training in several processes, one per rank, as torchrun starts them; only this package asks for the rank.

All ranks execute the same code and call these functions in the same order. Each rank trains on its share of every
batch and extracts features of its share of the samples. In a single process, every function is a plain call.
"""

from engram.network.parallel.collectives import (
    all_gather,
    broadcast,
    broadcast_module,
    check_same,
    is_distributed,
    is_main,
    main_first,
    mean,
    mean_weight,
    on_main,
    part,
    share,
    world_size,
)
from engram.network.parallel.data_parallel import distributed_step
from engram.network.parallel.torchrun import process_group, refuse_torchrun

__all__ = ["all_gather", "broadcast", "broadcast_module", "check_same", "distributed_step", "is_distributed", "is_main"]
__all__ += ["main_first", "mean", "mean_weight", "on_main", "part", "process_group", "refuse_torchrun", "share"]
__all__ += ["world_size"]
