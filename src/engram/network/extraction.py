"""Features of many samples, extracted once and used by everything that follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from engram.data import Samples
from engram.errors import TrainingError
from engram.network import parallel
from engram.network.cache import Cache
from engram.network.network import Network
from engram.network.pretrained import Pretrained
from engram.progress import SILENT, Progress

BATCH = 500  # large enough to keep every core busy, small enough to stay in cache
PIXELS = BATCH * 96 * 96  # of larger images fewer, as what a network makes of them on its way would fill the memory
PRETRAINED_BATCH = 8  # images of 224 pixels or so: of more, the output of a layer does not stay in the cache


def extract(
    network: Network,
    samples: Samples,
    progress: Progress = SILENT,
    phase: str = "extract",
    *,
    cache: Cache | None = None,
) -> Tensor:
    """h_θ of all samples, float32 (n, d) on the CPU, not normalised; computed in evaluation mode."""
    network = network.frozen()
    if cache is None:
        return _extract(network, samples, progress, phase)
    return cache.get(
        "features", _key(network, samples), lambda: {"features": _extract(network, samples, progress, phase)}
    )["features"]


def _key(network: Network, samples: Samples) -> Iterator[object]:
    """Everything that features depend on; the head is not part of it."""
    yield from (network.extractor, network.side, network.mean.device.type)
    if network.coarse:
        yield "bfloat16"
    for name, tensor in network.state_dict().items():
        if not name.startswith("head."):
            yield from (name, tensor)
    yield samples.fingerprint()


def _extract(network: Network, samples: Samples, progress: Progress, phase: str) -> Tensor:
    # Of several processes each takes some of the batches, which are those that one process would take.
    pretrained = isinstance(network.extractor, Pretrained)
    batches = torch.arange(len(samples)).split(PRETRAINED_BATCH if pretrained else batch_size(samples.shape))
    own = batches[parallel.part(len(batches))]
    features, done = torch.empty(sum(map(len, own)), network.dimension), 0
    with torch.no_grad(), progress.phase(phase, len(features)) as running, closing(samples.batches(own)) as ready:
        for inputs in ready:
            features[done : done + len(inputs)] = network.features(inputs).cpu()
            done += len(inputs)
            running.advance(len(inputs))
    features = parallel.all_gather(features)
    if not bool(torch.isfinite(features).all()):
        raise TrainingError("The network gives features that are not finite. Nothing of this task was kept.")
    return features


def batch_size(shape: tuple[int, ...]) -> int:
    """How many samples of this shape are extracted at a time."""
    return BATCH if len(shape) == 1 else max(1, min(BATCH, PIXELS // (shape[0] * shape[1])))
