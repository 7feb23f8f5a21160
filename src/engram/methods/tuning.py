"""Whether to train a pretrained network on a task, or to leave it as it is.

Tuning on tens of images a class gains nothing for these classes and harms all others: general features become features
of the classes at hand. So it must improve accuracy on held-out images, both of classes that it was tuned on and of
classes that it was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from engram.data import Task, hold_out
from engram.features import CLASSIFIERS
from engram.network import Cache, Network, extract
from engram.progress import SILENT, Progress

Tune = Literal["auto", "none", "first", "every"]

FEWEST_CLASSES = 4  # with fewer, no class can be spared to measure the effect on others
FEWEST_IMAGES = 100  # of a class: with fewer, tuning never won, and a trial takes minutes
UNSEEN = 4  # every fourth class is not tuned on in the trial
HELD_OUT = 0.2  # of the images of each class, to compare on
SIGNIFICANT = 2.0  # standard deviations by which tuning must win


@dataclass(frozen=True)
class Tuning:
    """Whether the network is trained, and why."""

    tunes: bool
    reason: str


def decide(tune: Tune, images: Collection[int], *, first: bool, pretrained: bool) -> Tuning | None:
    """Whether to train the network on a task with so many images of each class; None: a trial must show it."""
    if tune == "none":
        return Tuning(False, "as asked for")
    if tune == "every" or (tune == "first" and first):
        return Tuning(True, "as asked for")
    if tune == "first":
        return Tuning(False, "it is tuned on the first task only, as asked for")
    if not pretrained:
        return Tuning(True, "it starts from random weights")
    if not first:
        return Tuning(False, "images of the older classes are gone, so nothing could show whether tuning helps them")
    if len(images) < FEWEST_CLASSES or min(images) < FEWEST_IMAGES:
        return Tuning(False, f"tuning is tried with at least {FEWEST_CLASSES} classes of {FEWEST_IMAGES} images each")
    return None


def judge(
    task: Task,
    before: Network,
    tune: Callable[[Task], Network],
    seed: int,
    progress: Progress = SILENT,
    cache: Cache | None = None,
) -> Tuning:
    """Tune on some images of most classes, and compare with the network `before` on held-out images of all classes."""
    rest, held_out = hold_out(task.train, HELD_OUT, seed, "tuning")
    unseen = torch.tensor(task.classes[::UNSEEN])
    seen = rest.select((~torch.isin(rest.labels, unseen)).nonzero().squeeze(1))
    after = tune(Task(task.index, seen.classes(), seen, seen.select(torch.arange(0))))
    right = []  # of each network, which held-out samples it classifies correctly, bool (n,)
    for network in (before, after):
        features, tested = (F.normalize(extract(network, part, progress, cache=cache)) for part in (rest, held_out))
        classifier = CLASSIFIERS["auto"]().fit(features, rest.labels)
        right.append(classifier.classes_[classifier.scores(tested).argmax(1)] == held_out.labels)
    gains = right[1].int() - right[0].int()  # 1: only the tuned network is right; -1: only the other
    gained = int(gains.sum())
    reason = f"in a trial on {len(held_out)} held-out images accuracy changed by {gained / len(held_out):+.3f}"
    if int(gains[torch.isin(held_out.labels, unseen)].sum()) < 0:
        return Tuning(False, f"{reason}, and fell for classes that were not tuned on")
    return Tuning(gained > SIGNIFICANT * math.sqrt(int(gains.abs().sum())), reason)
