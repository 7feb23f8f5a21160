"""Linear classifiers on unit features: a support vector machine, softmax regression, a discriminant, and others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from engram.errors import DataError, TrainingError, UsageError
from engram.features import multinomial, squared_hinge
from engram.features.least_squares import class_sums, regularised_factor, solved
from engram.network import parallel

SMALLEST_VARIANCE = 1e-6  # of a unit vector's number, within a class
BLOCK = 2**24  # most numbers in a matrix of samples by classes; more classes than fit are solved in turns


class Classifier(ABC):
    """Scores unit features by one affine function per class: `classes_` (K,), `weight_` (K, d), `intercept_` (K,)."""

    classes_: Tensor
    weight_: Tensor
    intercept_: Tensor

    def fit(self, features: Tensor, labels: Tensor) -> Self:
        """Learn from features (n, d) and integer labels (n,)."""
        self.classes_, self.weight_, self.intercept_ = parallel.once(lambda: self._finite_solution(features, labels))
        return self

    @abstractmethod
    def _solution(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `fit` learns: classes (K,), weight (K, d) and intercept (K,)."""

    @abstractmethod
    def scores(self, features: Tensor) -> Tensor:
        """Score features (n, d) for every class, in the order of `classes_`: (n, K), float32."""

    def state(self) -> dict[str, Tensor]:
        """All that was learned, as tensors that can be saved."""
        self.check_fitted()
        return {"classes": self.classes_, "weight": self.weight_, "intercept": self.intercept_}

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        """Take back what `state` gave."""
        missing = {"classes", "weight", "intercept"} - tensors.keys()
        if missing:
            raise DataError(f"A saved {type(self).__name__} lacks its {' and '.join(sorted(missing))}.")
        self.classes_, self.weight_, self.intercept_ = tensors["classes"], tensors["weight"], tensors["intercept"]
        return self

    def _finite_solution(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        classes, weight, intercept = self._solution(features, labels)
        if not (weight.isfinite().all() and intercept.isfinite().all()):
            raise TrainingError(f"{type(self).__name__} overflowed: its features are too large. Normalise them first.")
        return classes, weight.float().contiguous(), intercept.float().contiguous()

    def _affine(self, features: Tensor) -> Tensor:
        self.check_fitted()
        width = self.weight_.shape[1]
        if features.ndim != 2 or features.shape[1] != width:
            name, shape = type(self).__name__, tuple(features.shape)
            raise DataError(f"{name} was fitted on features of {width} numbers, and got the shape {shape}.")
        weight, intercept = self.weight_.to(features.device), self.intercept_.to(features.device)
        return torch.addmm(intercept, features.detach().float(), weight.T)  # (n, K)

    def check_fitted(self) -> None:
        """Refuse to go on with a classifier that has learned nothing."""
        if "weight_" not in vars(self):
            raise UsageError(f"This {type(self).__name__} has learned nothing yet. Call fit first.")


@dataclass
class LinearSVM(Classifier):
    """One class against the rest with the squared hinge loss: the objective of scikit-learn's LinearSVC.

    Per class it minimises ½(‖w‖² + b²) + C Σ max(0, 1 − y (w·x + b))², so the intercept is regularised too.
    """

    C: float = 1.0  # the weight of the samples against the regulariser
    tolerance: float = 1e-4  # no score of a unit feature is further from the optimum's than √2 times this

    def _solution(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _check_positive(self, C=self.C, tolerance=self.tolerance)
        samples, classes, members = _checked(self, features, labels)
        samples = pad(samples, (0, 1), value=1.0)  # (n, d + 1): the intercept is the weight of a constant
        coarse = samples.float()  # enough for a direction or to find the violators, and twice as fast
        gram = samples.T @ samples  # (d + 1, d + 1)
        sums = 2 * class_sums(samples, members) - samples.sum(dim=0)  # (K, d + 1): Σ y x
        # At zero every sample violates its margin, so ridge regression on all is where Newton's first step ends.
        ridge = solved(regularised_factor(gram, 1 / (2 * self.C)), sums)  # (K, d + 1)
        # No sum over n samples is more exact than this, which only float32 ever comes near.
        tolerance = max(self.tolerance, torch.finfo(samples.dtype).eps * 2 * self.C * len(samples))
        solutions = []
        for block in torch.arange(len(classes), device=classes.device).split(max(1, BLOCK // len(samples))):
            signs = torch.where(block[:, None] == members, 1.0, -1.0)  # (k, n)
            begin = squared_hinge.starting_point(ridge[block], samples, signs, self.C)
            solutions.append(squared_hinge.minimise(samples, coarse, gram, signs, begin, self.C, tolerance))
        weight = torch.cat(solutions)  # (K, d + 1)
        return classes, weight[:, :-1], weight[:, -1]

    def scores(self, features: Tensor) -> Tensor:
        """w·x + b for every class: (n, K)."""
        return self._affine(features)


@dataclass
class Softmax(Classifier):
    """Softmax regression: the probabilities of all classes at once, each class weighing as much as any other.

    It minimises Σ −log p(y | x) + ‖w‖² / 2C over all classes, the intercepts free: scikit-learn's LogisticRegression,
    with `class_weight="balanced"`. A vector that is off moves it less than it moves a machine, which goes by the few at
    its margins: so it bears what an adapter or a codec is off by.
    """

    C: float = 1.0  # the weight of the samples against the regulariser
    tolerance: float = 1e-4  # of the gradient, where the Hessian is about 1: the loss is off by a tenth of that or less

    def _solution(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _check_positive(self, C=self.C, tolerance=self.tolerance)
        samples, classes, members = _checked(self, features, labels)
        count, counts = len(samples), torch.bincount(members).to(samples)
        samples = pad(samples, (0, 1), value=1.0)  # (n, d + 1): the intercept is the weight of a constant
        shares = 1 / (len(classes) * counts)[members]  # (n,)
        weight = multinomial.minimise(samples, members, shares, len(classes), 1 / (self.C * count), self.tolerance)
        return classes, weight[:, :-1], weight[:, -1]

    def scores(self, features: Tensor) -> Tensor:
        """The logarithm of every class's probability, but for what all of them share: (n, K)."""
        return self._affine(features)


@dataclass
class NearestMean(Classifier):
    """The nearest of the normalised class means (iCaRL, Algorithm 1): for unit vectors, cosine similarity."""

    def _solution(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Average the unit vectors of each class."""
        features, classes, members = _checked(self, features, labels)
        means = normalize(class_sums(normalize(features), members))  # (K, d)
        # −‖x − m‖² = 2 m·x − ‖m‖² − 1 for a unit vector x.
        return classes, 2 * means, -means.square().sum(dim=1) - 1

    def scores(self, features: Tensor) -> Tensor:
        """Minus the squared distance between the normalised features and every class mean: (n, K)."""
        return self._affine(normalize(features.float(), dim=-1))


@dataclass
class Ridge(Classifier):
    """Least squares on ±1 targets with an L2 penalty and a free intercept: scikit-learn's RidgeClassifier."""

    penalty: float = 1.0  # scikit-learn's alpha

    def _solution(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Solve the normal equations of the centred problem."""
        _check_positive(self, penalty=self.penalty)
        features, classes, members = _checked(self, features, labels)
        centre = features.mean(dim=0)  # (d,)
        centred = features - centre  # (n, d)
        factor = regularised_factor(centred.T @ centred, self.penalty)  # (d, d)
        # As the centred features sum to zero, what is left of their products with the ±1 targets are class sums.
        right = 2 * class_sums(centred, members)  # (K, d)
        weight = solved(factor, right)  # (K, d)
        shares = torch.bincount(members).to(weight) / len(features)  # (K,)
        return classes, weight, 2 * shares - 1 - weight @ centre

    def scores(self, features: Tensor) -> Tensor:
        """The least-squares estimate of +1 for the class and −1 for the rest: (n, K)."""
        return self._affine(features)


@dataclass
class Discriminant(Classifier):
    """Fisher's linear discriminant: classes are equally likely and Gaussian, with one covariance for all of them.

    It rests on means and on a covariance alone, so few vectors will do, and coarse ones: what a single vector is off by
    is lost in the mean. scikit-learn's LinearDiscriminantAnalysis with equal priors and the solver "lsqr".
    """

    # How far the covariance is drawn to a multiple of the identity; 1 is the nearest mean. Ledoit and Wolf's share is
    # too little: it knows how few the vectors are, and not how far the carried ones are off.
    shrinkage: float = 0.05

    def _solution(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whiten the means."""
        _check_positive(self, shrinkage=self.shrinkage)
        features, classes, members = _checked(self, features, labels)
        counts = torch.bincount(members).to(features)[:, None]  # (K, 1)
        means = class_sums(features, members) / counts  # (K, d)
        weights = len(features) / (len(classes) * counts)  # (K, 1): a class weighs as much as any other
        centred = (features - means[members]) * weights[members].sqrt()
        covariance = centred.T @ centred / len(centred)  # (d, d)
        size = covariance.diagonal().mean().clamp(min=SMALLEST_VARIANCE)  # one vector of each class has none
        factor = regularised_factor((1 - self.shrinkage) * covariance, float(self.shrinkage * size))
        weight = solved(factor, means)  # (K, d)
        return classes, weight, -(weight * means).sum(dim=1) / 2

    def scores(self, features: Tensor) -> Tensor:
        """The log-likelihood of every class, but for what all of them share: (n, K)."""
        return self._affine(features)


CLASSIFIERS: dict[str, type[Classifier]] = {
    "svm": LinearSVM,
    "softmax": Softmax,
    "discriminant": Discriminant,
    "nearest-mean": NearestMean,
    "ridge": Ridge,
}


def _checked(classifier: Classifier, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The features in the widest floats of their device, the sorted classes (K,), and each sample's among them (n,)."""
    name = type(classifier).__name__
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        shapes = f"{tuple(features.shape)} and {tuple(labels.shape)}"
        raise DataError(f"{name} needs features (n, d) and one label for each, and got the shapes {shapes}.")
    if not features.numel():
        raise DataError(f"{name} needs at least one sample, and got the shape {tuple(features.shape)}.")
    if labels.is_floating_point():
        raise DataError(f"{name} needs integer labels, and got {labels.dtype}.")
    if not features.isfinite().all():
        raise TrainingError(f"{name} met features that are not finite. Lower the learning rate, or check the images.")
    precision = torch.float32 if features.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    classes, members = labels.to(features.device).unique(return_inverse=True)
    return features.detach().to(precision), classes, members


def _check_positive(classifier: Classifier, **settings: float) -> None:
    for setting, value in settings.items():
        if not value > 0:
            raise UsageError(f"The {setting} of {type(classifier).__name__} must be above 0, and is {value}.")
