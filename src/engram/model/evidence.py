"""How good a model is, judged by held-out images alone.

The stored features of images that no network was trained on are scored by classifiers that were fitted without them
(leave-one-out). With a frozen network this is the accuracy on new images, over all classes, although no old image is
there any more. If the network changed after a feature was stored, that feature was adapted, and the result is an
estimate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pydantic
import torch
from torch import Tensor

from engram.methods import Learner, MemorySources, decide
from engram.model.accuracy import Accuracy

FEWEST = 2  # features of a class: of one alone, nothing can be left out
SHARP = 0.1  # fall of the accuracy on old classes that an update is not published with


@dataclass(frozen=True, kw_only=True)
class HeldOutCounts:
    """Of the held-out features of each class, in the order of the columns: how many there are, how many are right."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="forbid")
    correct: tuple[int, ...] = ()
    total: tuple[int, ...] = ()
    estimated: bool = False  # whether features were adapted since they were stored

    def accuracy(self, class_indices: Collection[int] | None = None) -> Accuracy | None:
        """Over all classes, or those in these columns; None where there is nothing to judge by."""
        chosen = range(len(self.total)) if class_indices is None else class_indices
        total = sum(self.total[class_index] for class_index in chosen)
        return Accuracy(sum(self.correct[class_index] for class_index in chosen), total) if total else None

    @property
    def classes(self) -> int:
        """How many classes there is something to judge by."""
        return sum(count > 0 for count in self.total)


class Judged(NamedTuple):
    """Held-out features, scored by classifiers that were fitted without them."""

    scores: Tensor  # (n, K)
    class_indices: Tensor  # (n,): their classes


def judge(learner: Learner) -> Judged | None:
    """The held-out scores of a learner's stored features; None where it stores none that could tell."""
    memory, classifier = learner.memory.features, learner.classifier_
    if classifier is None or memory.held_out is None or len(memory.counts) != len(learner.classes_):
        return None
    class_indices = memory.class_indices
    rows = (memory.held_out & (memory.counts[class_indices] >= FEWEST)).nonzero().squeeze(1)
    if not len(rows) or len(memory.counts) < 2:
        return None
    return Judged(classifier.held_out_scores(memory.rows, class_indices, rows), class_indices[rows])


def evidence(judged: Judged | None, classes: int, *, estimated: bool) -> HeldOutCounts:
    """What held-out scores say of each class."""
    if judged is None:
        return HeldOutCounts(correct=(0,) * classes, total=(0,) * classes, estimated=estimated)
    correct = judged.scores.argmax(1) == judged.class_indices
    return HeldOutCounts(
        correct=tuple(torch.bincount(judged.class_indices[correct], minlength=classes).tolist()),
        total=tuple(torch.bincount(judged.class_indices, minlength=classes).tolist()),
        estimated=estimated,
    )


def mark_held_out(learner: Learner, kept: MemorySources, before: Tensor | None, arrived: Tensor) -> None:
    """Mark the stored features of images that no network was trained on.

    `before` (bool) marks those of the memory before the update, None: nothing is known of them; `arrived` (bool, (n,))
    the samples of the update. `kept` says where each stored feature came from. Images that are kept do not count if
    they will be replayed.
    """
    memory, sources = learner.memory_, kept.features
    if not len(memory.features):
        return
    if replays(learner):
        arrived = arrived.clone()
        arrived[kept.images[kept.images >= 0]] = False
    earlier = before if before is not None else torch.zeros(int(-sources.min().clamp(max=0)), dtype=torch.bool)
    marks = torch.cat([arrived, earlier.flip(0)])[sources]  # a negative source counts from the end
    learner.memory_ = type(memory)(memory.features.marked(marks), memory.images)


def replays(learner: Learner) -> bool:
    """Whether later updates train the network, and so on the images that are kept."""
    decided = decide(learner.tune, (), first=False, pretrained=learner.is_pretrained)
    return decided is not None and decided.tunes


def falls_sharply(before: Accuracy | None, after: Accuracy | None) -> bool:
    """Whether accuracy has fallen by more than a little, and by more than chance."""
    if before is None or after is None:
        return False
    return before.value - after.value > SHARP and after.high < before.low
