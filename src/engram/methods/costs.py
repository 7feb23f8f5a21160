"""How long the parts of learning take, from a few steps timed on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.data import Samples
from engram.methods.learner import Learner, Work, choose_device
from engram.network import Network, extract, make_network, threads_for
from engram.network.backbones import Pretrained
from engram.network.extraction import BATCH

STEPS = 3  # timed of each kind; the fastest counts
PIXELS = BATCH * 32 * 32  # in a step; a few large images tell as much as many


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, per image or per step of an adapter."""

    first: float  # an image in training without a teacher
    taught: float  # with one
    head: float  # an image in training of the head alone, without a teacher
    extracted: float
    adapter_step: float

    def training(self, work: Work) -> float:
        """Seconds to train the network, or its head alone."""
        if work.head_only:
            return work.trained * (self.head + (self.extracted if work.taught else 0.0))
        return work.trained * (self.taught if work.taught else self.first)

    def absorbing(self, work: Work) -> float:
        """Seconds to extract features and to adapt the stored ones."""
        return work.extracted * self.extracted + work.adapter_steps * self.adapter_step


def measure_costs(
    learner: Learner, samples: Samples, classes: int, *, pairs: int | None = None, trains: bool = True
) -> Costs:
    """Time a few steps of what this learner would do with samples like these, of so many classes.

    An adapter learns from `pairs` of features, which may be fewer than its batch. Where nothing is trained, only
    extraction is timed.
    """
    with threads_for(samples.shape, learner.network):
        crop, device = learner.training.crop, choose_device(learner.device)
        base = learner.network_ or make_network(
            learner.network, learner.head, samples, seed=0, last_relu=learner.last_relu, crop=crop
        )
        most = _batch_size(base, samples.shape)
        batch = samples.batch(torch.arange(min(len(samples), learner.training.batch_size, most)))
        student = base.grown(classes, 0, trainable=learner.tuned).to(device)
        teacher = student.frozen()
        some = samples.select(torch.arange(min(len(samples), most)))
        extracted = _fastest(lambda: extract(teacher, some)) / len(some)
        if not trains:
            return Costs(0.0, 0.0, 0.0, extracted, 0.0)
        only_head = base.grown(classes, 0, trainable="head").to(device)
        return Costs(
            first=_fastest(lambda: _step(student.train(), None, batch)) / len(batch),
            taught=_fastest(lambda: _step(student.train(), teacher, batch)) / len(batch),
            head=_fastest(lambda: _step(only_head.train(), None, batch)) / len(batch),
            extracted=extracted,
            adapter_step=_fastest(lambda: learner.try_adapter(STEPS, student.dimension, pairs)) / STEPS,
        )


def _batch_size(network: Network, shape: tuple[int, ...]) -> int:
    """How many samples of this shape a timed step has, at most."""
    if len(shape) == 1:
        return BATCH
    pretrained = isinstance(network.extractor, Pretrained)
    pixels = int(network.extractor.input_size) ** 2 if pretrained else shape[0] * shape[1]  # type: ignore[arg-type]
    return max(8, min(BATCH, PIXELS // pixels))


def _step(student: Network, teacher: Network | None, batch: Tensor) -> None:
    _, scores = student(batch)
    if teacher is not None:
        with torch.no_grad():
            teacher(batch)
    scores.square().mean().backward()


def _fastest(work: Callable[[], object]) -> float:
    work()  # the first time also makes what later ones find made
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
