"""Softmax regression, by L-BFGS in preconditioned coordinates."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import pad

from engram.errors import EngramWarning
from engram.features.classifiers.base import Classifier, regularised_factor, widest
from engram.settings import INTERNAL

BLOCK = 2**22  # most numbers in a matrix of samples by classes
HISTORY = 20  # past steps from which L-BFGS approximates the Hessian
STEPS = 1000  # about a hundred suffice
NEARLY = 10  # warn only if the gradient exceeds so many times the tolerance
COARSE = 1e-5  # smallest tolerance for which products in float32 suffice, which take half the time
FLAT = 1e-9  # added to the Hessian's diagonal, relative to its mean, for directions in which there are no samples


@dataclass
class Softmax(Classifier):
    """Softmax regression with balanced classes.

    It minimises Σ −log p(y | x) + ‖w‖² / 2C over all classes, the intercepts free: scikit-learn's
    LogisticRegression(class_weight="balanced"). Less sensitive than an SVM to noisy vectors near the margin, such as
    adapted or compressed ones.
    """

    label: ClassVar = "softmax regression (C {C:g})"

    C: PositiveFloat = 1.0  # the weight of the samples against the regulariser
    # Of the gradient, in coordinates where the Hessian is about 1.
    tolerance: PositiveFloat = field(default=1e-4, metadata=INTERNAL)

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        classes, members = labels.unique(return_inverse=True)
        samples = pad(widest(features), (0, 1), value=1.0)  # (n, d + 1): the intercept is the weight of a constant
        counts = torch.bincount(members).to(samples)  # (K,)
        shares = 1 / (len(classes) * counts)[members]  # (n,): the weights s of the samples, which sum to 1
        weight = _minimise(samples, members, shares, len(classes), 1 / (self.C * len(samples)), self.tolerance)
        return {"classes": classes, "weight": weight[:, :-1], "intercept": weight[:, -1]}


def _minimise(
    samples: Tensor, members: Tensor, shares: Tensor, classes: int, penalty: float, tolerance: float
) -> Tensor:
    """Return the weight (K, d + 1) that minimises Σ −s log p(y | x) + penalty / 2 ‖w‖², with free intercepts."""
    import scipy.optimize  # imported here so that commands that fit nothing start sooner

    penalties = torch.full((samples.shape[1],), penalty).to(samples)
    penalties[-1] = 0
    # The Hessian of each class when all classes are equally likely, as preconditioner. Unit features have a large
    # common mean and few strong directions: without preconditioning, L-BFGS takes five times as many steps.
    hessian = samples.T @ (samples * shares[:, None]) / classes + penalties.diag()  # (d + 1, d + 1)
    factor = regularised_factor(hessian, float(FLAT * hessian.diagonal().mean()))
    rows = samples.float() if tolerance >= COARSE else samples

    def weight_at(coordinates: np.ndarray) -> Tensor:
        numbers = torch.from_numpy(coordinates).to(factor.dtype).to(factor.device).view(-1, len(factor))
        weight: Tensor = torch.linalg.solve_triangular(factor, numbers, upper=False, left=False)
        return weight  # (K, d + 1)

    def evaluate(coordinates: np.ndarray) -> tuple[float, np.ndarray]:
        weight = weight_at(coordinates)
        loss, gradient = _loss(rows, members, shares, weight)
        loss += float((penalties * weight.square()).sum()) / 2
        steep = torch.linalg.solve_triangular(factor, (gradient + penalties * weight).T, upper=False).T  # (K, d + 1)
        return loss, steep.cpu().double().flatten().numpy()

    options = {"maxiter": STEPS, "maxfun": 2 * STEPS, "maxcor": HISTORY, "gtol": tolerance, "ftol": 0.0}
    start = np.zeros(classes * len(factor))
    found = scipy.optimize.minimize(evaluate, start, jac=True, method="L-BFGS-B", options=options)
    if np.abs(found.jac).max() > NEARLY * tolerance:  # a line search may also stop early, at the limit of rounding
        what = f"Softmax regression did not converge in {found.nit} steps ({found.message})"
        warnings.warn(f"{what}. Lower C.", EngramWarning, stacklevel=2)
    return weight_at(found.x)


def _loss(samples: Tensor, members: Tensor, shares: Tensor, weight: Tensor) -> tuple[float, Tensor]:
    """Σ −s log p(y | x) and its gradient (K, d + 1): products in the samples' precision, sums in the weight's."""
    total, gradient = 0.0, torch.zeros_like(weight)
    coarse = weight.to(samples)
    for some in torch.arange(len(samples), device=samples.device).split(max(1, BLOCK // len(weight))):
        logs = (samples[some] @ coarse.T).log_softmax(dim=1)  # (r, K)
        own = members[some][:, None]
        total -= float((logs.gather(1, own)[:, 0].to(shares) * shares[some]).sum())
        wrong = logs.exp_().scatter_add_(1, own, -torch.ones_like(own).to(logs)) * shares[some][:, None].to(logs)
        gradient += wrong.T @ samples[some]
    return total, gradient
