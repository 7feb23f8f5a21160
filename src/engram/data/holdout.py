"""`hold_out`: set a share of every class aside, the same one each time."""

from __future__ import annotations

import torch

from engram.data.samples import Samples
from engram.randomness import generator


def hold_out(samples: Samples, share: float, seed: int, purpose: str, *, smallest: int = 2) -> tuple[Samples, Samples]:
    """(the rest, the held out), each in its present order: `share` of each class, at least one, but never its last.

    A class of fewer than `smallest` samples gives none.
    """
    held = torch.zeros(len(samples), dtype=torch.bool)
    labels, counts = samples.labels.unique(return_counts=True)
    by_class = samples.labels.argsort(stable=True).split(counts.tolist())
    for label, positions in zip(labels.tolist(), by_class, strict=True):
        count = min(max(round(share * len(positions)), 1), len(positions) - 1)
        count = count if len(positions) >= smallest else 0
        drawn = torch.randperm(len(positions), generator=generator(seed, purpose, label))
        held[positions[drawn[:count]]] = True
    return samples.select((~held).nonzero().squeeze(1)), samples.select(held.nonzero().squeeze(1))
