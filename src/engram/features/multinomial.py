"""The solver of softmax regression: L-BFGS in preconditioned coordinates.

`samples` (n, d + 1) end in a constant, whose weight is the intercept, and `weight` is (K, d + 1).
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from engram.errors import EngramWarning
from engram.features.least_squares import regularised_factor

BLOCK = 2**22  # most numbers in a matrix of samples by classes
HISTORY = 20  # past steps from which L-BFGS approximates the Hessian
STEPS = 1000  # about a hundred suffice
NEARLY = 10  # warn only if the gradient exceeds so many times the tolerance
COARSE = 1e-5  # smallest tolerance for which products in float32 suffice, which take half the time
FLAT = 1e-9  # added to the Hessian's diagonal, relative to its mean, for directions in which there are no samples


def minimise(
    samples: Tensor, members: Tensor, shares: Tensor, classes: int, penalty: float, tolerance: float
) -> Tensor:
    """Return the weight (K, d + 1) that minimises Σ −s log p(y | x) + penalty / 2 ‖w‖², with free intercepts.

    `members` (n,) are the classes of the samples, and `shares` (n,) are their weights s, which sum to 1. L-BFGS stops
    when no component of the gradient exceeds `tolerance`, in coordinates where the Hessian is about 1.
    """
    import scipy.optimize  # imported here so that commands that fit nothing start sooner

    penalties = torch.full((samples.shape[1],), penalty).to(samples)
    penalties[-1] = 0
    # The Hessian of each class when all classes are equally likely, as preconditioner. Unit features have a large
    # common mean and few strong directions: without preconditioning, L-BFGS takes five times as many steps.
    hessian = samples.T @ (samples * shares[:, None]) / classes + penalties.diag()  # (d + 1, d + 1)
    factor = regularised_factor(hessian, float(FLAT * hessian.diagonal().mean()))

    rows = samples.float() if tolerance >= COARSE else samples

    def evaluate(coordinates: np.ndarray) -> tuple[float, np.ndarray]:
        weight = _weight(coordinates, factor)
        loss, gradient = _loss(rows, members, shares, weight)
        loss += float((penalties * weight.square()).sum()) / 2
        steep = torch.linalg.solve_triangular(factor, (gradient + penalties * weight).T, upper=False).T  # (K, d + 1)
        return loss, steep.cpu().double().flatten().numpy()

    options = {"maxiter": STEPS, "maxfun": 2 * STEPS, "maxcor": HISTORY, "gtol": tolerance, "ftol": 0.0}
    found = scipy.optimize.minimize(
        evaluate, np.zeros(classes * len(factor)), jac=True, method="L-BFGS-B", options=options
    )
    if np.abs(found.jac).max() > NEARLY * tolerance:  # a line search may also stop early, at the limit of rounding
        what = f"Softmax regression did not converge in {found.nit} steps ({found.message})"
        warnings.warn(f"{what}. Lower C.", EngramWarning, stacklevel=2)
    return _weight(found.x, factor)


def _weight(coordinates: np.ndarray, factor: Tensor) -> Tensor:
    """Convert preconditioned coordinates to a weight (K, d + 1), in the factor's precision and on its device."""
    numbers = torch.from_numpy(coordinates).to(factor.dtype).to(factor.device).view(-1, len(factor))
    weight: Tensor = torch.linalg.solve_triangular(factor, numbers, upper=False, left=False)
    return weight


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
