"""Each measure against its definition, by hand."""

import pytest
import torch

from engram.experiments.measuring import (
    adaptation_quality,
    average_incremental_accuracy,
    forgetting,
    origin_of,
    top_k_accuracy,
)


def test_top_k_accuracy_counts_rows_whose_class_is_among_the_best() -> None:
    scores = torch.tensor([[0.1, 0.5, 0.4], [0.9, 0.0, 0.1], [0.2, 0.3, 0.5]])
    class_indices = torch.tensor([2, 0, 0])
    assert top_k_accuracy(scores, class_indices) == pytest.approx(1 / 3)
    assert top_k_accuracy(scores, class_indices, 2) == pytest.approx(2 / 3)
    assert top_k_accuracy(scores, class_indices, 5) == 1.0  # with three classes the best five are all of them


def test_average_incremental_accuracy_is_the_mean_of_the_curve_first_task_included() -> None:
    assert average_incremental_accuracy([0.9, 0.6, 0.3]) == pytest.approx(0.6)


def test_forgetting_is_the_loss_since_the_best_over_earlier_tasks() -> None:
    matrix = [[0.9], [0.95, 0.8], [0.7, 0.5, 0.6]]
    assert forgetting(matrix) == pytest.approx(((0.95 - 0.7) + (0.8 - 0.5)) / 2)
    assert forgetting([[0.9]]) == 0.0


def test_adaptation_quality_is_the_mean_dot_product_of_the_chosen_rows() -> None:
    stored = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    true = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6]])
    assert adaptation_quality(stored, true, torch.tensor([True, True, False])) == pytest.approx(0.5)
    assert adaptation_quality(stored, true, torch.tensor([False, False, True])) == pytest.approx(0.96)
    assert adaptation_quality(stored, true, torch.zeros(3, dtype=torch.bool)) is None


def test_origins_follow_rows_through_trims_and_moves() -> None:
    first = origin_of(torch.tensor([4, 2, 7]), 0, torch.empty(0, 2, dtype=torch.int64))
    assert first.tolist() == [[0, 4], [0, 2], [0, 7]]
    second = origin_of(torch.tensor([-1, 5, -3, 0]), 1, first)  # row 1 was dropped, rows 0 and 2 kept, two new
    assert second.tolist() == [[0, 4], [1, 5], [0, 7], [1, 0]]
