"""The classifier with the best leave-one-out accuracy among a few."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from engram.errors import DataError
from engram.features.classifiers.base import Classifier
from engram.features.classifiers.closed_form import ClosedForm, Moments, compare
from engram.features.classifiers.means import LDA, NearestMean
from engram.features.classifiers.ridge import RandomProjection, Ridge
from engram.features.linear_algebra import threads_for

# In order of preference among equally accurate ones. Saved models store an index, so only append to it.
CANDIDATES: tuple[ClosedForm, ...] = (
    *(Ridge(1.0), Ridge(0.3), Ridge(3.0)),
    *(LDA(0.2), LDA(0.5)),
    *(NearestMean(), RandomProjection(2000)),
)
FALLBACK = 5  # the nearest mean, if no class has two samples to compare by
SIGNIFICANT = 2.0  # standard deviations: the best of several on a few samples is mostly luck, and ridge mostly best


@dataclass
class Auto(Classifier):
    """Ridge regression, unless LDA, nearest means or random projection have a higher leave-one-out accuracy.

    The accuracy is class-balanced, and measured on at most 5,000 samples. After `fit`, `chosen_` is the classifier;
    `weight_` and `intercept_` are its own. `held_out_scores` are those of `chosen_`: the selection among up to seven
    candidates is not nested, so their accuracy is slightly optimistic. The benchmark measures by how much.
    """

    leaves_one_out: ClassVar = True
    saved: ClassVar = (*Classifier.saved, "chosen")

    chosen_: ClosedForm = field(init=False, repr=False, compare=False)

    @property
    def description(self) -> str:
        return self.chosen_.description if "chosen_" in vars(self) else "best by leave-one-out"

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        moments = Moments(features, labels)
        with threads_for(moments.multiplications):
            index, chosen = choose(moments)
            return {**chosen.solve(moments), "chosen": torch.tensor(index)}

    def _held_out(self, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        moments = Moments(features, labels)
        with threads_for(moments.multiplications):
            fitted = "chosen_" in vars(self)
            chosen = compare(self.chosen_.variants(), moments) if fitted else choose(moments)[1]
            return chosen.held_out(moments, rows.to(moments.samples.device))

    def scores(self, features: Tensor) -> Tensor:
        self.check_fitted()
        return self.chosen_.scores(features)

    def state(self) -> dict[str, Tensor]:
        self.check_fitted()
        return {**self.chosen_.state(), "chosen": torch.tensor(self._index)}

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        super().restore(tensors)
        self._index = int(tensors["chosen"])
        if not 0 <= self._index < len(CANDIDATES):
            raise DataError(f"A saved Auto chose candidate {self._index}, and this version knows {len(CANDIDATES)}.")
        self.chosen_ = copy.copy(CANDIDATES[self._index]).restore(tensors)
        return self


def choose(moments: Moments) -> tuple[int, ClosedForm]:
    """The index in `CANDIDATES` of the most accurate one, and its variant with the most accurate settings."""
    if len(moments.classes) == 1 or not (moments.counts > 1).any():
        return FALLBACK, CANDIDATES[FALLBACK]
    considered = [each for each in enumerate(CANDIDATES) if moments.dimension <= each[1].most_dimensions]
    indices, variants = zip(*((index, form) for index, each in considered for form in each.variants()), strict=True)
    chosen = compare(variants, moments, SIGNIFICANT)
    return indices[variants.index(chosen)], chosen
