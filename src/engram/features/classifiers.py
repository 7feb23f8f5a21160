"""Linear classifiers on unit features: a support vector machine, the nearest class mean, and ridge regression."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from engram.errors import DataError, EngramWarning, TrainingError, UsageError

BLOCK = 2**24  # most numbers in a matrix of samples by classes; more classes than fit are solved in turns
LARGE = 2**23  # numbers in the samples from which on it pays to look at every class alone
FEW = 25  # times n / d: with fewer violators, making a Hessian costs less than the products that would replace it
NEWTON_STEPS = 100  # about seven suffice for C = 1
CONJUGATE_STEPS = 100  # within a Newton step; about eight suffice
SEARCH_STEPS = 20  # within a line search; about three suffice
LONGEST_STEP = 2.0  # of a line search among few samples: those that come short only beyond it are left out
CROWD = 8  # a step is shortened while one in so many samples would newly come short on its way
FORCING = 0.1  # a Newton step is solved to this share of its gradient: the violators change before more would pay
RESCALING_STEPS = 5  # it is a start only
RESCALING_SAMPLES = 2**13  # enough for two numbers per class


class Classifier(ABC):
    """Scores unit features by one affine function per class: `classes_` (K,), `weight_` (K, d), `intercept_` (K,)."""

    classes_: Tensor
    weight_: Tensor
    intercept_: Tensor

    @abstractmethod
    def fit(self, features: Tensor, labels: Tensor, start: Classifier | None = None) -> Self:
        """Learn from features (n, d) and integer labels (n,); `start` is an earlier solution, where one saves time."""

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

    def _learned(self, classes: Tensor, weight: Tensor, intercept: Tensor) -> Self:
        if not (weight.isfinite().all() and intercept.isfinite().all()):
            raise TrainingError(f"{type(self).__name__} overflowed: its features are too large. Normalise them first.")
        self.classes_, self.weight_ = classes, weight.float().contiguous()
        self.intercept_ = intercept.float().contiguous()
        return self

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

    def fit(self, features: Tensor, labels: Tensor, start: Classifier | None = None) -> Self:
        """Learn from features (n, d) and integer labels (n,); classes that `start` knows begin at its solution."""
        _check_positive(self, C=self.C, tolerance=self.tolerance)
        samples, classes, members = _checked(self, features, labels)
        samples = pad(samples, (0, 1), value=1.0)  # (n, d + 1): the intercept is the weight of a constant
        coarse = samples.float()  # enough for a direction or to find the violators, and twice as fast
        gram = samples.T @ samples  # (d + 1, d + 1)
        sums = 2 * _class_sums(samples, members) - samples.sum(dim=0)  # (K, d + 1): Σ y x
        # At zero every sample violates its margin, so ridge regression on all is where Newton's first step ends.
        ridge = _solved(_regularised_factor(gram, 1 / (2 * self.C)), sums)  # (K, d + 1)
        # No sum over n samples is more exact than this, which only float32 ever comes near.
        tolerance = max(self.tolerance, torch.finfo(samples.dtype).eps * 2 * self.C * len(samples))
        solutions = []
        for block in torch.arange(len(classes), device=classes.device).split(max(1, BLOCK // len(samples))):
            signs = torch.where(block[:, None] == members, 1.0, -1.0)  # (k, n)
            begin = _rescaled(ridge[block], samples, signs, self.C) if samples.numel() >= LARGE else ridge[block]
            begin = _continued(begin, classes[block], start)  # (k, d + 1)
            solutions.append(_minimise(samples, coarse, gram, signs, begin, self.C, tolerance))
        weight = torch.cat(solutions)  # (K, d + 1)
        return self._learned(classes, weight[:, :-1], weight[:, -1])

    def scores(self, features: Tensor) -> Tensor:
        """w·x + b for every class: (n, K)."""
        return self._affine(features)


@dataclass
class NearestMean(Classifier):
    """The nearest of the normalised class means (iCaRL, Algorithm 1): for unit vectors, cosine similarity."""

    def fit(self, features: Tensor, labels: Tensor, start: Classifier | None = None) -> Self:
        """Average the unit vectors of each class; there is nothing that a start could save."""
        features, classes, members = _checked(self, features, labels)
        means = normalize(_class_sums(normalize(features), members))  # (K, d)
        # −‖x − m‖² = 2 m·x − ‖m‖² − 1 for a unit vector x.
        return self._learned(classes, 2 * means, -means.square().sum(dim=1) - 1)

    def scores(self, features: Tensor) -> Tensor:
        """Minus the squared distance between the normalised features and every class mean: (n, K)."""
        return self._affine(normalize(features.float(), dim=-1))


@dataclass
class Ridge(Classifier):
    """Least squares on ±1 targets with an L2 penalty and a free intercept: scikit-learn's RidgeClassifier."""

    penalty: float = 1.0  # scikit-learn's alpha

    def fit(self, features: Tensor, labels: Tensor, start: Classifier | None = None) -> Self:
        """Solve the normal equations of the centred problem; there is nothing that a start could save."""
        _check_positive(self, penalty=self.penalty)
        features, classes, members = _checked(self, features, labels)
        centre = features.mean(dim=0)  # (d,)
        centred = features - centre  # (n, d)
        factor = _regularised_factor(centred.T @ centred, self.penalty)  # (d, d)
        # As the centred features sum to zero, what is left of their products with the ±1 targets are class sums.
        right = 2 * _class_sums(centred, members)  # (K, d)
        weight = _solved(factor, right)  # (K, d)
        shares = torch.bincount(members).to(weight) / len(features)  # (K,)
        return self._learned(classes, weight, 2 * shares - 1 - weight @ centre)

    def scores(self, features: Tensor) -> Tensor:
        """The least-squares estimate of +1 for the class and −1 for the rest: (n, K)."""
        return self._affine(features)


CLASSIFIERS: dict[str, type[Classifier]] = {"svm": LinearSVM, "nearest-mean": NearestMean, "ridge": Ridge}


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


def _class_sums(features: Tensor, members: Tensor) -> Tensor:
    """The sum of the features of each class: (K, d)."""
    # Sorting and splitting adds in the same order every time, which index_add does not on a GPU.
    grouped = features[members.argsort(stable=True)]  # (n, d)
    return torch.stack([group.sum(dim=0) for group in grouped.split(torch.bincount(members).tolist())])


def _regularised_factor(gram: Tensor, penalty: float) -> Tensor:
    """The Cholesky factor of gram + penalty · I."""
    system = gram.clone()
    system.diagonal().add_(penalty)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed:
        raise TrainingError("The features are too large for so weak a regulariser. Normalise them, or strengthen it.")
    return factor


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    """Solve A x = b for every row b of `right` (k, d), where `factor` (d, d) is the Cholesky factor of A."""
    return torch.cholesky_solve(right.T, factor).T


def _continued(begin: Tensor, classes: Tensor, start: Classifier | None) -> Tensor:
    """`begin` (k, d + 1), except for the classes that an earlier solution knows."""
    if start is None:
        return begin
    start.check_fitted()
    earlier = torch.cat([start.weight_, start.intercept_[:, None]], dim=1).to(begin)  # (K, d + 1)
    if earlier.shape[1] != begin.shape[1]:
        found, needed = earlier.shape[1] - 1, begin.shape[1] - 1
        raise DataError(f"The solution to start from has {found} weights per class, and the features have {needed}.")
    same = classes[:, None] == start.classes_.to(classes.device)  # (k, K)
    return torch.where(same.any(dim=1, keepdim=True), earlier[same.int().argmax(dim=1)], begin)


# The support vector machine. The classes of a block are solved together, so that one matrix product serves them all:
# k is the number of classes still unsolved, `weight` (k, d + 1), `signs` (k, n) the y = ±1, and `shortfall` (k, n)
# how far each sample is short of its margin, 1 − y f(x). Samples with a positive shortfall violate the margin.


def _rescaled(ridge: Tensor, samples: Tensor, signs: Tensor, C: float) -> Tensor:
    """The best multiple and the best intercept for each ridge solution (k, d + 1): a machine of its score alone."""
    # Ridge regression leaves half of the other classes' samples short of their margin; moved like this, few are.
    some = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))[:RESCALING_SAMPLES]  # (s,)
    unit = normalize(ridge[:, :-1])  # (k, d)
    scores = unit @ samples[some.to(samples.device), :-1].T  # (k, s)
    rows = torch.stack([scores, torch.ones_like(scores)], dim=2)  # (k, s, 2)
    sides = signs[:, some.to(signs.device)].to(rows.dtype)  # (k, s)
    moved, heavier = torch.empty_like(ridge), C * len(samples) / len(some)

    def rescale(each: int) -> None:
        weight = direction = rows.new_zeros(2)
        for _ in range(RESCALING_STEPS):
            weight, direction, _ = _step(rows[each], sides[each], weight, direction, heavier, 0, LONGEST_STEP)
        moved[each] = torch.cat([weight[:1] * unit[each], weight[1:]])

    _for_each(len(ridge), rescale)
    return moved


def _minimise(
    samples: Tensor, coarse: Tensor, gram: Tensor, signs: Tensor, begin: Tensor, C: float, tolerance: float
) -> Tensor:
    """Newton's method with an exact line search for the classes of one block, each until its gradient vanishes."""
    if samples.numel() >= LARGE:
        shortfall = 1 - signs * (begin.float() @ coarse.T)  # (k, n)
        violators = (shortfall > 0).count_nonzero() / len(begin)  # of a class
        if violators * samples.shape[1] < FEW * len(samples):
            return _minimise_by_few(samples, coarse, signs, shortfall, begin, C, tolerance)
    return _minimise_by_all(samples, coarse, gram, signs.to(samples.dtype), begin, C, tolerance)


def _minimise_by_few(
    samples: Tensor, coarse: Tensor, signs: Tensor, shortfall: Tensor, begin: Tensor, C: float, tolerance: float
) -> Tensor:
    """Where few samples violate a margin: a coarse product with all finds a class's few, and those make its step."""
    solution, weight, direction = begin.clone(), begin.clone(), torch.zeros_like(begin)  # (k, d + 1)
    unsolved = torch.arange(len(begin), device=begin.device)  # (k,)
    approach = torch.zeros_like(shortfall)  # (k, n)
    longest = samples.norm(dim=1).max()

    def advance(each: int) -> None:
        index = near[each].nonzero()[:, 0]  # (m,)
        rows, sides = samples[index], signs[each, index].to(samples.dtype)  # (m, d + 1), (m,)
        found = _step(rows, sides, weight[each], direction[each], C, tolerance, float(reach[each]))
        weight[each], direction[each], steps[each] = found

    for _ in range(NEWTON_STEPS):
        near, reach = _near(shortfall, approach, 1e-5 * longest * (weight.norm(dim=1) + direction.norm(dim=1)))
        steps = torch.zeros_like(reach)
        _for_each(len(unsolved), advance)
        solution[unsolved] = weight
        shortfall -= steps[:, None] * approach
        going = direction.any(dim=1)  # (k,)
        if not going.all():
            unsolved, weight, direction = unsolved[going], weight[going], direction[going]
            signs, shortfall = signs[going], shortfall[going]
        if not len(unsolved):
            return solution
        approach = (direction.float() @ coarse.T).mul_(signs)  # (k, n)
    _warn_of_unsolved(len(unsolved), C, tolerance)
    return solution


def _near(shortfall: Tensor, approach: Tensor, unsure: Tensor) -> tuple[Tensor, Tensor]:
    """Which samples may be short of their margin on the way (k, n), and how far the way goes (k,).

    `unsure` (k,) is how far a shortfall in float32 may be off.
    """
    reach = shortfall.new_full(unsure.shape, LONGEST_STEP)
    crowd = (shortfall > 0).sum(dim=1) + shortfall.shape[1] / CROWD  # (k,)
    for _ in range(5):
        near = torch.maximum(shortfall, shortfall - reach[:, None] * approach) > -unsure[:, None].float()
        crowded = near.sum(dim=1) > crowd  # (k,)
        if not crowded.any():
            break
        reach = torch.where(crowded, reach / 4, reach)
    return near, reach


def _step(
    rows: Tensor, sides: Tensor, weight: Tensor, direction: Tensor, C: float, tolerance: float, reach: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Go along the direction as far as pays: one class's weight there, its Newton direction, and the step (1,).

    `rows` (m, d + 1) hold every sample that is short of its margin on the way, `sides` (m,) their y. The direction of a
    class that is solved is zero.
    """
    shortfall, approach = 1 - sides * (rows @ weight), sides * (rows @ direction)  # (m,)
    step = _line_search(weight[None], direction[None], shortfall[None], approach[None], C).clamp(max=reach)
    weight = weight + step * direction
    shortfall = (shortfall - step * approach).clamp(min=0)
    gradient = weight - 2 * C * (sides * shortfall) @ rows  # (d + 1,)
    if gradient.norm() <= tolerance:
        return weight, torch.zeros_like(weight), step
    violators, penalty = rows[shortfall > 0], 1 / (2 * C)
    coarse = violators.float()
    gram = coarse.T @ coarse  # (d + 1, d + 1)
    if torch.finfo(gram.dtype).eps * gram.trace() > 0.1 * penalty:  # which would be lost in rounding errors
        gram = violators.T @ violators
    factor = _regularised_factor(gram, penalty)
    return weight, -_solved(factor, penalty * gradient[None].to(gram.dtype))[0].to(weight.dtype), step


def _for_each(count: int, work: Callable[[int], None]) -> None:
    """Do work(0), work(1), … in as many threads as torch has, each computing alone.

    Every piece is too small to be shared: on a busy machine, waiting for another thread costs many times the work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(count)))
    finally:
        torch.set_num_threads(threads)


def _minimise_by_all(
    samples: Tensor, coarse: Tensor, gram: Tensor, signs: Tensor, begin: Tensor, C: float, tolerance: float
) -> Tensor:
    """Where many do: the products of all classes with all samples at once."""
    solution, weight = begin.clone(), begin  # (k, d + 1)
    unsolved = torch.arange(len(begin), device=begin.device)  # (k,)
    shortfall = 1 - signs * (weight @ samples.T)  # (k, n)
    for _ in range(NEWTON_STEPS):
        solution[unsolved] = weight
        gradient = weight - 2 * C * (signs * shortfall.clamp(min=0)) @ samples  # (k, d + 1)
        # The objective is 1-strongly convex: the optimum is no further away than the gradient is long.
        going = gradient.norm(dim=1) > tolerance  # (k,)
        if not going.all():
            unsolved, weight, gradient = unsolved[going], weight[going], gradient[going]
            signs, shortfall = signs[going], shortfall[going]
        if not len(unsolved):
            return solution
        direction = _newton_direction(coarse, gram, shortfall > 0, gradient, C).to(weight.dtype)  # (k, d + 1)
        approach = signs * (direction @ samples.T)  # (k, n): how fast each shortfall shrinks
        step = _line_search(weight, direction, shortfall, approach, C)[:, None]  # (k, 1)
        weight = weight + step * direction
        shortfall -= step * approach
    _warn_of_unsolved(len(unsolved), C, tolerance)
    return solution


def _warn_of_unsolved(classes: int, C: float, tolerance: float) -> None:
    warnings.warn(
        f"LinearSVM left {classes} classes short of their optimum after {NEWTON_STEPS} steps. "
        f"Lower C ({C:g}), normalise the features, or raise the tolerance ({tolerance:g}).",
        EngramWarning,
        stacklevel=5,
    )


def _newton_direction(samples: Tensor, gram: Tensor, violated: Tensor, gradient: Tensor, C: float) -> Tensor:
    """Solve (I + 2C Σ x xᵀ over the violators) direction = −gradient, for every class, by conjugate gradients."""
    # The violators of any class are spread roughly as all samples are, so their share of the common Gram matrix
    # preconditions the Hessian of every class.
    penalty = 1 / (2 * C)
    share = float(violated.count_nonzero()) / violated.numel()
    factor = _regularised_factor(share * gram, penalty).to(samples.dtype)
    mask = violated.to(samples.dtype)  # (k, n)
    residual = -gradient.to(samples.dtype) * penalty  # the equations are divided by 2C
    goal = FORCING * residual.norm(dim=1)  # (k,)
    direction = torch.zeros_like(residual)
    search = preconditioned = _solved(factor, residual)
    agreement = (residual * preconditioned).sum(dim=1, keepdim=True)  # (k, 1)
    smallest = torch.finfo(samples.dtype).tiny  # keeps a class that is solved exactly from dividing 0 by 0
    for _ in range(CONJUGATE_STEPS):
        curved = penalty * search + (search @ samples.T).mul_(mask) @ samples  # (k, d + 1)
        length = agreement / (search * curved).sum(dim=1, keepdim=True).clamp(min=smallest)  # (k, 1)
        direction = direction + length * search
        residual = residual - length * curved
        if (residual.norm(dim=1) <= goal).all():
            break
        preconditioned = _solved(factor, residual)
        previous, agreement = agreement, (residual * preconditioned).sum(dim=1, keepdim=True)
        search = preconditioned + agreement / previous.clamp(min=smallest) * search
    return direction


def _line_search(weight: Tensor, direction: Tensor, shortfall: Tensor, approach: Tensor, C: float) -> Tensor:
    """The step (k,) along `direction` to the minimum: Newton on the slope, kept inside a bracket by bisection."""
    # Along a line the objective is convex and piecewise quadratic, so Newton ends as soon as it is on the right piece.
    outward, square = (weight * direction).sum(dim=1), direction.square().sum(dim=1)  # (k,)
    low, high = torch.zeros_like(square), torch.full_like(square, torch.inf)
    step = torch.ones_like(square)
    for _ in range(SEARCH_STEPS):
        left = (shortfall - step[:, None] * approach).clamp_(min=0)  # (k, n)
        slope = outward + step * square - 2 * C * (approach * left).sum(dim=1)
        curvature = square + 2 * C * (approach.square() * (left > 0)).sum(dim=1)
        low, high = torch.where(slope < 0, step, low), torch.where(slope < 0, high, step)
        change = slope / curvature.clamp(min=torch.finfo(slope.dtype).tiny)
        if (change.abs() <= 1e-3 * step).all():
            break
        newton, middle = step - change, (low + high) / 2
        step = torch.where((newton >= low) & (newton <= high), newton, middle)
    return step
