"""`Classifier`: fitting, scoring, saving, and scores of held-out samples.

To add one, subclass it as a dataclass whose fields are its settings, and enter it in `CLASSIFIERS`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from engram import settings
from engram.errors import DataError, TrainingError, UsageError
from engram.features.memory import Statistics
from engram.network import parallel

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALL = 2**33  # multiplications: a few tenths of a second of one processor
FOLDS = 5  # of the cross-validation of classifiers that have no closed form
CHECKED_ROWS = 2**14  # checked for NaN at a time, so that the check needs little memory


class Classifier(ABC):
    """Scores unit features by one affine function per class: `classes_` (K,), `weight_` (K, d), `intercept_` (K,)."""

    label: ClassVar[str]  # the description, with settings in braces
    leaves_one_out: ClassVar[bool] = False  # whether held-out scores leave out one sample, and not a fifth of them
    saved: ClassVar[tuple[str, ...]] = ("classes", "intercept", "weight")  # the tensors of its state, without the _

    # The statistics of classes that it can be computed from; None: it needs features.
    statistics: ClassVar[Literal["means", "covariances"] | None] = None

    classes_: Tensor
    weight_: Tensor
    intercept_: Tensor

    @property
    def description(self) -> str:
        """A few words for people, such as "ridge (penalty 1)"."""
        return self.label.format(**vars(self))

    def fit(self, features: Tensor, labels: Tensor, start: Classifier | None = None) -> Self:
        """Fit to features (n, d) and integer labels (n,); a solver that iterates may begin at an earlier classifier."""
        return self.restore(parallel.broadcast(lambda: self._fitted_state(features, labels, start)))

    def fit_statistics(self, statistics: Statistics) -> Self:
        """Fit to the statistics of classes, which are those of features that passed through `transform`."""
        if self.statistics is None:
            raise UsageError(f"{type(self).__name__} needs features. Use nearest-mean, lda, ridge or fecam.")
        return self.restore(parallel.broadcast(lambda: self._finished(self.solve_statistics(statistics))))

    def solve_statistics(self, statistics: Statistics) -> dict[str, Tensor]:
        """Compute the state from statistics; of classifiers whose `statistics` is not None."""
        raise NotImplementedError

    def transform(self, features: Tensor) -> Tensor:
        """What is done to unit features (n, d) before anything else."""
        return features

    @abstractmethod
    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute the state from checked arguments: at least classes (K,), weight (K, d) and intercept (K,)."""

    def _solution_from(self, start: Classifier | None, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The same, where it may begin at the classifier `start`."""
        return self._solution(features, labels)

    def scores(self, features: Tensor) -> Tensor:
        """Score features (n, d) for every class, in the order of `classes_`: (n, K), float32."""
        self.check_fitted()
        self._check_width(features, self.weight_.shape[1])
        weight, intercept = self.weight_.to(features.device), self.intercept_.to(features.device)
        return torch.addmm(intercept, features.detach().float(), weight.T)

    def held_out_scores(self, features: Tensor, labels: Tensor, rows: Tensor | None = None) -> Tensor:
        """Score each sample with the classifier fitted without it: (n, K), float32, columns as the sorted classes.

        `rows` (m,) int64 selects the samples to score: (m, K). This neither needs `fit` nor changes the fitted state.
        A sample that is the only one of its class has the score -inf for that class. Classifiers with a closed form
        leave out one sample at a time; the others use stratified 5-fold cross-validation.
        """

        def compute() -> Tensor:
            self._check(features, labels)
            chosen = torch.arange(len(labels), device=features.device) if rows is None else rows.to(features.device)
            return self._held_out(features.detach(), labels.to(features.device), chosen).to(features.device)

        return parallel.broadcast(compute)

    def _held_out(self, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """Cross-validate: the j-th sample of a class is held out in fold j mod 5, unless its class has no other."""
        classes, members = labels.unique(return_inverse=True)
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
        self.check_fitted()
        return {name: torch.as_tensor(getattr(self, f"{name}_")) for name in self.saved}

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        missing = [name for name in self.saved if name not in tensors]
        if missing:
            raise DataError(f"A saved {type(self).__name__} lacks its {' and '.join(missing)}.")
        for name in self.saved:
            setattr(self, f"{name}_", tensors[name])
        return self

    def regrouped(self, groups: Sequence[Sequence[int]]) -> Self:
        """One class of each group of class indices, whose row is the mean of theirs; the others are dropped."""
        rows = {name: getattr(self, f"{name}_") for name in ("weight", "intercept")}
        merged = {name: torch.stack([tensor[list(group)].mean(0) for group in groups]) for name, tensor in rows.items()}
        return copy.copy(self).restore({**self.state(), **merged, "classes": torch.arange(len(groups))})

    def _fitted_state(self, features: Tensor, labels: Tensor, start: Classifier | None = None) -> dict[str, Tensor]:
        self._check(features, labels)
        state = self._finished(self._solution_from(start, features.detach(), labels.to(features.device)))
        return {name: tensor.to(features.device) for name, tensor in state.items()}

    def _finished(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        with threads_for(0):
            if not (state["weight"].isfinite().all() and state["intercept"].isfinite().all()):
                name = type(self).__name__
                raise TrainingError(f"{name} overflowed: its features are too large. Normalise them first.")
            for name in ("weight", "intercept"):
                state[name] = state[name].float().contiguous()
        return state

    def check_fitted(self) -> None:
        if "weight_" not in vars(self):
            raise UsageError(f"This {type(self).__name__} is not fitted. Call fit first.")

    def _check_width(self, features: Tensor, width: int) -> None:
        if features.ndim != 2 or features.shape[1] != width:
            name, shape = type(self).__name__, tuple(features.shape)
            raise DataError(f"{name} was fitted on features of {width} numbers, and got the shape {shape}.")

    def _check(self, features: Tensor, labels: Tensor) -> None:
        """Raise an error unless the settings are valid and finite features (n, d) have one integer label each."""
        settings.check(self)
        name, shapes = type(self).__name__, f"{tuple(features.shape)} and {tuple(labels.shape)}"
        if features.ndim != 2 or labels.shape != features.shape[:1] or not features.numel():
            raise DataError(f"{name} needs features (n, d) and one label for each, and got the shapes {shapes}.")
        if labels.is_floating_point():
            raise DataError(f"{name} needs integer labels, and got {labels.dtype}.")
        with threads_for(0):
            finite = all(block.isfinite().all() for block in features.split(CHECKED_ROWS))
        if not finite:
            raise TrainingError(
                f"{name} got features with NaN or infinity. Lower the learning rate, or check the images."
            )


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


# What classifiers compute with. Threads that share one small matrix product mostly wait for each other, on a busy
# machine for many times the work. So small problems are computed in one thread, or several of them side by side.

_available: ContextVar[int] = ContextVar("available")  # threads that torch had before `threads_for`


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """Compute in one thread inside, or in all that torch has if there are many multiplications."""
    available = _available.get(torch.get_num_threads())
    token = _available.set(available)
    try:
        with parallel.threads(available if multiplications > SMALL else 1):
            yield
    finally:
        _available.reset(token)


def for_each(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Do the work for every item, in as many threads as torch has, each computing alone."""
    threads = _available.get(torch.get_num_threads())
    if threads == 1:
        return [work(item) for item in items]
    with threads_for(0), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def widest(features: Tensor) -> Tensor:
    """The features in the widest floating-point type of their device."""
    return features.to(torch.float32 if features.device.type == "mps" else torch.float64)  # Apple GPUs lack float64


def regularised_factor(gram: Tensor, penalty: float) -> Tensor:
    """Cholesky factor of gram + penalty · I; only the lower triangle of `gram` (d, d) is read."""
    system = gram.clone()
    system.diagonal().add_(penalty)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed:
        raise TrainingError(
            "The system of equations is not positive definite in floating point: the features are too large for this "
            "regularisation. Normalise them, or regularise more."
        )
    return factor


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """Solve A x = b for every row b of `right` (k, d), where `factor` (d, d) is the Cholesky factor of A."""
    return torch.cholesky_solve(right.T, factor).T
