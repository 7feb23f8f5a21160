"""The linear support vector machine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import pad

from engram.features import squared_hinge
from engram.features.classifiers.base import Classifier, indexed, widest
from engram.features.least_squares import class_sums, regularised_factor, solved
from engram.settings import INTERNAL

BLOCK = 2**24  # most numbers in a matrix of samples by classes; the classes are solved in blocks of this size


@dataclass
class LinearSVM(Classifier):
    """One class against the rest with the squared hinge loss: the objective of scikit-learn's LinearSVC.

    Per class it minimises ½(‖w‖² + b²) + C Σ max(0, 1 − y (w·x + b))², so the intercept is regularised too.
    """

    C: PositiveFloat = 1.0  # the weight of the samples against the regulariser
    # Scores of unit features differ from the optimum's by at most √2 times this.
    tolerance: float = field(default=1e-4, metadata=INTERNAL)

    @property
    def description(self) -> str:
        return f"linear SVM (C {self.C:g})"

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self._check_positive(C=self.C, tolerance=self.tolerance)
        classes, members = indexed(labels)
        samples = pad(widest(features), (0, 1), value=1.0)  # (n, d + 1): the intercept is the weight of a constant
        coarse = samples.float()  # enough for a direction or to find the violators, and twice as fast
        gram = samples.T @ samples  # (d + 1, d + 1)
        sums = 2 * class_sums(samples, members) - samples.sum(dim=0)  # (K, d + 1): Σ y x
        # At zero every sample violates its margin, so Newton's first step leads to ridge regression on all samples.
        ridge = solved(regularised_factor(gram, 1 / (2 * self.C)), sums)  # (K, d + 1)
        # Sums over n samples are no more exact than this, which matters only in float32.
        tolerance = max(self.tolerance, torch.finfo(samples.dtype).eps * 2 * self.C * len(samples))
        solutions = []
        for block in torch.arange(len(classes), device=classes.device).split(max(1, BLOCK // len(samples))):
            signs = torch.where(block[:, None] == members, 1.0, -1.0)  # (k, n)
            begin = squared_hinge.starting_point(ridge[block], samples, signs, self.C)
            solutions.append(squared_hinge.minimise(samples, coarse, gram, signs, begin, self.C, tolerance))
        weight = torch.cat(solutions)  # (K, d + 1)
        return {"classes": classes, "weight": weight[:, :-1], "intercept": weight[:, -1]}

    def scores(self, features: Tensor) -> Tensor:
        """w·x + b for every class: (n, K)."""
        return self._affine(features)
