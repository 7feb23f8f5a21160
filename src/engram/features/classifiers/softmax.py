"""Softmax regression."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import pad

from engram.features import multinomial
from engram.features.classifiers.base import Classifier, indexed, widest
from engram.settings import INTERNAL


@dataclass
class Softmax(Classifier):
    """Softmax regression with balanced classes.

    It minimises Σ −log p(y | x) + ‖w‖² / 2C over all classes, the intercepts free: scikit-learn's
    LogisticRegression(class_weight="balanced"). Less sensitive than an SVM to noisy vectors near the margin, such as
    adapted or compressed ones.
    """

    C: PositiveFloat = 1.0  # the weight of the samples against the regulariser
    # Of the gradient, in coordinates where the Hessian is about 1.
    tolerance: float = field(default=1e-4, metadata=INTERNAL)

    @property
    def description(self) -> str:
        return f"softmax regression (C {self.C:g})"

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self._check_positive(C=self.C, tolerance=self.tolerance)
        classes, members = indexed(labels)
        samples = pad(widest(features), (0, 1), value=1.0)  # (n, d + 1): the intercept is the weight of a constant
        counts = torch.bincount(members).to(samples)  # (K,)
        shares = 1 / (len(classes) * counts)[members]  # (n,)
        penalty = 1 / (self.C * len(samples))
        weight = multinomial.minimise(samples, members, shares, len(classes), penalty, self.tolerance)
        return {"classes": classes, "weight": weight[:, :-1], "intercept": weight[:, -1]}

    def scores(self, features: Tensor) -> Tensor:
        """The log-probability of every class, up to a term that all classes share: (n, K)."""
        return self._affine(features)
