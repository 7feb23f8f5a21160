"""`Accuracy`: its interval is that of Agresti and Coull, and covers the truth as often as it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binom, norm

from engram.model.accuracy import Accuracy, interval


@pytest.mark.parametrize("right, total", [(0, 1), (1, 1), (0, 20), (20, 20), (5, 6), (89, 240), (49_873, 50_000)])
def test_the_interval_is_walds_with_two_more_right_and_two_more_wrong_answers(right: int, total: int) -> None:
    z = norm.ppf(0.975)
    n, k = total + z**2, right + z**2 / 2
    low, high = k / n - z * np.sqrt(k / n * (1 - k / n) / n), k / n + z * np.sqrt(k / n * (1 - k / n) / n)
    assert interval(right, total) == pytest.approx((max(low, 0), min(high, 1)), abs=1e-6)
    accuracy = Accuracy(right, total)
    assert (accuracy.low, accuracy.high) == interval(right, total)
    assert accuracy.low <= accuracy.value <= accuracy.high


@pytest.mark.parametrize("total", [20, 60, 180, 600])
def test_the_interval_covers_the_truth_as_often_as_it_says(total: int) -> None:
    low, high = np.array([interval(right, total) for right in range(total + 1)]).T
    truths = np.linspace(0.5, 0.999, 200)
    coverage = [binom.pmf(np.arange(total + 1), total, p)[(low <= p) & (p <= high)].sum() for p in truths]
    assert np.mean(coverage) >= 0.95
    assert min(coverage) >= 0.925


def test_it_reads_as_text_and_as_json() -> None:
    assert str(Accuracy(566, 600)) == "0.943 (0.922 to 0.959, 600 photos)"
    assert str(Accuracy(0, 1)).endswith("1 photo)")
    assert str(Accuracy(1_000, 2_000)).endswith("2,000 photos)")
    low, high = interval(3, 4)
    expected = {"value": 0.75, "correct": 3, "total": 4, "low": low, "high": high}
    assert json.loads(json.dumps(Accuracy(3, 4).to_json())) == expected
