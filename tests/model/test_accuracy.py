"""`Accuracy`: its interval is that of Clopper and Pearson, as in scipy.stats."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from scipy.stats import binomtest

from engram.model.accuracy import Accuracy, interval


@pytest.mark.parametrize(
    ("right", "total"), [(0, 1), (1, 1), (0, 20), (20, 20), (1, 7), (5, 6), (89, 240), (566, 600), (49_873, 50_000)]
)
def test_the_interval_is_the_exact_one(right: int, total: int) -> None:
    expected = binomtest(right, total).proportion_ci(confidence_level=0.95, method="exact")
    assert interval(right, total) == pytest.approx((expected.low, expected.high), abs=1e-9)
    accuracy = Accuracy(right, total)
    assert (accuracy.low, accuracy.high) == interval(right, total)
    assert accuracy.low <= accuracy.value <= accuracy.high


def test_it_reads_as_text_and_as_json() -> None:
    assert str(Accuracy(566, 600)) == "0.943 (0.922 to 0.960, 600 photos)"
    assert str(Accuracy(0, 1)) == "0.000 (0.000 to 0.975, 1 photo)"
    assert str(Accuracy(1_000, 2_000)).endswith("2,000 photos)")
    low, high = interval(3, 4)
    expected = {"value": 0.75, "right": 3, "total": 4, "low": low, "high": high}
    assert json.loads(json.dumps(Accuracy(3, 4).to_json())) == expected


def test_scipy_is_imported_only_for_an_interval() -> None:
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('engram')\n"
        "path = spec.submodule_search_locations[0] + '/model/accuracy.py'\n"
        "module = importlib.util.spec_from_file_location('accuracy', path)\n"
        "loaded = importlib.util.module_from_spec(module)\n"
        "sys.modules['accuracy'] = loaded\n"
        "module.loader.exec_module(loaded)\n"
        "assert 'scipy' not in sys.modules\n"
        "loaded.interval(1, 2)\n"
        "assert 'scipy.special' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
