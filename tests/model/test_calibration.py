"""Temperature scaling and the expected calibration error."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import functional as F

from engram.model import Calibration
from engram.model.held_out import MIN_CALIBRATION, calibrate, calibration_error, fit_temperature


def drawn(temperature: float, n: int = 4000, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores, and classes drawn with the probabilities that the scores have at this temperature."""
    draws = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(n, classes, generator=draws)
    return scores, torch.multinomial(torch.softmax(scores / temperature, 1), 1, generator=draws).squeeze(1)


def test_calibration_error_matches_the_definition() -> None:
    scores, class_indices = drawn(2.0, n=300)
    probabilities = torch.softmax(scores, 1)
    confidence, answers = probabilities.max(1)
    expected = 0.0
    for number in range(15):
        inside = (confidence >= number / 15) & (confidence < (number + 1) / 15)
        if inside.any():
            accuracy = (answers == class_indices)[inside].double().mean()
            expected += float(abs(accuracy - confidence[inside].double().mean())) * int(inside.sum()) / 300
    assert calibration_error(probabilities, class_indices) == pytest.approx(expected, abs=1e-6)


def test_certain_and_correct_is_calibrated_certain_and_wrong_is_not() -> None:
    certain = torch.eye(3)
    assert calibration_error(certain, torch.arange(3)) == 0
    assert calibration_error(certain, torch.tensor([1, 2, 0])) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_fitted_temperature_is_the_one_labels_were_drawn_with(temperature: float) -> None:
    scores, class_indices = drawn(temperature)
    assert fit_temperature(scores, class_indices) == pytest.approx(temperature, rel=0.08)


def test_fitted_temperature_maximises_the_likelihood() -> None:
    scores, class_indices = drawn(2.5, n=500)
    scores = scores.double()
    targets = torch.full_like(scores, 1 / (502 * 4))
    targets[torch.arange(500), class_indices] = 501 / 502

    def surprise(logarithm: float) -> float:
        return -float((targets * F.log_softmax(scores / 2.718281828459045**logarithm, 1)).sum())

    best = minimize_scalar(surprise, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    assert fit_temperature(scores, class_indices) == pytest.approx(2.718281828459045**best.x, rel=1e-4)


def test_temperature_of_a_model_without_errors_stays_bounded() -> None:
    scores = 0.1 * torch.eye(4)[torch.arange(40) % 4]
    temperature = fit_temperature(scores, torch.arange(40) % 4)
    probability = float(torch.softmax(scores[0] / temperature, 0).max())
    assert 0.9 < probability < 0.99


def test_calibration_lowers_the_error_on_held_out_samples() -> None:
    scores, class_indices = drawn(5.0, n=400)
    found = calibrate(scores, class_indices, Calibration())
    assert found.images == 400 and found.error_after is not None and found.error_before is not None
    assert found.error_after < 0.5 * found.error_before
    others, theirs = drawn(5.0, n=4000, seed=1)
    assert calibration_error(torch.softmax(others / found.temperature, 1), theirs) < 0.05


def test_too_few_images_leave_the_temperature_unchanged() -> None:
    scores, class_indices = drawn(5.0, n=MIN_CALIBRATION - 1)
    assert calibrate(scores, class_indices, Calibration(temperature=0.5)) == Calibration(temperature=0.5)


def test_a_single_class_needs_no_temperature() -> None:
    assert fit_temperature(torch.randn(30, 1), torch.zeros(30, dtype=torch.int64)) == 1.0


def test_temperature_from_thirty_images_generalises() -> None:
    for seed in range(20):
        scores, class_indices = drawn(1.0, n=30, seed=seed)
        found = calibrate(scores, class_indices, Calibration())
        others, theirs = drawn(1.0, n=4000, seed=seed + 100)
        assert found.images == 30
        assert F.cross_entropy(others / found.temperature, theirs) < F.cross_entropy(others, theirs) + 0.1


def test_perfect_scores_of_any_scale_do_not_give_certainty() -> None:
    class_indices = torch.arange(40) % 4
    for scale in (1.0, 3000.0):  # of softmax regression, and of LDA on unit vectors
        scores = scale * torch.eye(4)[class_indices]
        found = calibrate(scores, class_indices, Calibration())
        assert torch.softmax(scores / found.temperature, dim=1).max() < 0.99
