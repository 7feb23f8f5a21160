"""What codecs lose over ten tasks: stored vectors are adapted, joined by new ones and encoded, again and again.

    python benchmarks/codecs.py [--seeds 3]  (a minute a seed)

The drift is simulated: ten known maps take the place of adapters, so every loss is the codec's. Each task brings ten
classes of fifty vectors of 64 numbers, which vary along few directions, as features do. The ways are compared by the
mean cosine to the same vectors adapted as float32:

together   all vectors are encoded together after every task, as engram does
apart      each task's vectors have scales or codebooks of their own, all encoded after every task
once       adapted as float32 and encoded once at the end, which no learner can do: the loss of one encoding
idle       as together, but without drift: decoded vectors are encoded again, as engram does
idle, unit the same, with vectors normalised to unit length before each encoding

The result: benchmarks/results/codecs.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.features import Codec, Encoded, Float16, Int8, ProductQuantisation
from engram.randomness import generator
from engram.storage import write_json

TASKS, CLASSES, PER_CLASS, DIMENSION = 10, 10, 50, 64
SPREAD = 0.6  # within a class, beside 1 between them
SIZES = 0.88 ** torch.arange(DIMENSION)  # of the directions: half of what there is lies along three of them
DRIFT = 0.03  # how much of each number becomes one of the others, from task to task: a cosine of about .97
CODECS = {
    "float16": Float16(),
    "int8": Int8(),
    "pq, 32 bytes": ProductQuantisation(codec_bytes=32),
    "pq, 16 bytes": ProductQuantisation(codec_bytes=16),
    "pq, 8 bytes": ProductQuantisation(codec_bytes=8),
}
RESULT = Path(__file__).parent / "results" / "codecs.json"

Adapter = Callable[[Tensor], Tensor]
Group = Callable[[Sequence[Tensor]], list[Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    begin = time.perf_counter()
    found = [measure(seed) for seed in range(options.seeds)]
    mean = {codec: {way: averaged([each[codec][way] for each in found]) for way in found[0][codec]} for codec in CODECS}
    class_indices = ("last", "first_task", "after_one_task", "bytes")
    print(f"{'':14}{'':12}" + "".join(f"{name:>16}" for name in class_indices))
    for codec, ways in mean.items():
        for way, numbers in ways.items():
            print(f"{codec:14}{way:12}" + "".join(f"{numbers[name]:16.6g}" for name in class_indices))
    setting = {"tasks": TASKS, "classes_per_task": CLASSES, "per_class": PER_CLASS, "dimension": DIMENSION}
    seconds = round(time.perf_counter() - begin, 1)
    drift = {"drift": DRIFT, "cosine_of_one_step": fmean(cosine_of_one_step(seed) for seed in range(options.seeds))}
    write_json(RESULT, {**setting, **drift, "seeds": options.seeds, "seconds": seconds, "cosine_distance": mean})


def averaged(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(each[name] for each in found) for name in found[0]}


def measure(seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """1 − cosine to the exact vectors, for each codec and way."""
    arriving, adapters = arrivals(seed), drifts(seed)
    still: list[Adapter] = [lambda vectors: vectors] * TASKS
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, codec in CODECS.items():
        found[name] = {
            "together": chain(arriving, adapters, codec, joined),
            "apart": chain(arriving, adapters, codec, list),
            "once": encoded_once(arriving, adapters, codec),
            "idle": chain(arriving, still, codec, joined, lambda each: each.approximations()),
            "idle, unit": chain(arriving, still, codec, joined),
        }
    return found


def arrivals(seed: int) -> list[Tensor]:
    """The new vectors of each task, (500, 64)."""
    draws = generator(seed, "arrivals")
    turn = torch.linalg.qr(torch.randn(DIMENSION, DIMENSION, generator=draws))[0]
    centres = torch.randn(TASKS, CLASSES, 1, DIMENSION, generator=draws)
    noise = torch.randn(TASKS, CLASSES, PER_CLASS, DIMENSION, generator=draws)
    return list(F.normalize((SIZES * (centres + SPREAD * noise)) @ turn, dim=-1).flatten(1, 2))


def drifts(seed: int) -> list[Adapter]:
    """A map for each task that mixes numbers, as those of features do when their network is trained on."""
    draws = generator(seed, "drift")
    mixing = torch.eye(DIMENSION) + DRIFT * torch.randn(TASKS, DIMENSION, DIMENSION, generator=draws)
    return [lambda vectors, mixed=mixed: F.normalize(vectors @ mixed) for mixed in mixing]  # type: ignore[misc]


def cosine_of_one_step(seed: int) -> float:
    vectors, adapter = torch.cat(arrivals(seed)), drifts(seed)[1]
    return float((adapter(vectors) * vectors).sum(1).mean())


def exact(arriving: Sequence[Tensor], adapters: Sequence[Adapter]) -> list[list[Tensor]]:
    """After every task, the vectors of all tasks so far, never encoded."""
    history: list[list[Tensor]] = []
    parts: list[Tensor] = []
    for new, adapter in zip(arriving, adapters, strict=True):
        parts = [*(adapter(part) for part in parts), new]
        history.append(parts)
    return history


def joined(parts: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(parts))]


def chain(
    arriving: Sequence[Tensor],
    adapters: Sequence[Adapter],
    codec: Codec,
    group: Group,
    decode: Callable[[Encoded], Tensor] = Encoded.decode,
) -> dict[str, float]:
    """Decode, adapt, join, encode; `group` says what is encoded together."""
    kept: list[Encoded] = []
    losses: list[Tensor] = []
    for new, adapter, truth in zip(arriving, adapters, exact(arriving, adapters), strict=True):
        old = torch.cat([decode(each) for each in kept]) if kept else new[:0]
        parts = [*(adapter(part) for part in old.split(len(new)) if len(part)), new]
        kept = [codec.encode(*each) for each in zip_longest(group(parts), kept)]
        losses.append(loss(kept, truth))
    return output(losses, kept)


def encoded_once(arriving: Sequence[Tensor], adapters: Sequence[Adapter], codec: Codec) -> dict[str, float]:
    history = exact(arriving, adapters)
    kept = [codec.encode(torch.cat(history[-1]))]
    return output([loss([codec.encode(history[0][0])], history[0]), loss(kept, history[-1])], kept)


def loss(kept: Sequence[Encoded], truth: Sequence[Tensor]) -> Tensor:
    """1 − cosine of every vector."""
    decoded = torch.cat([each.decode() for each in kept]).double()
    return 1 - (decoded * F.normalize(torch.cat(list(truth)).double())).sum(1)


def output(losses: Sequence[Tensor], kept: Sequence[Encoded]) -> dict[str, Any]:
    return {
        "after_one_task": float(losses[0].mean()),
        "last": float(losses[-1].mean()),  # of all vectors, after the last task
        "first_task": float(losses[-1][: CLASSES * PER_CLASS].mean()),  # of those that were encoded ten times
        "bytes": sum(each.nbytes for each in kept),
    }


if __name__ == "__main__":
    main()
