"""How long the parts of learning take, from a few steps timed here and now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.data import Samples
from engram.features import Pairs
from engram.methods.features import Features
from engram.methods.learner import Learner, choose_device
from engram.network import Network, extract, make_network, threads_for
from engram.network.extraction import BATCH
from engram.network.pretrained import Pretrained

STEPS = 3  # timed of each kind; the fastest counts
PIXELS = BATCH * 32 * 32  # in a step; of large images a few tell as much as many


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, per image or per step of an adapter."""

    first: float  # an image in training without a teacher
    taught: float  # with one
    head: float  # an image in training of the head alone, without a teacher
    extracted: float
    adapter_step: float


def measure_costs(
    learner: Learner, samples: Samples, classes: int, *, pairs: int | None = None, trains: bool = True
) -> Costs:
    """Time a few steps of what this learner would do with samples like these, of so many classes.

    An adapter would learn from so many `pairs`, of which there may be fewer than it takes at a time. Where nothing is
    trained, only extraction is timed.
    """
    with threads_for(samples.shape, learner.network):
        side, device = learner.training.crop, choose_device(learner.device)
        base = learner.network_ or make_network(
            learner.network, learner.head, samples, seed=0, last_relu=learner.last_relu, side=side
        )
        most = _most(base, samples.shape)
        batch = samples.batch(torch.arange(min(len(samples), learner.training.batch_size, most)))
        student = base.grown(classes, 0, tuned=learner.tuned).to(device)
        teacher = student.frozen()
        some = samples.select(torch.arange(min(len(samples), most)))
        if not trains:
            return Costs(0.0, 0.0, 0.0, _fastest(lambda: extract(teacher, some)) / len(some), 0.0)
        only_head = base.grown(classes, 0, tuned="head").to(device)
        first = _fastest(lambda: _step(student.train(), None, batch)) / len(batch)
        taught = _fastest(lambda: _step(student.train(), teacher, batch)) / len(batch)
        head = _fastest(lambda: _step(only_head.train(), None, batch)) / len(batch)
        extracted = _fastest(lambda: extract(teacher, some)) / len(some)
        return Costs(first, taught, head, extracted, _adapter_step(learner, student.dimension, pairs))


def _most(network: Network, shape: tuple[int, ...]) -> int:
    """How many samples of this shape are in a step that is timed, at most."""
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


def _adapter_step(learner: Learner, dimension: int, most: int | None) -> float:
    if not isinstance(learner, Features) or learner.adaptation.adapter == "identity":
        return 0.0
    # An MLP, which is what is counted in steps, and from a random start: to solve the last layer is done once, not in
    # every step.
    few = replace(learner.adaptation, adapter="mlp", adapter_init="random", adapter_steps=STEPS)
    vectors = torch.randn(few.adapter_batch if most is None else min(few.adapter_batch, most), dimension)
    pairs = Pairs(vectors, vectors, torch.zeros(len(vectors), dtype=torch.int64))
    return _fastest(lambda: few.fit(pairs, lambda carried, _: carried.sum(), seed=0, task=0)) / STEPS


def _fastest(work: Callable[[], object], times: int = STEPS) -> float:
    work()  # the first time also makes what later ones find made
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
