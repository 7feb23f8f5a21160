"""Features of many samples, extracted once and used by everything that follows."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor

from engram.data import Samples
from engram.data.ahead import batches_of
from engram.errors import TrainingError
from engram.network.network import Network
from engram.progress import SILENT, Progress

BATCH = 500  # large enough to keep every core busy, small enough to stay in cache
PIXELS = BATCH * 96 * 96  # of larger images fewer, as what a network makes of them on its way would fill the memory


def extract(network: Network, samples: Samples, progress: Progress = SILENT, phase: str = "extract") -> Tensor:
    """h_θ of all samples, float32 (n, d) on the CPU, not normalised; the network answers as if in evaluation mode."""
    network = network.frozen()
    features = torch.empty(len(samples), network.dimension)
    with torch.no_grad(), progress.phase(phase, len(samples)) as running:
        parts = torch.arange(len(samples)).split(batch_size(samples.shape))
        with closing(batches_of(samples, parts)) as ready:
            for positions, inputs in zip(parts, ready, strict=True):
                features[positions] = network.features(inputs).cpu()
                running.advance(len(positions))
    if not bool(torch.isfinite(features).all()):
        raise TrainingError("The network gives features that are not finite. Nothing of this task was kept.")
    return features


def batch_size(shape: tuple[int, ...]) -> int:
    """How many samples of this shape are extracted at a time."""
    return BATCH if len(shape) == 1 else max(1, min(BATCH, PIXELS // (shape[0] * shape[1])))
