"""A budget in bytes: how many images and features fit what may be kept, and by which codec."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from engram.data import Samples
from engram.errors import UsageError
from engram.features import MEGABYTE, Coding
from engram.features.codebooks import installed
from engram.methods.features import Features
from engram.methods.learner import Learner
from engram.methods.replay import Rehearsing
from engram.network import make_network

MOST = 2**60  # of anything
ENOUGH = 250  # vectors of a class: more of them are worth little
UNITS = {"B": 1, "KB": 2**10, "MB": MEGABYTE, "GB": 2**30}  # the paper's MB


def parse_bytes(text: str) -> int:
    """`6MB`, `500 KB`, `1.5GB` or a plain number of bytes; powers of 1024, as the paper counts."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmg]?)(?:i?b)?\s*", text, re.IGNORECASE)
    count = int(float(found[1]) * UNITS[f"{found[2]}B".upper()]) if found else 0
    if not count:
        raise UsageError(f"'{text}' is no number of bytes. Write 6MB, 500KB or 1.5GB.")
    return count


class BudgetError(UsageError):
    """A budget that does not hold one of each class."""


def fit_budget(
    learner: Learner, asked: Mapping[str, Any], budget: int, classes: int, samples: Samples, most: int = MOST
) -> dict[str, Any]:
    """How many images and features a learner may keep so that those of `classes` classes fit `budget` bytes.

    `asked` are settings that must stay; `samples` are like those that are learned, of which a class has `most`. Where
    images and features are both to be chosen, each gets half of the bytes, and what one has no use for goes to the
    other. Where the codec is left open, it is chosen too: the one by which what is kept is worth most.
    """
    dimension = dimension_of(learner, samples) if isinstance(learner, Features) else 0
    sizes = _sizes(learner, classes, samples, dimension)
    if not sizes:
        raise UsageError(f"What the method '{learner.name}' keeps cannot be chosen by a budget. Leave out --budget.")
    given = {name: int(float(asked[name])) for name in sizes if asked.get(name) is not None}  # 10.0 is a whole number
    if not isinstance(learner, Features) or learner.coding.codec != "auto":
        if len(given) == len(sizes):
            raise UsageError(f"{' and '.join(given)} are given: nothing is left for --budget to choose.")
        return _fitted(sizes, given, budget, classes, most)
    found: list[tuple[float, dict[str, Any]]] = []
    for coding, worth, enough in _codings(dimension):
        sizes = _sizes(replace(learner, coding=coding), classes, samples, dimension)
        try:
            chosen = _fitted(sizes, given, budget, classes, most)
        except BudgetError as error:
            refusal = error
            continue
        vectors = {**given, **chosen}["features_per_class"]
        settings = {"codec": coding.codec, "codec_bytes": coding.codec_bytes}
        found.append((min(worth * vectors, enough), {**chosen, **settings}))
    if not found:
        raise refusal
    return max(found, key=lambda each: each[0])[1]


def _fitted(
    sizes: Mapping[str, Callable[[int], int]], given: Mapping[str, int], budget: int, classes: int, most: int
) -> dict[str, int]:
    open_ones = [name for name in sizes if name not in given]
    fewest = {name: classes if name == "images_total" else 1 for name in sizes}
    all_there_are = {name: most * fewest[name] for name in sizes}
    smallest = {name: sizes[name](given.get(name, fewest[name])) for name in sizes}
    least = sum(smallest.values())
    if budget < least:
        raise BudgetError(f"A budget of {budget:,} bytes is too small: one of each class would be {least:,}.")
    spare = budget - least  # beyond the fewest of each, which half of the bytes need not hold
    # Those of which a class has few enough to keep them all come first: what they leave is the others'.
    open_ones.sort(key=lambda name: sizes[name](all_there_are[name]) > budget // 2)
    chosen: dict[str, int] = {}
    for number, name in enumerate(open_ones):
        whole = spare + sum(smallest[other] for other in open_ones[number:])
        share = whole // (len(open_ones) - number)
        fitting = largest(sizes[name], min(share, spare + smallest[name]))
        is_last = number == len(open_ones) - 1
        chosen[name] = max(fewest[name], fitting if is_last else min(fitting, all_there_are[name]))
        spare -= sizes[name](chosen[name]) - smallest[name]
    return chosen


def largest(size: Callable[[int], int], room: int, most: int | None = None) -> int:
    """The largest number, up to `most`, whose `size` in bytes is within `room`; 0 if not even 1 is.

    `size` must not fall as the number grows; with no `most`, it must grow by a byte each time.
    """
    most = min(max(room, 0), MOST) if most is None else most
    return bisect_right(range(1, 1 + most), room, key=size)


def _sizes(learner: Learner, classes: int, samples: Samples, dimension: int) -> dict[str, Callable[[int], int]]:
    """The bytes, over all classes, of so many of each thing that can be chosen."""
    sizes: dict[str, Callable[[int], int]] = {}
    if isinstance(learner, Rehearsing) and learner.exemplars.images_per_class != 0:
        image = samples.sample_bytes
        total = learner.exemplars.images_total is not None
        each = image if total else classes * image
        sizes["images_total" if total else "images_per_class"] = lambda number: number * each
    if isinstance(learner, Features):
        coding = learner.coding
        sizes["features_per_class"] = lambda number: coding.nbytes(classes * number, dimension)
    return sizes


def _codings(dimension: int) -> Iterator[tuple[Coding, float, float]]:
    """The codecs a budget may choose, how many exact vectors one by each is worth, and any number of them.

    As measured (docs/findings.md): by d / 8 bytes what is carried over wears, so that many are worth no more than some
    exact ones.
    """
    yield Coding(codec="int8"), 1.0, ENOUGH
    if installed():
        for share, worth, enough in ((2, 1.0, 1.0), (4, 0.9, 0.9), (8, 0.55, 0.36)):
            if dimension % share == 0:
                yield Coding(codec="pq", codec_bytes=dimension // share), worth, enough * ENOUGH


def dimension_of(learner: Learner, samples: Samples) -> int:
    """d: how long the feature vectors of samples like these are, or will be."""
    if learner.network_ is not None:
        return learner.network_.dimension
    one = samples.select(torch.arange(1))
    return make_network(learner.network, learner.head, one, seed=0, side=learner.training.crop).dimension
