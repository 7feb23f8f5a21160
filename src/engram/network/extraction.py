"""Features of many samples, extracted once and used by everything that follows."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.data import Samples
from engram.errors import TrainingError
from engram.network.network import Network
from engram.progress import SILENT, Progress

BATCH = 500  # large enough to keep every core busy, small enough to stay in cache


def extract(network: Network, samples: Samples, progress: Progress = SILENT, phase: str = "extract") -> Tensor:
    """h_θ of all samples, float32 (n, d) on the CPU, not normalised; the network answers as if in evaluation mode."""
    network = network.frozen()
    features = torch.empty(len(samples), network.dimension)
    with torch.no_grad(), progress.phase(phase, len(samples)) as running:
        for positions in torch.arange(len(samples)).split(BATCH):
            features[positions] = network.features(samples.batch(positions)).cpu()
            running.advance(len(positions))
    if not bool(torch.isfinite(features).all()):
        raise TrainingError("The network gives features that are not finite. Nothing of this task was kept.")
    return features
