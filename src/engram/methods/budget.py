"""A budget in bytes: how many images, how many features, or how many of both, fit what may be kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from engram.data import Samples
from engram.errors import UsageError
from engram.features import MEGABYTE
from engram.methods.features import Features
from engram.methods.learner import Learner
from engram.methods.replay import Rehearsing
from engram.network import make_network

UNITS = {"B": 1, "KB": 2**10, "MB": MEGABYTE, "GB": 2**30}  # the paper's MB


def parse_bytes(text: str) -> int:
    """`6MB`, `500 KB`, `1.5GB` or a plain number of bytes; powers of 1024, as the paper counts."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmg]?)(?:i?b)?\s*", text, re.IGNORECASE)
    count = int(float(found[1]) * UNITS[f"{found[2]}B".upper()]) if found else 0
    if not count:
        raise UsageError(f"'{text}' is no number of bytes. Write 6MB, 500KB or 1.5GB.")
    return count


def fit_budget(
    learner: Learner, asked: Mapping[str, Any], budget: int, classes: int, samples: Samples
) -> dict[str, int]:
    """How many images and features a learner may keep so that those of `classes` classes fit `budget` bytes.

    `asked` are settings that must stay; `samples` are like those that are learned. Where images and features are both
    to be chosen, each gets half of the bytes.
    """
    costs = _costs(learner, classes, samples)
    if not costs:
        raise UsageError(f"What the method '{learner.name}' keeps cannot be chosen by a budget. Leave out --budget.")
    given = {name: int(asked[name]) for name in costs if asked.get(name) is not None}
    open_ones = [name for name in costs if name not in given]
    if not open_ones:
        raise UsageError(f"{' and '.join(given)} are given: nothing is left for --budget to choose.")
    fewest = {name: classes if name == "images_total" else 1 for name in costs}
    least = sum(costs[name] * given.get(name, fewest[name]) for name in costs)
    if budget < least:
        raise UsageError(f"A budget of {budget:,} bytes is too small: one of each class would be {least:,}.")
    spare = budget - least  # beyond the fewest of each, which half of the bytes need not hold
    chosen: dict[str, int] = {}
    for number, name in enumerate(open_ones):
        whole = spare + sum(costs[other] * fewest[other] for other in open_ones[number:])
        share = whole // (len(open_ones) - number)
        chosen[name] = max(fewest[name], min(share, spare + costs[name] * fewest[name]) // costs[name])
        spare -= (chosen[name] - fewest[name]) * costs[name]
    return chosen


def _costs(learner: Learner, classes: int, samples: Samples) -> dict[str, int]:
    """The bytes, over all classes, of one more of each thing that can be chosen."""
    costs: dict[str, int] = {}
    if isinstance(learner, Rehearsing):
        image = samples.sample_bytes
        total = learner.exemplars.images_total is not None
        costs |= {"images_total": image} if total else {"images_per_class": classes * image}
    if isinstance(learner, Features):
        costs["features_per_class"] = classes * dimension_of(learner, samples) * 4  # float32
    return costs


def dimension_of(learner: Learner, samples: Samples) -> int:
    """d: how long the feature vectors of samples like these are, or will be."""
    if learner.network_ is not None:
        return learner.network_.dimension
    one = samples.select(torch.arange(1))
    return make_network(learner.network, learner.head, one, seed=0, side=learner.training.crop).dimension
