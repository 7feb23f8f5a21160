"""`Accuracy`: the Agresti-Coull interval and its coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, norm

from engram.model.held_out import Accuracy


@pytest.mark.parametrize("right, total", [(0, 1), (1, 1), (0, 20), (20, 20), (5, 6), (89, 240), (49_873, 50_000)])
def test_interval_equals_wald_with_two_added_successes_and_failures(right: int, total: int) -> None:
    z = norm.ppf(0.975)
    n, k = total + z**2, right + z**2 / 2
    low, high = k / n - z * np.sqrt(k / n * (1 - k / n) / n), k / n + z * np.sqrt(k / n * (1 - k / n) / n)
    assert Accuracy(right, total).interval == pytest.approx((max(low, 0), min(high, 1)), abs=1e-6)
    assert low <= Accuracy(right, total).value <= high


@pytest.mark.parametrize("total", [20, 60, 180, 600])
def test_interval_covers_the_true_accuracy_as_often_as_nominal(total: int) -> None:
    low, high = np.array([Accuracy(right, total).interval for right in range(total + 1)]).T
    truths = np.linspace(0.5, 0.999, 200)
    coverage = [binom.pmf(np.arange(total + 1), total, p)[(low <= p) & (p <= high)].sum() for p in truths]
    assert np.mean(coverage) >= 0.95
    assert min(coverage) >= 0.925


def test_accuracy_formats_as_text() -> None:
    assert str(Accuracy(566, 600)) == "0.943 (0.922 to 0.959, 600 photos)"
    assert str(Accuracy(0, 1)).endswith("1 photo)")
    assert str(Accuracy(1_000, 2_000)).endswith("2,000 photos)")
