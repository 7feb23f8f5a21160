"""How good a model is on held-out images: accuracy with its interval, calibrated probabilities, unknown classes.

The stored features of images that no network was trained on are scored by classifiers fitted without them
(leave-one-out). With a frozen network this is the accuracy on new images over all classes, although no old image is
stored. If the network changed after a feature was stored, that feature was adapted, and the result is an estimate.

Images of unknown classes are recognised by the cosine to the nearest class mean. How that is distributed for classes
that were never taught is estimated by comparing the stored features of each class with the means of all others: exactly
what a model without that class would do, since the means of the others do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from engram.errors import UsageError
from engram.methods import Learner, MemorySources, decide
from engram.model.manifest import Strict

Z = 1.959964  # standard deviations of a normal distribution within which 95 % lie
MIN_FEATURES = 2  # of a class: a single one cannot be left out
BINS = 15  # of the expected calibration error
# Held-out images below which a temperature is mostly noise. With ten (two classes of five photos each) the expected
# calibration error falls from .29 to .10, the mean of 60 draws from twelve classes.
MIN_CALIBRATION = 10
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e5  # LDA's scores on unit vectors are in the thousands
BISECTIONS = 50
DEFAULT_RATE = 0.05  # of images of unknown classes that are accepted
MIN_CLASSES = 3  # fewer say nothing about how similar one more class would be
MOST_COMPARED = 20_000  # stored features that are compared with all means
BLOCK_ROWS = 4096  # of them at a time
NARROW = 0.01  # similarities are limited to this and 1 minus this, so that their logits are finite

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Accuracy:
    """Correct predictions on images that the model was not trained on; `total` is at least 1."""

    correct: int
    total: int

    @property
    def value(self) -> float:
        """The share of correct predictions."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval (Agresti and Coull, 1998).

        Near 1, where accuracies often are, it is wider than Wilson's and covers more often than its nominal level.
        """
        n = self.total + Z**2
        share = (self.correct + Z**2 / 2) / n
        margin = Z * math.sqrt(share * (1 - share) / n)
        return max(0.0, share - margin), min(1.0, share + margin)

    def __str__(self) -> str:
        low, high = self.interval
        images = "photo" if self.total == 1 else "photos"
        return f"{self.value:.3f} ({low:.3f} to {high:.3f}, {self.total:,} {images})"


def value_and_interval(accuracy: Accuracy | None) -> tuple[float | None, tuple[float, float] | None]:
    """Both numbers of an accuracy; None without held-out images."""
    return (None, None) if accuracy is None else (accuracy.value, accuracy.interval)


@dataclass(frozen=True, kw_only=True)
class Calibration(Strict):
    """The temperature of a model's probabilities, found on held-out images."""

    temperature: Annotated[float, Field(gt=0)] = 1.0  # divides the scores before the softmax
    images: Count = 0  # held out; with none, the temperature is the last one found
    error_before: Share | None = None  # expected calibration error with the previous temperature
    error_after: Share | None = None  # and with this one


@dataclass(frozen=True, kw_only=True)
class HeldOutCounts(Strict):
    """The held-out features of each class, by class index, and how many of them are classified correctly."""

    correct: tuple[int, ...] = ()
    total: tuple[int, ...] = ()
    estimated: bool = False  # whether features were adapted since they were stored

    def accuracy(self, class_indices: Collection[int] | None = None) -> Accuracy | None:
        """Over all classes or some; None without held-out features."""
        chosen = range(len(self.total)) if class_indices is None else class_indices
        total = sum(self.total[class_index] for class_index in chosen)
        return Accuracy(sum(self.correct[class_index] for class_index in chosen), total) if total else None

    @property
    def classes(self) -> int:
        """How many classes have held-out features."""
        return sum(count > 0 for count in self.total)


class HeldOutScores(NamedTuple):
    """The scores of held-out features, by classifiers fitted without them."""

    scores: Tensor  # (n, K)
    class_indices: Tensor  # (n,): the true classes
    rows: Tensor | None = None  # (n,): their rows in the memory; None: they are not stored

    @classmethod
    def of(cls, learner: Learner) -> Self | None:
        """The leave-one-out scores of a learner's stored features; None if it stores none that are held out."""
        memory, classifier = learner.memory.features, learner.classifier_
        if classifier is None or memory.held_out is None or len(memory.counts) != len(learner.classes_):
            return None
        class_indices = memory.class_indices
        rows = (memory.held_out & (memory.counts[class_indices] >= MIN_FEATURES)).nonzero().squeeze(1)
        if not len(rows) or len(memory.counts) < 2:
            return None
        return cls(classifier.held_out_scores(memory.rows, class_indices, rows), class_indices[rows], rows)


def confusion_matrix(class_indices: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """How often (K, K) each class was predicted (columns) for samples of each true class (rows)."""
    return torch.bincount(class_indices * classes + predicted, minlength=classes**2).reshape(classes, classes)


def assess(
    found: HeldOutScores | None, classes: int, before: Calibration, *, estimated: bool
) -> tuple[HeldOutCounts, Calibration]:
    """The counts of each class and the calibration that held-out scores give; without any, the old temperature."""
    if found is None:
        nothing = HeldOutCounts(correct=(0,) * classes, total=(0,) * classes, estimated=estimated)
        return nothing, Calibration(temperature=before.temperature)
    correct = found.class_indices[found.scores.argmax(1) == found.class_indices]
    counts = HeldOutCounts(
        correct=tuple(torch.bincount(correct, minlength=classes).tolist()),
        total=tuple(torch.bincount(found.class_indices, minlength=classes).tolist()),
        estimated=estimated,
    )
    return counts, calibrate(found.scores, found.class_indices, before)


def calibrate(scores: Tensor, class_indices: Tensor, before: Calibration) -> Calibration:
    """Fit the temperature to held-out scores (n, K); with too few of them, keep the one before.

    The temperature always comes from these scores: classifiers differ in scale, and where every prediction is correct
    any low temperature would look perfect. Its error is measured on halves, each with the temperature of the other.
    """
    if len(class_indices) < MIN_CALIBRATION:
        return Calibration(temperature=before.temperature)
    halves = torch.arange(len(class_indices)) % 2 == 0
    probabilities = torch.empty_like(scores, dtype=torch.float64)
    for part in (halves, ~halves):
        temperature = fit_temperature(scores[~part], class_indices[~part])
        probabilities[part] = torch.softmax(scores[part].double() / temperature, dim=1)
    return Calibration(
        temperature=fit_temperature(scores, class_indices),
        images=len(class_indices),
        error_before=calibration_error(torch.softmax(scores.double() / before.temperature, dim=1), class_indices),
        error_after=calibration_error(probabilities, class_indices),
    )


def fit_temperature(scores: Tensor, class_indices: Tensor) -> float:
    """The temperature that maximises the likelihood of the classes (n,) given scores (n, K) (Guo et al., 2017).

    Targets are smoothed as Platt does, since the next sample may be the first mistake.
    """
    scores = scores.double()
    n, classes = scores.shape
    if classes == 1:
        return 1.0
    targets = torch.full_like(scores, 1 / ((n + 2) * (classes - 1)))
    targets[torch.arange(n), class_indices] = (n + 1) / (n + 2)
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        probabilities = torch.softmax(scores / math.exp(middle), dim=1)
        # Of the likelihood along 1 / T, in which it is concave.
        slope = float(((targets - probabilities) * scores).sum())
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp((low + high) / 2)


def calibration_error(probabilities: Tensor, class_indices: Tensor) -> float:
    """The expected calibration error: |accuracy − confidence|, averaged over bins of confidence by their samples."""
    confidence, predicted = probabilities.double().max(dim=1)
    correct = (predicted == class_indices).double()
    which = (confidence * BINS).long().clamp(max=BINS - 1)  # (n,)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, which, correct - confidence)
    return float(gaps.abs().sum() / len(class_indices))


def mark_held_out(learner: Learner, sources: MemorySources, before: Tensor | None, arrived: Tensor) -> None:
    """Mark the stored features of images that no network was trained on.

    `before` (bool) marks those of the memory before the update (None: unknown), `arrived` (bool, (n,)) the samples of
    the update. `sources` says where each stored feature came from. Exemplars do not count if they will be replayed.
    """
    memory, origins = learner.memory_, sources.features
    if not len(memory.features):
        return
    if replays(learner):
        arrived = arrived.clone()
        arrived[sources.images[sources.images >= 0]] = False
    earlier = before if before is not None else torch.zeros(int(-origins.min().clamp(max=0)), dtype=torch.bool)
    marks = torch.cat([arrived, earlier.flip(0)])[origins]  # a negative source counts from the end
    learner.memory_ = replace(memory, features=memory.features.marked(marks))


def replays(learner: Learner) -> bool:
    """Whether later updates train the network, and so on the exemplars."""
    decided = decide(learner.tune, (), first=False, pretrained=learner.is_pretrained)
    return decided is not None and decided.tunes


@dataclass(frozen=True, kw_only=True)
class RejectionThreshold:
    """The similarity below which an image is rejected, and what it costs."""

    rate: float  # the estimated share of images of unknown classes that are accepted
    similarity: float  # cosine to the nearest class mean
    known_accepted: float  # the share of held-out images of known classes that are accepted
    images: int  # held out
    classes: int  # that were left out in turn


@dataclass(frozen=True, eq=False)
class ClassSimilarity:
    """Similarity to the nearest class mean, and its distribution for known and for unknown classes."""

    means: Tensor  # (K, d), of length 1
    known: Tensor  # (n,): held-out features of known classes
    centre: float  # the mean, over classes, of the logit of the similarity to the nearest other class
    deviation: float  # the standard deviation of that logit for an image of one more class

    @classmethod
    def of(cls, learner: Learner) -> Self | None:
        """From a learner's stored features; None if they are too few, or a network was trained on their classes.

        A network that was trained to separate the stored classes does not separate other classes as well.
        """
        memory, counts = learner.memory.features, learner.memory.features.counts.tolist()
        if memory.held_out is None or not bool(memory.held_out.all()) or len(counts) != len(learner.classes_):
            return None
        if len(counts) < MIN_CLASSES or min(counts) < 1 or max(counts) < 2:
            return None
        return cls.fitted(memory.rows, memory.class_indices)

    @classmethod
    def fitted(cls, features: Tensor, class_indices: Tensor) -> Self:
        """From features (n, d) of length 1 and their classes, 0 to K − 1; some class has two of them or more."""
        counts = torch.bincount(class_indices)
        sums = torch.zeros(len(counts), features.shape[1]).index_add_(0, class_indices, features.float())
        means = F.normalize(sums)
        rows = torch.arange(len(features))[:: -(-len(features) // MOST_COMPARED)]
        known, others = [], []
        for some in rows.split(BLOCK_ROWS):
            vectors, own = features[some].float(), class_indices[some]
            similarity = vectors @ means.T
            similarity[torch.arange(len(some)), own] = -1.0
            nearest = similarity.max(1).values
            without = (vectors * F.normalize(sums[own] - vectors)).sum(1)  # the own mean, without the sample itself
            others.append(nearest)
            known.append(torch.maximum(nearest, without)[counts[own] > 1])
        # Similarities cannot exceed 1; their logits are closer to a normal distribution.
        logits = torch.logit(torch.cat(others).double(), NARROW)
        centre, deviation = _one_more_class(logits, class_indices[rows])
        return cls(means, torch.cat(known), centre, deviation)

    def __call__(self, features: Tensor) -> Tensor:
        """The similarity (n,) of features (n, d) to the nearest class mean."""
        return (F.normalize(features.float().cpu()) @ self.means.T).max(1).values

    def threshold(self, rate: float = DEFAULT_RATE) -> RejectionThreshold:
        """The threshold that an image of an unknown class reaches at this rate."""
        from scipy.special import stdtrit

        if not 0 < rate < 1:
            raise UsageError(f"The rate of accepted unknown images must lie between 0 % and 100 %; found {rate:.3%}.")
        classes = len(self.means)
        logit = self.centre + float(stdtrit(classes - 1, 1 - rate)) * self.deviation
        similarity = 1 / (1 + math.exp(-logit))
        accepted = float((self.known >= similarity).double().mean())
        return RejectionThreshold(
            rate=rate, similarity=similarity, known_accepted=accepted, images=len(self.known), classes=classes
        )


def _one_more_class(logits: Tensor, class_indices: Tensor) -> tuple[float, float]:
    """The mean over classes, and the standard deviation of one sample of one more class (random effects)."""
    classes, members, counts = class_indices.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(classes), dtype=torch.float64).index_add_(0, members, logits) / counts
    freedom = int((counts - 1).sum())
    within = float((logits - means[members]).square().sum()) / max(freedom, 1)
    between = max(float(means.var()) - within * float((1 / counts).mean()), 0.0)
    return float(means.mean()), math.sqrt(between * (1 + 1 / len(classes)) + within)
