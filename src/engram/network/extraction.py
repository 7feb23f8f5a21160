"""Features of many samples, extracted once for everything that follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from engram.data import Samples
from engram.errors import TrainingError
from engram.network import parallel
from engram.network.backbones import Pretrained
from engram.network.cache import Cache
from engram.network.network import Network
from engram.progress import SILENT, Progress

BATCH = 500  # large enough to occupy every core, small enough for the processor's cache
PIXELS = BATCH * 96 * 96  # of a batch, at most: activations of more would fill the memory
PRETRAINED_BATCH = 8  # for images of about 224 pixels, as activations of more do not fit the processor's cache


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
    yield from (network.extractor, network.crop, network.mean.device.type, network.is_bfloat16)
    for name, tensor in network.state_dict().items():
        if not name.startswith("head."):
            yield from (name, tensor)
    yield samples.fingerprint()


def _extract(network: Network, samples: Samples, progress: Progress, phase: str) -> Tensor:
    size = PRETRAINED_BATCH if isinstance(network.extractor, Pretrained) else batch_size(samples.shape)
    batches = torch.arange(len(samples)).split(size)
    own = batches[parallel.part(len(batches))]  # of this rank; the batches do not depend on the number of ranks
    features, done = torch.empty(sum(map(len, own)), network.dimension), 0
    with torch.no_grad(), progress.phase(phase, len(features)) as running, closing(samples.batches(own)) as loaded:
        for inputs in loaded:
            features[done : done + len(inputs)] = network.features(inputs).cpu()
            done += len(inputs)
            running.advance(len(inputs))
    features = parallel.all_gather(features)
    if not bool(torch.isfinite(features).all()):
        raise TrainingError("The network gives features that are not finite. The task was not committed.")
    return features


def batch_size(shape: tuple[int, ...]) -> int:
    """The number of samples of this shape in a batch."""
    return BATCH if len(shape) == 1 else max(1, min(BATCH, PIXELS // (shape[0] * shape[1])))
