"""Probabilities one can rely on: how sure a model is, against how often it is right (Guo et al., 2017)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram.model.model import Calibration

BINS = 15
# Held-out images below which a temperature would say more about chance than about the model. With ten (two classes of
# five photos each) the expected calibration error falls from .29 to .10, the mean of 60 draws from twelve classes.
FEWEST = 10
HOTTEST, COLDEST = 1e5, 1e-3  # the scores of LDA on unit vectors are in the thousands
HALVINGS = 50


def calibration_error(probabilities: Tensor, class_indices: Tensor, bins: int = BINS) -> float:
    """The expected calibration error: |accuracy − confidence|, averaged over bins of confidence by their samples."""
    confidence, answers = probabilities.double().max(dim=1)
    right = (answers == class_indices).double()
    which = (confidence * bins).long().clamp(max=bins - 1)  # (n,)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, which, right - confidence)
    return float(gaps.abs().sum() / len(class_indices))


def fit_temperature(scores: Tensor, class_indices: Tensor) -> float:
    """The temperature at which scores (n, K) give their classes `class_indices` (n,) the highest likelihood.

    As Platt does, each is believed a little less than it says: one sample more may always be the first mistake.
    """
    scores = scores.double()
    n, classes = scores.shape
    if classes == 1:
        return 1.0
    targets = torch.full_like(scores, 1 / ((n + 2) * (classes - 1)))
    targets[torch.arange(n), class_indices] = (n + 1) / (n + 2)

    def slope(logarithm: float) -> float:
        """Of the likelihood along 1 / T, in which it is concave."""
        probabilities = torch.softmax(scores / math.exp(logarithm), dim=1)
        return float(((targets - probabilities) * scores).sum())

    low, high = math.log(COLDEST), math.log(HOTTEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return math.exp((low + high) / 2)


def calibrate(scores: Tensor, class_indices: Tensor, before: Calibration) -> Calibration:
    """A temperature from held-out scores (n, K); from a few, the one before.

    It is always the one of these scores: classifiers differ in scale, and where every answer is right any temperature
    that is low enough would look perfect. Its error is measured on halves, each with the temperature of the other.
    """
    n = len(class_indices)
    if n < FEWEST:
        return Calibration(temperature=before.temperature)
    halves = torch.arange(n) % 2 == 0
    probabilities = torch.empty_like(scores, dtype=torch.float64)
    for part in (halves, ~halves):
        temperature = fit_temperature(scores[~part], class_indices[~part])
        probabilities[part] = torch.softmax(scores[part].double() / temperature, dim=1)
    return Calibration(
        temperature=fit_temperature(scores, class_indices),
        images=n,
        error_before=calibration_error(torch.softmax(scores.double() / before.temperature, dim=1), class_indices),
        error_after=calibration_error(probabilities, class_indices),
    )
