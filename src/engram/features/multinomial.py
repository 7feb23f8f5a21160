"""The solver of softmax regression: L-BFGS, in coordinates in which all directions are about as steep.

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
HISTORY = 20  # steps that L-BFGS goes by
STEPS = 1000  # about a hundred suffice
NEARLY = 10  # times the tolerance is where nothing is said
COARSE = 1e-5  # a tolerance that products in float32, which take half of the time, are good enough for
FLAT = 1e-9  # what is added to directions in which no sample lies, beside the mean one


def minimise(
    samples: Tensor, members: Tensor, shares: Tensor, classes: int, penalty: float, tolerance: float
) -> Tensor:
    """The weight (K, d + 1) that makes Σ −s log p(y | x) + penalty / 2 ‖w‖² small, the intercepts free.

    `members` (n,) are the classes of the samples and `shares` (n,), which sum to 1, are s. It is solved when no number
    of the gradient is above `tolerance`, in coordinates where the Hessian is about 1.
    """
    import scipy.optimize  # when it is needed: commands that learn nothing start sooner

    penalties = torch.full((samples.shape[1],), penalty).to(samples)
    penalties[-1] = 0
    # The Hessian of each class where all are as likely as each other. Unit features have one mean and few directions:
    # without it, there are five times as many steps.
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
    if np.abs(found.jac).max() > NEARLY * tolerance:  # a line search may also end early, within rounding of the end
        what = f"Softmax regression was not solved to the end in {found.nit} steps ({found.message})"
        warnings.warn(f"{what}. Lower C.", EngramWarning, stacklevel=2)
    return _weight(found.x, factor)


def _weight(coordinates: np.ndarray, factor: Tensor) -> Tensor:
    """The weight (K, d + 1) at these coordinates, with the factor's precision and on its device."""
    numbers = torch.from_numpy(coordinates).to(factor.dtype).to(factor.device).view(-1, len(factor))
    weight: Tensor = torch.linalg.solve_triangular(factor, numbers, upper=False, left=False)
    return weight


def _loss(samples: Tensor, members: Tensor, shares: Tensor, weight: Tensor) -> tuple[float, Tensor]:
    """Σ −s log p(y | x), and its gradient (K, d + 1): products as fine as the samples are, sums as the weight is."""
    total, gradient = 0.0, torch.zeros_like(weight)
    coarse = weight.to(samples)
    for some in torch.arange(len(samples), device=samples.device).split(max(1, BLOCK // len(weight))):
        logs = (samples[some] @ coarse.T).log_softmax(dim=1)  # (r, K)
        own = members[some][:, None]
        total -= float((logs.gather(1, own)[:, 0].to(shares) * shares[some]).sum())
        wrong = logs.exp_().scatter_add_(1, own, -torch.ones_like(own).to(logs)) * shares[some][:, None].to(logs)
        gradient += wrong.T @ samples[some]
    return total, gradient
