"""The linear support vector machine, by Newton's method on the squared hinge loss, one class against the rest.

The classes of a block are solved together, so that one matrix product serves them all: k is the number of classes
still unsolved, `weight` (k, d + 1), `signs` (k, n) the y = ±1, and `shortfall` (k, n) how far each sample is short of
its margin, 1 − y f(x). Samples with a positive shortfall violate the margin.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import normalize, pad

from engram.errors import EngramWarning
from engram.features.classifiers.base import Classifier, for_each, regularised_factor, solve, widest
from engram.features.memory import class_sums
from engram.settings import INTERNAL

BLOCK = 2**24  # most numbers in a matrix of samples by classes; the classes are solved in blocks of this size
LARGE = 2**23  # numbers in the samples from which solving each class on its own may pay
FEW = 25  # times n / d: with fewer violators, computing a Hessian costs less than conjugate gradients
NEWTON_STEPS = 100  # about seven suffice for C = 1
CONJUGATE_STEPS = 100  # within a Newton step; about eight suffice
SEARCH_STEPS = 20  # within a line search; about three suffice
LONGEST_STEP = 2.0  # of a line search among few samples: those that violate their margin only beyond it are ignored
CROWD = 8  # a step is shortened while more than one in so many samples would newly violate its margin
FORCING = 0.1  # a Newton step is solved to this share of its gradient: the violators change before more would pay
RESCALING_STEPS = 5  # enough for a start
RESCALING_SAMPLES = 2**13  # enough for two numbers per class


@dataclass
class LinearSVM(Classifier):
    """One class against the rest with the squared hinge loss: the objective of scikit-learn's LinearSVC.

    Per class it minimises ½(‖w‖² + b²) + C Σ max(0, 1 − y (w·x + b))², so the intercept is regularised too.
    """

    label: ClassVar = "linear SVM (C {C:g})"

    C: PositiveFloat = 1.0  # the weight of the samples against the regulariser
    # Scores of unit features differ from the optimum's by at most √2 times this.
    tolerance: PositiveFloat = field(default=1e-4, metadata=INTERNAL)

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self._solution_from(None, features, labels)

    def _solution_from(self, start: Classifier | None, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        classes, members = labels.unique(return_inverse=True)
        samples = pad(widest(features), (0, 1), value=1.0)  # (n, d + 1): the intercept is the weight of a constant
        coarse = samples.float()  # enough for a direction or to find the violators, and twice as fast
        gram = samples.T @ samples  # (d + 1, d + 1)
        sums = 2 * class_sums(samples, members) - samples.sum(dim=0)  # (K, d + 1): Σ y x
        # At zero every sample violates its margin, so Newton's first step leads to ridge regression on all samples.
        ridge = solve(regularised_factor(gram, 1 / (2 * self.C)), sums)  # (K, d + 1)
        # Sums over n samples are no more exact than this, which matters only in float32.
        tolerance = max(self.tolerance, torch.finfo(samples.dtype).eps * 2 * self.C * len(samples))
        earlier = None
        if isinstance(start, LinearSVM) and start.weight_.shape[1] == features.shape[1]:
            earlier = _rows(start, classes).to(ridge)  # (K, d + 1)
        solutions = []
        for block in torch.arange(len(classes), device=classes.device).split(max(1, BLOCK // len(samples))):
            signs = torch.where(block[:, None] == members, 1.0, -1.0)  # (k, n)
            begin = ridge[block]
            if samples.numel() >= LARGE:
                begin = _rescaled(begin, None if earlier is None else earlier[block], samples, signs, self.C)
            solutions.append(_minimise(samples, coarse, gram, signs, begin, self.C, tolerance))
        weight = torch.cat(solutions)  # (K, d + 1)
        return {"classes": classes, "weight": weight[:, :-1], "intercept": weight[:, -1]}


def _rows(classifier: LinearSVM, classes: Tensor) -> Tensor:
    """The solutions (K, d + 1) of an earlier SVM for these classes; zero for those that it does not know."""
    rows = torch.cat([classifier.weight_, classifier.intercept_[:, None]], dim=1)
    known, row = (classes[:, None] == classifier.classes_.to(classes.device)).max(dim=1)
    return torch.where(known[:, None], rows[row], 0)


def _rescaled(ridge: Tensor, earlier: Tensor | None, samples: Tensor, signs: Tensor, C: float) -> Tensor:
    """The best multiple and the best intercept for each ridge solution (k, d + 1): an SVM on its score alone.

    Where an `earlier` solution (k, d + 1) has a lower objective, it is returned instead.
    """
    # Half of the other classes' samples violate the margin of a ridge solution; rescaled like this, few do.
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

    for_each(rescale, range(len(ridge)))
    if earlier is None:
        return moved
    inputs = samples[some.to(samples.device)]  # (s, d + 1)

    def objective(weight: Tensor) -> Tensor:
        shortfall = (1 - sides * (weight @ inputs.T)).clamp(min=0)  # (k, s)
        return weight.square().sum(dim=1) / 2 + heavier * shortfall.square().sum(dim=1)

    return torch.where((objective(earlier) < objective(moved))[:, None], earlier, moved)


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
    """For few violators: a coarse product with all samples finds those of each class, and they determine its step."""
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
        for_each(advance, range(len(unsolved)))
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
    """Which samples may violate their margin along the step (k, n), and its largest length (k,).

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
    """Minimise along the direction: one class's weight there, its next Newton direction, and the step (1,).

    `rows` (m, d + 1) are all samples that violate their margin along the step, `sides` (m,) their y. The direction of a
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
    factor = regularised_factor(gram, penalty)
    return weight, -solve(factor, penalty * gradient[None].to(gram.dtype))[0].to(weight.dtype), step


def _minimise_by_all(
    samples: Tensor, coarse: Tensor, gram: Tensor, signs: Tensor, begin: Tensor, C: float, tolerance: float
) -> Tensor:
    """For many violators: products of all classes with all samples at once."""
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
    factor = regularised_factor(share * gram, penalty).to(samples.dtype)
    mask = violated.to(samples.dtype)  # (k, n)
    residual = -gradient.to(samples.dtype) * penalty  # the equations are divided by 2C
    goal = FORCING * residual.norm(dim=1)  # (k,)
    direction = torch.zeros_like(residual)
    search = preconditioned = solve(factor, residual)
    agreement = (residual * preconditioned).sum(dim=1, keepdim=True)  # (k, 1)
    smallest = torch.finfo(samples.dtype).tiny  # keeps a class that is solved exactly from dividing 0 by 0
    for _ in range(CONJUGATE_STEPS):
        curved = penalty * search + (search @ samples.T).mul_(mask) @ samples  # (k, d + 1)
        length = agreement / (search * curved).sum(dim=1, keepdim=True).clamp(min=smallest)  # (k, 1)
        direction = direction + length * search
        residual = residual - length * curved
        if (residual.norm(dim=1) <= goal).all():
            break
        preconditioned = solve(factor, residual)
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
