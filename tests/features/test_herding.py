"""Herding against its greedy definition, evaluated literally and, where ties matter, in exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engram.errors import DataError, TrainingError, UsageError
from engram.features.memory import herd


def literal(points: np.ndarray, keep: int) -> list[int]:
    """The definition as it is written, in float64."""
    points = points.astype(np.float64)
    mean, total, picks = points.mean(axis=0), np.zeros(points.shape[1]), []
    for k in range(1, min(keep, len(points)) + 1):
        distances = np.linalg.norm(mean - (total + points) / k, axis=1)
        distances[picks] = np.inf
        picks.append(int(distances.argmin()))
        total = total + points[picks[-1]]
    return picks


def exact(points: np.ndarray, keep: int) -> list[int]:
    """The definition in rational numbers, where a tie is a tie."""
    rows = [[Fraction(int(value)) for value in row] for row in points]
    mean = [sum(class_index) / len(rows) for class_index in zip(*rows, strict=True)]
    total, picks = [Fraction(0)] * len(mean), []
    for k in range(1, min(keep, len(rows)) + 1):
        distances = {
            index: sum((m - (t + x) / k) ** 2 for m, t, x in zip(mean, total, row, strict=True))
            for index, row in enumerate(rows)
            if index not in picks
        }
        picks.append(min(distances, key=distances.__getitem__))  # the lowest index of a tie comes first
        total = [t + x for t, x in zip(total, rows[picks[-1]], strict=True)]
    return picks


def unit_vectors(count: int, width: int, seed: int) -> np.ndarray:
    points = np.abs(np.random.default_rng(seed).normal(size=(count, width)))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pytest.fixture(params=["gram", "no gram"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no gram":
        monkeypatch.setattr("engram.features.memory.LARGEST_GRAM", 0)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("count", "width", "keep"), [(500, 64, 20), (300, 512, 250), (40, 3, 40), (1000, 16, 10)])
def test_herding_matches_the_greedy_definition(count: int, width: int, keep: int, dtype: type) -> None:
    points = unit_vectors(count, width, seed=count).astype(dtype)
    picks = herd(torch.from_numpy(points), keep)
    assert picks.dtype == torch.int64
    assert picks.tolist() == literal(points, keep)


whole_numbers = arrays.arrays(np.int64, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=st.integers(-3, 3))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(whole_numbers, st.integers(0, 14))
def test_ties_go_to_the_lowest_index_as_in_exact_arithmetic(points: np.ndarray, keep: int) -> None:
    assert herd(torch.from_numpy(points), keep).tolist() == exact(points, keep)


@pytest.mark.usefixtures("_both_ways")
def test_identical_vectors_are_picked_in_the_order_they_come() -> None:
    points = torch.from_numpy(unit_vectors(60, 512, seed=0))
    copies = points.repeat(7, 1)  # (420, 512): the copies of one vector lie 60 rows apart
    picks = herd(copies, 420).tolist()
    for original in range(60):
        found = [pick for pick in picks if pick % 60 == original]
        assert found == sorted(found)
    assert herd(torch.ones(9, 5) / 3, 9).tolist() == list(range(9))


def test_a_far_outlier_does_not_hide_the_differences_between_the_others() -> None:
    points = unit_vectors(100, 8, seed=1)
    points[50], points[51] = 1e5, -1e5
    assert herd(torch.from_numpy(points), 100).tolist() == literal(points, 100)


def test_a_larger_number_than_there_are_vectors_gives_all_in_herding_order() -> None:
    points = unit_vectors(7, 4, seed=2)
    picks = herd(torch.from_numpy(points), 50).tolist()
    assert picks == literal(points, 7)
    assert sorted(picks) == list(range(7))


def test_the_first_picks_do_not_depend_on_how_many_follow() -> None:
    points = torch.from_numpy(unit_vectors(200, 16, seed=3))
    assert herd(points, 5).tolist() == herd(points, 100).tolist()[:5]


def test_one_vector_or_none() -> None:
    assert herd(torch.ones(1, 3), 1).tolist() == [0]
    for picks in (herd(torch.ones(4, 3), 0), herd(torch.empty(0, 3), 5)):
        assert picks.shape == (0,)
        assert picks.dtype == torch.int64


def test_herding_does_not_change_the_vectors() -> None:
    points = torch.from_numpy(unit_vectors(20, 4, seed=4))
    before = points.clone()
    herd(points.requires_grad_(), 5)
    assert torch.equal(points, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_vectors_that_are_not_finite_are_refused(bad: float) -> None:
    points = torch.ones(4, 3, dtype=torch.float64)
    points[2, 1] = bad
    with pytest.raises(TrainingError, match="NaN"):
        herd(points, 2)


def test_wrong_shapes_and_negative_counts_are_refused() -> None:
    with pytest.raises(DataError, match=r"\(n, d\).*\(4,\)"):
        herd(torch.ones(4), 2)
    with pytest.raises(UsageError, match="-1"):
        herd(torch.ones(4, 2), -1)
