"""Whether to train a pretrained network on a task, or to leave it as it is.

Tuning on tens of images a class gains nothing for these classes and harms all others: features that were good for
anything become features of the classes at hand. So it must earn its place on held-out images, of classes that it was
tuned on and of classes that it was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task, hold_out
from engram.features import CLASSIFIERS
from engram.network import Cache, Network, extract
from engram.progress import SILENT, Progress

Tune = Literal["auto", "none", "first", "every"]

FEWEST_CLASSES = 4  # below, no class can be spared to see what tuning does to others
FEWEST_IMAGES = 100  # of a class: with fewer, tuning was never seen to win, and trying takes minutes
UNSEEN = 4  # one class in so many is not tuned on in the trial
HELD_OUT = 0.2  # of the images of each class, to judge by
SIGNIFICANT = 2.0  # standard deviations by which tuning must win


@dataclass(frozen=True)
class Tuning:
    """A decision, and its reason in words."""

    tunes: bool
    reason: str


def decide(tune: Tune, images: Collection[int], *, first: bool, pretrained: bool) -> Tuning | None:
    """Whether to train the network on a task with so many images of each class; None where a trial must show it."""
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
    *,
    seed: int,
    progress: Progress = SILENT,
    cache: Cache | None = None,
) -> Tuning:
    """Tune on some of the images of most of the classes, and compare on held-out images of all of them.

    `tune` gives the network that training on a task leads to.
    """
    rest, judged = hold_out(task.train, HELD_OUT, seed, "tuning")
    unseen = torch.tensor(task.classes[::UNSEEN])
    seen = rest.select((~torch.isin(rest.labels, unseen)).nonzero().squeeze(1))
    after = tune(Task(task.index, seen.classes(), seen, seen.select(torch.arange(0))))
    wins, losses = _compare(before, after, rest, judged, progress, cache)
    others = torch.isin(judged.labels, unseen)
    gained = int(wins.sum()) - int(losses.sum())
    harms = int(losses[others].sum()) > int(wins[others].sum())
    where = f"in a trial on {len(judged)} held-out images accuracy changed by {gained / len(judged):+.3f}"
    if harms:
        return Tuning(False, f"{where}, and fell for classes that were not tuned on")
    return Tuning(gained > SIGNIFICANT * math.sqrt(int((wins | losses).sum())), where)


def _compare(
    before: Network, after: Network, rest: Samples, judged: Samples, progress: Progress, cache: Cache | None
) -> tuple[Tensor, Tensor]:
    """Which samples only the network after tuning gets right, and which only the one before; bool (n,)."""
    right = []
    for network in (before, after):
        classifier = CLASSIFIERS["auto"]().fit(F.normalize(extract(network, rest, progress, cache=cache)), rest.labels)
        scores = classifier.scores(F.normalize(extract(network, judged, progress, cache=cache)))
        right.append(classifier.classes_[scores.argmax(1)] == judged.labels)
    return right[1] & ~right[0], right[0] & ~right[1]
