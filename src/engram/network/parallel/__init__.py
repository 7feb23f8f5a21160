"""What many processes change: nothing outside of here asks for a rank.

Every process of a run does the same, in the same order, and calls these functions at the same places. Each trains on
its share of every batch and extracts its share of the samples; what cannot be shared out, the first does once for all.
Where there is one process, every function does just what it is given.
"""

from engram.network.parallel.exchange import agree, align, by_turns, mean, on_first, once, weight_among, whole
from engram.network.parallel.ranks import Share, part, share, size, speaks, together
from engram.network.parallel.steps import Step, trained_together
from engram.network.parallel.world import refuse_several, world

__all__ = [
    "Share",
    "Step",
    "agree",
    "align",
    "by_turns",
    "mean",
    "on_first",
    "once",
    "part",
    "refuse_several",
    "share",
    "size",
    "speaks",
    "together",
    "trained_together",
    "weight_among",
    "whole",
    "world",
]
