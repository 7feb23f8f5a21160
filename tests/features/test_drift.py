"""Drift compensation: each method against its formula, written as a plain loop or worked by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as SklearnRidge
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


def test_ldc_converges_to_least_squares_without_intercept() -> None:
    statistics, old = of_two_classes("none"), unit(300, 4, seed=2)
    new = normalize(old @ torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) + 0.3)
    moved = compensation("ldc", ldc_epochs=300, ldc_learning_rate=0.01)(statistics, Drift(old, new))
    expected = statistics.means.numpy() @ np.linalg.lstsq(old.numpy(), new.numpy())[0]
    assert np.allclose(moved.means, expected, atol=0.01)
    assert not np.allclose(statistics.means, expected, atol=0.1)


def test_the_ridge_map_is_scikit_learns_on_the_change_of_features() -> None:
    statistics, old, new = of_two_classes("none"), unit(30, 4, seed=2), unit(30, 4, seed=3)
    moved = compensation("ridge", drift_penalty=0.5)(statistics, Drift(old, new))
    alpha = 0.5 * 30 * old.numpy().var(0).mean()
    oracle = SklearnRidge(alpha=alpha).fit(old.numpy(), (new - old).numpy())
    assert np.allclose(moved.means, statistics.means.numpy() + oracle.predict(statistics.means.numpy()), atol=1e-5)


def test_dpcr_maps_and_then_projects_on_the_span_of_the_classes_old_features() -> None:
    rows = [unit(2, 5, seed=1), unit(3, 5, seed=2)]  # fewer than dimensions
    labels = torch.tensor([0, 0, 1, 1, 1])
    old, new = unit(40, 5, seed=3), unit(40, 5, seed=4)
    moved = compensation("dpcr", drift_penalty=0.1)(Statistics.of(torch.cat(rows), labels, 2, "class"), Drift(old, new))
    gram = old.T @ old
    linear = torch.linalg.inv(gram + 0.1 * gram.trace() / 5 * torch.eye(5)) @ old.T @ new
    for class_index, own in enumerate(rows):
        span = torch.linalg.svd(own, full_matrices=False).Vh  # an orthonormal basis, in rows
        expected = own @ linear @ span.T @ span
        assert torch.allclose(moved.means[class_index], expected.mean(0), atol=1e-4)
        covariance = torch.cov(expected.T, correction=0).double()
        assert torch.allclose(moved.covariances[class_index], covariance, atol=1e-4)
        assert not torch.allclose(expected, own @ linear, atol=0.1)


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
