"""How long the parts of learning take, from a few steps timed on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engram.data import Samples
from engram.methods.learner import Learner, Work
from engram.network import Network, choose_device, extract, threads_for
from engram.network.network import BATCH
from engram.network.pretrained import Pretrained

STEPS = 3  # timed of each kind; the fastest counts
PIXELS = BATCH * 32 * 32  # in a timed step; a few large images tell as much as many small ones


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, per image or per step of an adapter."""

    trained: float  # an image in training
    extracted: float  # an image through a frozen network
    adapter_step: float

    def training(self, work: Work) -> float:
        """Seconds to train the network, or its head alone on a frozen extractor."""
        student = self.extracted if work.head_only else self.trained
        return work.trained * (work.passes * student + (self.extracted if work.taught else 0.0))

    def absorbing(self, work: Work) -> float:
        """Seconds to extract features and to adapt the stored ones."""
        return work.extracted * self.extracted + work.adapter_steps * self.adapter_step


def measure_costs(
    learner: Learner, samples: Samples, classes: int, *, pairs: int | None = None, trains: bool = True
) -> Costs:
    """Time a few steps of what this learner would do with samples like these, of so many classes.

    An adapter learns from `pairs` of features, which may be fewer than its batch. If nothing is trained, only
    extraction is timed.
    """
    with threads_for(samples.shape, learner.network):
        base = (learner.network_ or learner.initial_network(samples)).to(choose_device(learner.device))
        some = samples.select(torch.arange(min(len(samples), _batch_size(base, samples.shape))))
        batch = some.batch(torch.arange(min(len(some), learner.training.batch_size)))
        student = base.grown(classes, 0, trainable=learner.tuned).train()
        frozen = student.frozen()
        extracted = _fastest(lambda: extract(frozen, some)) / len(some)
        if not trains:
            return Costs(0.0, extracted, 0.0)
        trained = _fastest(lambda: student(batch)[1].square().mean().backward()) / len(batch)
        adapting = _fastest(lambda: learner.make_adapter().try_steps(STEPS, base.dimension, pairs))
        return Costs(trained, extracted, adapting / STEPS)


def _batch_size(network: Network, shape: tuple[int, ...]) -> int:
    """How many samples of this shape a timed step has, at most."""
    if len(shape) == 1:
        return BATCH
    pretrained = isinstance(network.extractor, Pretrained)
    pixels = int(network.extractor.input_size) ** 2 if pretrained else shape[0] * shape[1]  # type: ignore[arg-type]
    return max(8, min(BATCH, PIXELS // pixels))


def _fastest(work: Callable[[], object]) -> float:
    work()  # a warm-up
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
