"""Features of many samples, extracted once and used by everything that follows."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.data import Samples
from engram.errors import TrainingError
from engram.network import parallel
from engram.network.network import Network
from engram.progress import SILENT, Progress

BATCH = 500  # large enough to keep every core busy, small enough to stay in cache


def extract(network: Network, samples: Samples, progress: Progress = SILENT, phase: str = "extract") -> Tensor:
    """h_θ of all samples, float32 (n, d) on the CPU, not normalised; the network answers as if in evaluation mode."""
    network = network.frozen()
    # Of several processes each takes some of the batches, which are those that one process would take.
    batches = torch.arange(len(samples)).split(BATCH)
    own = batches[parallel.part(len(batches))]
    features, done = torch.empty(sum(map(len, own)), network.dimension), 0
    with torch.no_grad(), progress.phase(phase, len(features)) as running:
        for positions in own:
            features[done : done + len(positions)] = network.features(samples.batch(positions)).cpu()
            done += len(positions)
            running.advance(len(positions))
    features = parallel.whole(features)
    if not bool(torch.isfinite(features).all()):
        raise TrainingError("The network gives features that are not finite. Nothing of this task was kept.")
    return features
