"""Images of unknown classes: how similar they are to the nearest known class, and thresholds at a stated rate.

The score is the cosine to the nearest class mean of the stored features. To estimate how it is distributed for classes
that were never taught, the stored features of each class are compared with the means of all other classes: exactly what
a model without that class would do, since the means of the others do not depend on it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.errors import UsageError
from engram.methods import Learner

DEFAULT_RATE = 0.05  # of images of unknown classes that are accepted
MIN_CLASSES = 3  # fewer say nothing about how similar one more class would be
MOST_COMPARED = 20_000  # stored features that are compared with all means
BLOCK_ROWS = 4096  # of them at a time
NARROW = 0.01  # similarities are limited to this and 1 minus this, so that their logits are finite


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
        memory = learner.memory.features
        usable = memory.held_out is not None and len(memory.counts) == len(learner.classes_)
        if not usable or len(memory.counts) < MIN_CLASSES or int(memory.counts.min()) < 1:
            return None
        if not bool(memory.held_out.all()) or not bool((memory.counts > 1).any()):  # type: ignore[union-attr]
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
        centre, deviation = _one_more_class(_logit(torch.cat(others)), class_indices[rows])
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


def _logit(similarity: Tensor) -> Tensor:
    """Similarities cannot exceed 1; their logits are closer to a normal distribution."""
    return torch.logit(similarity.double(), NARROW)


def _one_more_class(logits: Tensor, class_indices: Tensor) -> tuple[float, float]:
    """The mean over classes, and the standard deviation of one sample of one more class (random effects)."""
    classes, members, counts = class_indices.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(classes), dtype=torch.float64).index_add_(0, members, logits) / counts
    freedom = int((counts - 1).sum())
    within = float((logits - means[members]).square().sum()) / max(freedom, 1)
    between = max(float(means.var()) - within * float((1 / counts).mean()), 0.0)
    return float(means.mean()), math.sqrt(between * (1 + 1 / len(classes)) + within)


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """When an image is answered with none of the classes."""

    probability: float = 0.0  # of the most likely class; an image below it is rejected
    similarity: float = -math.inf  # to the nearest class mean; an image below it is rejected

    @property
    def needs_similarity(self) -> bool:
        """Whether it goes by the similarity."""
        return self.similarity > -math.inf

    def rejects(self, probability: float, similarity: float | None) -> bool:
        """Whether an image is rejected; its similarity may be None only if none is required."""
        return probability < self.probability or (similarity is not None and similarity < self.similarity)


def parse_reject(text: str) -> float | str:
    """`auto`, a rate such as `5%`, or a probability. ValueError if it is none of these."""
    text = text.strip()
    if text == "auto" or re.fullmatch(r"\d{1,2}(\.\d{1,6})?%", text):
        return text
    return float(text)
