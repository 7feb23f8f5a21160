"""A budget in bytes: how many images and features of each class fit, and with which codec."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engram.data import Samples
from engram.errors import UsageError
from engram.features import CODECS, MEGABYTE, Codec
from engram.features.codecs import budget_options
from engram.methods.learner import Learner, count_stored
from engram.settings import Choice, flatten

MOST = 2**60  # of anything
UNITS = {"B": 1, "KB": 2**10, "MB": MEGABYTE, "GB": 2**30}  # the paper's MB

Size = Callable[[int], int]  # the bytes of a value of a setting


class BudgetError(UsageError):
    """A budget that does not hold one of each class."""


def parse_bytes(text: str) -> int:
    """`6MB`, `500 KB`, `1.5GB` or a plain number of bytes; powers of 1024, as the paper counts."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmg]?)(?:i?b)?\s*", text, re.IGNORECASE)
    count = int(float(found[1]) * UNITS[f"{found[2]}B".upper()]) if found else 0
    if not count:
        raise UsageError(f"'{text}' is no number of bytes. Write 6MB, 500KB or 1.5GB.")
    return count


def fit_budget(
    learner: Learner, asked: Mapping[str, Any], budget: int, classes: int, samples: Samples, most: int = MOST
) -> dict[str, Any]:
    """The settings with which the memory of `classes` classes fits `budget` bytes.

    The settings in `asked` stay; the samples learned are like `samples`, at most `most` of a class. If images and
    features are both to be chosen, each gets half of the bytes, and what one does not need goes to the other. For the
    codec "auto", the codec is chosen with which the stored features are worth most.
    """
    settings, sample_bytes = learner.settings(), samples.sample_bytes
    sizes: dict[str, Size] = {}
    if settings.get("images_total") is not None:
        sizes["images_total"] = lambda number: number * sample_bytes
    elif settings.get("images_per_class", 0) != 0:
        sizes["images_per_class"] = lambda number: number * classes * sample_bytes
    dimension = learner.dimension(samples) if "features_per_class" in settings else 0
    if dimension:
        sizes["features_per_class"] = lambda number: learner.features_bytes(classes * number, dimension)
    if not sizes:
        raise UsageError(f"The method '{learner.name}' has no setting that a budget could choose. Leave out --budget.")
    given = {name: int(float(asked[name])) for name in sizes if asked.get(name) is not None}  # 10.0 is a whole number
    if settings.get("codec") == "auto":
        return _with_codec(sizes, given, budget, classes, dimension, most)
    if len(given) == len(sizes):
        raise UsageError(f"With {' and '.join(given)} set, nothing is left for --budget to choose.")
    return _share_out(sizes, given, budget, classes, most)


def _with_codec(
    sizes: Mapping[str, Size], given: Mapping[str, int], budget: int, classes: int, dimension: int, most: int
) -> dict[str, Any]:
    found: list[tuple[float, dict[str, Any]]] = []
    for codec, worth, enough in budget_options(dimension):

        def size(number: int, codec: Codec = codec) -> int:
            return codec.nbytes(classes * number, dimension)

        try:
            chosen = _share_out({**sizes, "features_per_class": size}, given, budget, classes, most)
        except BudgetError as error:
            refusal = error
            continue
        vectors = {**given, **chosen}["features_per_class"]
        settings = {"codec": codec.name, **Choice(CODECS, codec.name, flatten(codec)).settings()}
        found.append((min(worth * vectors, enough), {**chosen, **settings}))
    if not found:
        raise refusal
    return max(found, key=lambda each: each[0])[1]


def _share_out(
    sizes: Mapping[str, Size], given: Mapping[str, int], budget: int, classes: int, most: int
) -> dict[str, Any]:
    """The largest values of the settings that are not given, each with an equal share of the bytes."""
    fewest = {name: classes if name == "images_total" else 1 for name in sizes}
    useful = {name: most * fewest[name] for name in sizes}  # all samples that there are
    smallest = {name: sizes[name](given.get(name, fewest[name])) for name in sizes}
    least = sum(smallest.values())
    if budget < least:
        raise BudgetError(f"A budget of {budget:,} bytes is too small: one of each class would be {least:,}.")
    spare = budget - least
    # First the settings for which all samples fit in half of the bytes: what these leave goes to the others.
    order = sorted(sizes, key=lambda name: sizes[name](useful[name]) > budget // 2)
    to_choose = [name for name in order if name not in given]
    chosen: dict[str, Any] = {}
    for number, name in enumerate(to_choose):
        rest = to_choose[number:]
        share = (spare + sum(smallest[other] for other in rest)) // len(rest)
        fitting = largest(sizes[name], min(share, spare + smallest[name]))
        chosen[name] = max(fewest[name], fitting if len(rest) == 1 else min(fitting, useful[name]))
        spare -= sizes[name](chosen[name]) - smallest[name]
    return chosen


def largest(size: Size, room: int, most: int | None = None) -> int:
    """The largest number, up to `most`, whose `size` in bytes is within `room`; 0 if not even 1 is.

    `size` must not fall as the number grows; with no `most`, it must grow by a byte each time.
    """
    most = min(max(room, 0), MOST) if most is None else most
    return bisect_right(range(1, 1 + most), room, key=size)


def fit_update(learner: Learner, arriving: Tensor, budget: int, samples: Samples) -> dict[str, int]:
    """The settings with which a learner's memory stays within `budget` bytes after an update, or an error.

    `arriving` (K,) samples of each class, like `samples`, are learned. Images are stored as its settings say, and if
    need be fewer features of each class.
    """
    images, limit = samples.sample_bytes * learner.stored_images(arriving), learner.features_limit(len(arriving))
    dimension = learner.dimension(samples) if limit else 0

    def size(per_class: int) -> int:
        return learner.features_bytes(count_stored(learner.memory.features.counts, arriving, per_class), dimension)

    fitting = largest(size, budget - images, limit)
    chosen = {"features_per_class": fitting} if limit and "features_per_class" in learner.settings() else {}
    if images > budget or (limit and fitting < (1 if chosen else limit)):
        raise _too_small(learner, budget, len(arriving), images, size(1 if chosen else limit) if limit else 0, samples)
    return chosen


def _too_small(
    learner: Learner, budget: int, classes: int, images: int, features: int, samples: Samples
) -> BudgetError:
    """The error for a budget that these bytes of images, and of the fewest features possible, do not fit."""
    settings, one_each = learner.settings(), classes * samples.sample_bytes
    fitting = max(0, budget - features) // one_each  # images of each class
    needs = [f"one vector of each would be {features:,}"] if features else []
    remedy = "Raise it, or choose another method."
    if images and "images_per_class" in settings and not fitting and not features:
        needs.append(f"one image of each would be {one_each:,}")
    elif images:
        needs.append(f"its images would be {images:,}")
        if fitting and settings.get("images_total") is not None:
            remedy = f"Keep --set images_total={fitting * classes}."
        elif "images_per_class" in settings and features <= budget:
            remedy = f"Keep --images-per-class {fitting}."
    return BudgetError(
        f"A budget of {budget:,} bytes is too small for {classes} classes: {' and '.join(needs)}. {remedy}"
    )
