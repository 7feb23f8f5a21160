"""What every classifier has in common: fitting, scoring, saving, and scores of held-out samples."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from engram.errors import DataError, TrainingError, UsageError
from engram.features.threads import threads_for
from engram.network import parallel

FOLDS = 5  # of the cross-validation of classifiers that have no closed form
CHECKED_ROWS = 2**14  # checked for NaN at a time, so that the check needs little memory


class Classifier(ABC):
    """Scores unit features by one affine function per class: `classes_` (K,), `weight_` (K, d), `intercept_` (K,)."""

    classes_: Tensor
    weight_: Tensor
    intercept_: Tensor

    @property
    @abstractmethod
    def description(self) -> str:
        """A few words for people, such as "ridge (penalty 1)"."""

    def fit(self, features: Tensor, labels: Tensor) -> Self:
        """Fit to features (n, d) and integer labels (n,)."""
        return self.restore(parallel.broadcast(lambda: self._fitted_state(features, labels)))

    @abstractmethod
    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute the state from checked arguments: at least classes (K,), weight (K, d) and intercept (K,)."""

    @abstractmethod
    def scores(self, features: Tensor) -> Tensor:
        """Score features (n, d) for every class, in the order of `classes_`: (n, K), float32."""

    def held_out_scores(self, features: Tensor, labels: Tensor, rows: Tensor | None = None) -> Tensor:
        """Score each sample with the classifier fitted without it: (n, K), float32, columns as the sorted classes.

        `rows` (m,) int64 selects the samples to score: (m, K). This neither needs `fit` nor changes the fitted state.
        A sample that is the only one of its class has the score -inf for that class. Classifiers with a closed form
        leave out one sample at a time; the others use stratified 5-fold cross-validation.
        """

        def compute() -> Tensor:
            check_samples(self, features, labels)
            chosen = torch.arange(len(labels), device=features.device) if rows is None else rows.to(features.device)
            return self._held_out(features.detach(), labels, chosen).to(features.device)

        return parallel.broadcast(compute)

    def _held_out(self, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """Cross-validate: the j-th sample of a class is held out in fold j mod 5, unless its class has no other."""
        classes, members = indexed(labels.to(features.device))
        alone = torch.bincount(members)[members] == 1  # (n,)
        folds = positions(members) % FOLDS  # (n,)
        scores = torch.empty(len(rows), len(classes), device=features.device)
        for fold in folds[rows].unique():
            training = (folds != fold) | alone
            held_out = folds[rows] == fold
            twin = copy.copy(self).restore(self._fitted_state(features[training], members[training]))
            scores[held_out] = twin.scores(features[rows[held_out]])
        return disqualify_singletons(scores, members[rows], alone[rows])

    def state(self) -> dict[str, Tensor]:
        """Return the fitted state as tensors that can be saved."""
        self.check_fitted()
        return {"classes": self.classes_, "weight": self.weight_, "intercept": self.intercept_}

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        """Restore what `state` returned."""
        self._require(tensors, "classes", "intercept", "weight")
        self.classes_, self.weight_, self.intercept_ = tensors["classes"], tensors["weight"], tensors["intercept"]
        return self

    def _require(self, tensors: Mapping[str, Tensor], *names: str) -> None:
        missing = [name for name in names if name not in tensors]
        if missing:
            raise DataError(f"A saved {type(self).__name__} lacks its {' and '.join(missing)}.")

    def _fitted_state(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        check_samples(self, features, labels)
        state = self._solution(features.detach(), labels.to(features.device))
        with threads_for(0):
            if not (state["weight"].isfinite().all() and state["intercept"].isfinite().all()):
                name = type(self).__name__
                raise TrainingError(f"{name} overflowed: its features are too large. Normalise them first.")
            for name in ("weight", "intercept"):
                state[name] = state[name].float().contiguous()
            return {name: tensor.to(features.device) for name, tensor in state.items()}

    def _affine(self, features: Tensor) -> Tensor:
        self.check_fitted()
        self._check_width(features, self.weight_.shape[1])
        weight, intercept = self.weight_.to(features.device), self.intercept_.to(features.device)
        return torch.addmm(intercept, features.detach().float(), weight.T)  # (n, K)

    def _check_width(self, features: Tensor, width: int) -> None:
        if features.ndim != 2 or features.shape[1] != width:
            name, shape = type(self).__name__, tuple(features.shape)
            raise DataError(f"{name} was fitted on features of {width} numbers, and got the shape {shape}.")

    def check_fitted(self) -> None:
        """Raise a UsageError unless the classifier was fitted."""
        if "weight_" not in vars(self):
            raise UsageError(f"This {type(self).__name__} is not fitted. Call fit first.")

    def _check_positive(self, **settings: float) -> None:
        for setting, value in settings.items():
            if not value > 0:
                raise UsageError(f"The {setting} of {type(self).__name__} must be above 0, and is {value}.")


def check_samples(classifier: Classifier, features: Tensor, labels: Tensor) -> None:
    """Raise an error unless features (n, d) are finite and come with one integer label each."""
    name = type(classifier).__name__
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        shapes = f"{tuple(features.shape)} and {tuple(labels.shape)}"
        raise DataError(f"{name} needs features (n, d) and one label for each, and got the shapes {shapes}.")
    if not features.numel():
        raise DataError(f"{name} needs at least one sample, and got the shape {tuple(features.shape)}.")
    if labels.is_floating_point():
        raise DataError(f"{name} needs integer labels, and got {labels.dtype}.")
    with threads_for(0):
        finite = all(block.isfinite().all() for block in features.split(CHECKED_ROWS))
    if not finite:
        raise TrainingError(f"{name} got features that are not finite. Lower the learning rate, or check the images.")


def indexed(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted classes (K,) and the index of each sample's class among them (n,)."""
    classes, members = labels.unique(return_inverse=True)
    return classes, members


def positions(members: Tensor) -> Tensor:
    """Number the samples of each class 0, 1, 2, ... in the order in which they stand: (n,)."""
    order = members.argsort(stable=True)
    counts = torch.bincount(members)
    starts = counts.cumsum(dim=0) - counts  # (K,)
    numbers = torch.empty_like(members)
    numbers[order] = torch.arange(len(members), device=members.device) - starts[members[order]]
    return numbers


def disqualify_singletons(scores: Tensor, members: Tensor, alone: Tensor) -> Tensor:
    """Set the own class of each sample that is `alone` in it to -inf: without the sample, there is no such class."""
    scores[alone, members[alone]] = -torch.inf
    return scores


def widest(features: Tensor) -> Tensor:
    """The features in the widest floating-point type of their device."""
    return features.to(torch.float32 if features.device.type == "mps" else torch.float64)  # Apple GPUs lack float64
