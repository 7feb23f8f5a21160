"""Drift compensation: each method against its formula, written as a plain loop or worked by hand."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from engram.features import COMPENSATIONS, Compensation, Drift, Statistics


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def compensation(name: str, **settings: float) -> Compensation:
    return COMPENSATIONS[name](**settings)


def of_two_classes(covariance: str = "class") -> Statistics:
    return Statistics.of(unit(40, 4, seed=1), torch.arange(40) % 2, 2, covariance)  # type: ignore[arg-type]


def test_sdc_is_the_weighted_mean_of_the_shifts_around_a_mean() -> None:
    statistics, old, new = of_two_classes(), unit(30, 4, seed=2), unit(30, 4, seed=3)
    moved = compensation("sdc", sdc_sigma=0.4)(statistics, Drift(old, new))
    for mean, after in zip(statistics.means, moved.means, strict=True):
        weights = [math.exp(-float((z - mean).square().sum()) / (2 * 0.4**2)) for z in old]
        shift = sum(weight * (b - a) for weight, a, b in zip(weights, old, new, strict=True)) / sum(weights)
        assert torch.allclose(after, mean + shift, atol=1e-5)
    assert torch.equal(moved.triangles, statistics.triangles)


def test_far_from_everything_sdc_follows_the_nearest_feature() -> None:
    old, new = torch.eye(2), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    statistics = Statistics(torch.tensor([9]), torch.tensor([[90.0, 0.0]]), torch.empty(0, 3))
    assert compensation("sdc")(statistics, Drift(old, new)).means.tolist() == [[89.0, 1.0]]


@pytest.mark.parametrize("name", ["ldc", "ridge", "dpcr"])
def test_a_rotation_is_undone(name: str) -> None:
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(4)))[0]
    old = unit(2000, 4, seed=5)
    statistics = of_two_classes()
    penalty = {"drift_penalty": 1e-9} if name != "ldc" else {"ldc_epochs": 60, "ldc_learning_rate": 0.01}
    moved = compensation(name, **penalty)(statistics, Drift(old, old @ rotation))
    assert torch.allclose(moved.means, statistics.means @ rotation, atol=0.02)
    expected = rotation.double().T @ statistics.covariances @ rotation.double()
    assert torch.allclose(moved.covariances, expected, atol=0.02)


def test_dpcr_drops_directions_in_which_a_class_does_not_vary() -> None:
    rows = normalize(torch.tensor([[1.0, 0.2, 0.0], [1.0, -0.2, 0.0], [1.0, 0.1, 0.0]]))
    statistics = Statistics.of(rows, torch.zeros(3, dtype=torch.int64), 1, "class")
    old = unit(500, 3, seed=6)
    swap = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    moved = compensation("dpcr", drift_penalty=1e-9)(statistics, Drift(old, old @ swap))
    assert torch.allclose(moved.means, statistics.means @ swap, atol=1e-4)  # the mean is within its class's span
    assert abs(float(moved.covariances[0, 1, 1])) < 1e-6  # where the third direction went, there is nothing


def test_adc_moves_a_mean_by_the_drift_of_images_that_reached_it() -> None:
    old = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    statistics = Statistics(torch.tensor([5, 5]), torch.tensor([[1.0, 0.1], [0.1, 1.0]]), torch.empty(0, 3))
    asked = []

    def perturb(mean: torch.Tensor, positions: torch.Tensor, steps: int, size: float) -> tuple[torch.Tensor, ...]:
        asked.append((mean.tolist(), positions.tolist(), steps, size))
        reached, astray = mean, 1.1 - mean  # the second image ends near the other class
        return torch.stack([reached, astray]), torch.stack([reached + 0.5, astray - 7.0])

    drift = Drift(old, old, perturb)  # type: ignore[arg-type]
    moved = compensation("adc", adc_images=2, adc_steps=4, adc_step_size=2.0)(statistics, drift)
    assert torch.allclose(moved.means, statistics.means + 0.5)
    assert [each[1:] for each in asked] == [([0, 1], 4, 2.0), ([1, 0], 4, 2.0)]
