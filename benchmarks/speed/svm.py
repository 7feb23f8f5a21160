"""The linear SVM against LinearSVC on the same objective; and its refit with a class more against one from scratch."""

from __future__ import annotations

import statistics
import time

import torch
from side_by_side import Outcome, in_turns, milliseconds, ratio, show
from sklearn.svm import LinearSVC
from torch import Tensor
from torch.nn import functional as F

from engram.features import LinearSVM

SAMPLES, DIMENSION, CLASSES = 25_000, 512, 100


def main() -> None:
    features, labels = clustered(SAMPLES, DIMENSION, CLASSES)
    taken = []
    for _ in range(4):  # the first does not count
        start = time.perf_counter()
        ours = LinearSVM().fit(features, labels)
        taken.append(time.perf_counter() - start)
    start = time.perf_counter()
    theirs = LinearSVC().fit(
        features.double().numpy(), labels.numpy()
    )  # float64, in which it works: nothing to convert
    their_time = time.perf_counter() - start
    found = objective(features, labels, ours.weight_, ours.intercept_)
    other = objective(features, labels, torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_))
    apart = (found / other - 1).item()
    if apart > 1e-4:
        raise SystemExit(f"Our objective is worse than LinearSVC's by {apart:.1e} of it: no comparison.")
    old = labels < CLASSES - 1
    earlier = LinearSVM().fit(features[old], labels[old])
    refitted, anew = in_turns(
        lambda: LinearSVM().fit(features, labels, start=earlier), lambda: LinearSVM().fit(features, labels), rounds=2
    )
    show(
        Outcome(
            f"linear SVM, {SAMPLES:,} × {DIMENSION}, {CLASSES} classes",
            "scikit-learn's LinearSVC",
            their_time / statistics.median(taken[1:]),
            10,
            detail=f"Our objective relative to its: {apart:+.1e}. LinearSVC was run once, {their_time:.0f} s.",
        ),
        Outcome(
            f"the same with one more class, from the solution for {CLASSES - 1}",
            "a fit from scratch",
            ratio(anew, refitted),
            2,
            detail=f"{milliseconds(refitted)} against {milliseconds(anew)}; both end below the same gradient.",
        ),
    )


def clustered(samples: int, dimension: int, classes: int) -> tuple[Tensor, Tensor]:
    """Unit vectors with no negative number, as a network's last ReLU gives them; classes overlap."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % classes
    basis = torch.randn(dimension // 8, dimension, generator=random)  # features are never spread over all dimensions
    centres = torch.randn(classes, dimension // 8, generator=random)
    points = centres[labels] + 1.5 * torch.randn(samples, dimension // 8, generator=random)
    features = points @ basis + 4 * torch.randn(samples, dimension, generator=random)
    return F.normalize(features.clamp(min=0)), labels


def objective(features: Tensor, labels: Tensor, weight: Tensor, intercept: Tensor) -> Tensor:
    """½(‖w‖² + b²) + Σ max(0, 1 − y (w·x + b))², summed over the classes."""
    weight, intercept = weight.double(), intercept.double()
    signs = 2.0 * F.one_hot(labels) - 1
    shortfall = (1 - signs * (features.double() @ weight.T + intercept)).clamp(min=0)
    return (weight.square().sum() + intercept.square().sum()) / 2 + shortfall.square().sum()


if __name__ == "__main__":
    main()
