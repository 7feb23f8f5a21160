"""What stored features say about a model: which classes are confused, and whether more images would help.

Like the accuracy in `held_out`, every number is about features scored by a classifier that was fitted without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.methods import Learner
from engram.model.held_out import MIN_FEATURES, Accuracy, HeldOutScores, confusion_matrix, value_and_interval
from engram.model.learning import NEAR_DUPLICATE
from engram.model.model import Model
from engram.randomness import generator

FRACTIONS = (0.25, 0.5)  # of the stored features of each class, for the learning curve
DRAWS = 3  # of such fractions, at random
MOST_ROWS = 4_000  # stored features; with more, the learning curve would take too long
MOST_CONFUSED = 3  # classes listed that a class is confused with
MIN_IMAGES = 8  # held-out images of a class from which on the curve says something
HIGH, FLAT = 0.95, 0.02  # accuracy that needs no more images; gain by twice the images that is too small to matter

Advice = Literal["more", "enough", "different", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Held-out images of a class that another class was predicted for."""

    name: str
    images: int


@dataclass(frozen=True, kw_only=True)
class ClassEvidence:
    """How well one class is recognised."""

    name: str
    seen: int  # images that were learned
    held_out: int  # images that the rest is about
    accuracy: float | None  # None: no image is held out
    interval: tuple[float, float] | None  # 95 %
    confused_with: tuple[Confusion, ...]
    similar: int  # stored features that are nearly those of another image of the class; accuracy is too high with many
    curve: tuple[float, ...]  # accuracy with a quarter, half and all of the stored features; empty if not computed
    advice: Advice  # enough: it is high; more: still rising; different: neither; unknown: too few images


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How well all classes are recognised."""

    accuracy: float | None
    interval: tuple[float, float] | None
    held_out: int
    estimated: bool  # features were adapted since they were stored
    fractions: tuple[float, ...]  # of the stored features of each class, for every curve
    curve: tuple[float, ...]
    classes: tuple[ClassEvidence, ...]


def evidence(model: Model) -> Evidence:
    """Measure a model on its stored features."""
    learner, classes = model.learner, len(model.names)
    found = HeldOutScores.of(learner)
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    if found is not None:
        confusion = confusion_matrix(found.class_indices, found.scores.argmax(1), classes)
    shares, small = _curves(learner, found), len(learner.memory.features) <= MOST_ROWS
    similar = _similar(learner) if small else [0] * classes
    correct, total = int(confusion.trace()), int(confusion.sum())
    accuracy, interval = value_and_interval(Accuracy(correct, total) if total else None)
    return Evidence(
        accuracy=accuracy,
        interval=interval,
        held_out=total,
        estimated=model.metadata.held_out_counts.estimated,
        fractions=(*FRACTIONS, 1.0),
        curve=tuple(float((share * confusion.sum(1)).sum() / confusion.sum()) for share in shares),
        classes=tuple(
            _class_evidence(model, index, confusion[index], similar[index], [float(share[index]) for share in shares])
            for index in range(classes)
        ),
    )


def _class_evidence(model: Model, index: int, predicted: Tensor, similar: int, curve: Sequence[float]) -> ClassEvidence:
    total, correct = int(predicted.sum()), int(predicted[index])
    accuracy, interval = value_and_interval(Accuracy(correct, total) if total else None)
    others = [(int(count), other) for other, count in enumerate(predicted) if other != index and count]
    return ClassEvidence(
        name=model.names[index],
        seen=model.metadata.seen[index],
        held_out=total,
        accuracy=accuracy,
        interval=interval,
        confused_with=tuple(
            Confusion(name=model.names[other], images=count)
            for count, other in sorted(others, key=lambda pair: -pair[0])[:MOST_CONFUSED]
        ),
        similar=similar,
        curve=tuple(curve) if total else (),
        advice=advice(curve, total),
    )


def advice(curve: Sequence[float], images: int) -> Advice:
    """Whether a class needs more images, by its accuracy on held-out images with half and with all of its features."""
    if not curve or images < MIN_IMAGES:
        return "unknown"
    if curve[-1] >= HIGH:
        return "enough"
    gain = curve[-1] - curve[-2]
    return "more" if gain >= FLAT and gain * images >= 1 else "different"


def _curves(learner: Learner, found: HeldOutScores | None) -> list[Tensor]:
    """The accuracy of each class (K,) with growing fractions of the stored features, on the same held-out images."""
    memory, classes = learner.memory.features, len(learner.classes_)
    if found is None or found.rows is None or not len(memory) <= MOST_ROWS:
        return []
    features, labels = memory.rows, memory.class_indices
    total = torch.bincount(found.class_indices, minlength=classes).clamp(min=1)

    def accuracies(predicted: Tensor) -> Tensor:
        return torch.bincount(labels[found.rows][predicted == labels[found.rows]], minlength=classes) / total

    shares = []
    for fraction in FRACTIONS:
        draws = [_predictions(learner, features, labels, found.rows, fraction, draw) for draw in range(DRAWS)]
        shares.append(torch.stack([accuracies(predicted) for predicted in draws]).mean(0))
    return [*shares, accuracies(found.scores.argmax(1))]


def _predictions(
    learner: Learner, features: Tensor, labels: Tensor, rows: Tensor, fraction: float, draw: int
) -> Tensor:
    """The classes (m,) of `rows` by a classifier that has only a random fraction of the features of each class."""
    order = torch.rand(len(labels), generator=generator(learner.seed, f"learning curve {fraction}", draw))
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for index in labels.unique():
        own = (labels == index).nonzero().squeeze(1)
        count = max(MIN_FEATURES, round(fraction * len(own)))
        chosen[own[order[own].argsort()[:count]]] = True
    classifier = learner.make_classifier()
    assert classifier is not None
    predicted = classifier.fit(features[chosen], labels[chosen]).scores(features[rows]).argmax(1)
    within = chosen[rows]
    places = chosen.cumsum(0)[rows[within]] - 1  # of these rows among the chosen ones
    predicted[within] = classifier.held_out_scores(features[chosen], labels[chosen], places).argmax(1)
    return predicted


def _similar(learner: Learner) -> list[int]:
    """How many stored features of each class are nearly those of another image of the same class."""
    memory = learner.memory.features
    counts = torch.zeros(len(learner.classes_), dtype=torch.int64)
    if len(memory):
        rows, labels = F.normalize(memory.rows - memory.rows.mean(0)), memory.class_indices
        for index in labels.unique():
            own = rows[labels == index]
            counts[index] = ((own @ own.T).fill_diagonal_(-1) > NEAR_DUPLICATE).any(1).sum()
    return [int(count) for count in counts]
