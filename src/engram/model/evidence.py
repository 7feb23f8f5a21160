"""What stored features say about a model: which classes are confused, and whether more images would help.

Like the accuracy in `held_out`, every number is about features scored by a classifier that was fitted without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.methods import Learner, MemorySources
from engram.model.held_out import MIN_FEATURES, Accuracy, Calibration, HeldOutScores, assess
from engram.model.model import Model
from engram.model.plan import UpdatePlan
from engram.randomness import generator
from engram.text import printable

FRACTIONS = (0.25, 0.5)  # of the stored features of each class, for the learning curve
DRAWS = 3  # of such fractions, at random
MOST_ROWS = 4_000  # stored features; with more, the learning curve would take too long
MOST_CONFUSED = 3  # classes listed that a class is confused with
MIN_IMAGES = 8  # held-out images of a class from which on the curve says something
HIGH, FLAT = 0.95, 0.02  # accuracy that needs no more images; gain by twice the images that is too small to matter
UNEQUAL = 10  # times as many images of one class as of another
# The cosine between the features of two images, in a pretrained network, above which they are nearly the same image:
# among 40 classes of Caltech-101 no two images of different classes exceed .79.
NEAR_DUPLICATE = 0.95
LISTED = 5

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

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def evidence(model: Model) -> Evidence:
    """Measure a model on its stored features."""
    learner, classes = model.learner, len(model.names)
    found = HeldOutScores.of(learner)
    counts, _ = assess(found, classes, Calibration(), estimated=model.metadata.held_out_counts.estimated)
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    if found is not None:
        cells = found.class_indices * classes + found.scores.argmax(1)
        confusion = torch.bincount(cells, minlength=classes**2).reshape(classes, classes)
    shares, small = _curves(learner, found), len(learner.memory.features) <= MOST_ROWS
    similar = _similar(learner) if small else [0] * classes
    overall = counts.accuracy()
    return Evidence(
        accuracy=None if overall is None else overall.value,
        interval=None if overall is None else overall.interval,
        held_out=sum(counts.total),
        estimated=counts.estimated,
        fractions=(*FRACTIONS, 1.0),
        curve=tuple(float((share * confusion.sum(1)).sum() / confusion.sum()) for share in shares),
        classes=tuple(
            _class_evidence(model, index, confusion[index], similar[index], [float(share[index]) for share in shares])
            for index in range(classes)
        ),
    )


def _class_evidence(model: Model, index: int, predicted: Tensor, similar: int, curve: Sequence[float]) -> ClassEvidence:
    total, correct = int(predicted.sum()), int(predicted[index])
    accuracy = Accuracy(correct, total) if total else None
    others = [(int(count), other) for other, count in enumerate(predicted) if other != index and count]
    return ClassEvidence(
        name=model.names[index],
        seen=model.metadata.seen[index],
        held_out=total,
        accuracy=None if accuracy is None else accuracy.value,
        interval=None if accuracy is None else accuracy.interval,
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


@dataclass(frozen=True, kw_only=True)
class DoubtfulImage:
    """An image of an update that is predicted as another class if its own feature is left out: perhaps mislabelled."""

    index: int  # its position among the images of the update
    name: str  # of its class
    predicted: str
    probability: float  # of the predicted class


def doubtful_images(
    found: HeldOutScores | None, sources: MemorySources, names: tuple[str, ...], temperature: float, most: int = 12
) -> tuple[DoubtfulImage, ...]:
    """The images of an update that leave-one-out predictions contradict most."""
    if found is None or found.rows is None:
        return ()
    probabilities = torch.softmax(found.scores.double() / temperature, dim=1)
    positions, truth = sources.features[found.rows], found.class_indices[:, None]
    margins = probabilities.max(1).values - probabilities.gather(1, truth).squeeze(1)
    margins[positions < 0] = 0  # of an earlier update
    worst = margins.argsort(descending=True, stable=True)[:most]
    return tuple(
        DoubtfulImage(
            index=int(positions[row]),
            name=names[int(found.class_indices[row])],
            predicted=names[int(probabilities[row].argmax())],
            probability=float(probabilities[row].max()),
        )
        for row in worst.tolist()
        if margins[row] > 0
    )


def warning_signs(learner: Learner, plan: UpdatePlan, kept: MemorySources, paths: Sequence[Path]) -> tuple[str, ...]:
    """A sentence each. `paths` name the samples of the update; `kept` says where each stored feature came from."""
    return tuple((*_class_sizes(plan), *_near_duplicates(learner, plan, kept, paths)))


def _class_sizes(plan: UpdatePlan) -> Iterator[str]:
    if len(plan.names) == 1:
        yield "The model knows only one class, and so predicts it for any image. Teach it a second one."
    single = [name for name, count in plan.new.items() if count == 1]
    if single:
        others = f" and {len(single) - LISTED} more" if len(single) > LISTED else ""
        yield f"Only one image: {', '.join(map(printable, single[:LISTED]))}{others}. Give at least five of a class."
    counts = {name: count for name, count in {**plan.new, **plan.more}.items() if count}
    most, fewest = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
    if counts[most] >= UNEQUAL * counts[fewest]:
        sizes = f"{counts[most]} images of {printable(most)}, {counts[fewest]} of {printable(fewest)}"
        yield f"Classes are very unequal: {sizes}. Small classes are recognised less reliably."


def _near_duplicates(learner: Learner, plan: UpdatePlan, kept: MemorySources, paths: Sequence[Path]) -> Iterator[str]:
    """Images of the update whose features are almost those of an image of another class."""
    memory, sources = learner.memory.features, kept.features
    if not learner.is_pretrained or len(learner.shape_) != 3 or not len(memory):
        return
    # Some networks give all images similar features; without their mean they differ.
    rows, class_indices = F.normalize(memory.rows - memory.rows.mean(0)), memory.class_indices
    found: dict[frozenset[int], tuple[int, int]] = {}  # two classes -> two rows
    for some in (sources >= 0).nonzero().squeeze(1).split(1024):
        cosines = rows[some] @ rows.T  # (r, n)
        cosines[class_indices[some][:, None] == class_indices] = -1
        nearest = cosines.max(1)
        for place in (nearest.values > NEAR_DUPLICATE).nonzero().squeeze(1).tolist():
            row, other = int(some[place]), int(nearest.indices[place])
            found.setdefault(frozenset(class_indices[[row, other]].tolist()), (row, other))

    def named(row: int) -> str:
        name, source = printable(plan.names[int(class_indices[row])]), int(sources[row])
        return f"{printable(paths[source])} ({name})" if 0 <= source < len(paths) else f"an image of {name}"

    for row, other in list(found.values())[:LISTED]:
        yield f"Nearly the same image in two classes: {named(row)} and {named(other)}. Is one of them mislabelled?"
    if (others := len(found) - LISTED) > 0:
        yield f"Nearly the same image in two classes: {others} more {'pair' if others == 1 else 'pairs'} of classes."
