"""Heads score by their definition, and grow without touching the classes they have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from engram.data import Samples
from engram.errors import UsageError
from engram.network import HEADS, make_network, restore_network
from engram.network.network import CorrectedHead, CosineHead, Head, LinearHead, Network, make_head
from engram.randomness import seeded


def head_of(kind: str, classes: int, dimension: int = 6, seed: int = 0) -> Head:
    head = make_head(kind, dimension, scale=16.0)
    with seeded(seed, "head"):
        head.grow(classes)
    if isinstance(head, LinearHead):
        head.bias.data = torch.linspace(-1, 2, classes)  # as training would leave it
    return head


FEATURES = torch.rand(20, 6, generator=torch.Generator().manual_seed(0)) * 3


def test_cosine_scores_are_scaled_cosines() -> None:
    head = head_of("cosine", 4)
    assert isinstance(head, CosineHead)
    features, weight = FEATURES.double().numpy(), head.weight.detach().double().numpy() * 2.5
    head.weight.data *= 2.5  # lengths of rows do not count
    head.scale.data.fill_(3)
    lengths = np.linalg.norm(features, axis=1)[:, None] * np.linalg.norm(weight, axis=1)[None]
    np.testing.assert_allclose(head(FEATURES).detach(), 3 * features @ weight.T / lengths, atol=1e-5)


def test_linear_scores_are_dot_products_plus_a_bias() -> None:
    head = head_of("linear", 4)
    assert isinstance(head, LinearHead)
    head.bias.data = torch.tensor([1.0, -2.0, 0.5, 0.0])
    weight, bias = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()
    np.testing.assert_allclose(head(FEATURES).detach(), FEATURES.double().numpy() @ weight.T + bias, atol=1e-5)


def test_cosine_scores_do_not_depend_on_the_length_of_features_and_linear_ones_do() -> None:
    cosine, linear = head_of("cosine", 4), head_of("linear", 4)
    torch.testing.assert_close(cosine(FEATURES * 1000), cosine(FEATURES), rtol=1e-5, atol=1e-6)
    assert (linear(FEATURES * 1000) - linear(FEATURES)).abs().max() > 100


def test_a_new_cosine_head_lets_a_sigmoid_come_near_zero_and_one() -> None:
    head = head_of("cosine", 1)
    scores = head(torch.cat([head.weight, -head.weight]).detach())
    torch.testing.assert_close(scores.flatten(), torch.tensor([16.0, -16.0]))
    assert scores.sigmoid()[0] > 0.999
    assert scores.sigmoid()[1] < 0.001


@pytest.mark.parametrize("kind", HEADS)
def test_growing_leaves_the_rows_of_old_classes_as_they_were_bit_for_bit(kind: str) -> None:
    head = head_of(kind, 3)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    head.grow(5)
    assert head.weight.shape == (8, 6)
    assert torch.equal(head.weight[:3], before["weight"])
    if isinstance(head, CosineHead):
        assert torch.equal(head.scale, before["scale"])
    else:
        assert torch.equal(head.bias[:3], before["bias"])
        assert head.bias.shape == (8,)


@pytest.mark.parametrize("kind", HEADS)
def test_growing_leaves_the_scores_of_old_classes_as_they_were_bit_for_bit(kind: str) -> None:
    # Each row picks out one number of a feature: its score has one term, and no order of summing can change it.
    head = head_of(kind, 6)
    head.weight.data = 4 * torch.eye(6)
    before = head(FEATURES)
    head.grow(5)
    assert torch.equal(head(FEATURES)[:, :6], before)
    assert head(FEATURES).shape == (20, 11)


@pytest.mark.parametrize("kind", HEADS)
def test_new_rows_depend_on_the_seed_alone(kind: str) -> None:
    network = Network(nn.Identity(), head_of(kind, 2), torch.zeros(6), torch.ones(6))
    grown = [network.grown(3, seed, "head", task) for seed, task in ((0, 1), (0, 1), (1, 1), (0, 2))]
    rows = [other.head.weight[2:] for other in grown]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[3])
    assert network.classes == 2
    assert [other.classes for other in grown] == [5] * 4


@pytest.mark.parametrize("kind", HEADS)
def test_new_rows_are_trained(kind: str) -> None:
    head = head_of(kind, 2)
    head.grow(3)
    head(FEATURES).square().sum().backward()
    assert {name for name, parameter in head.named_parameters() if parameter.grad is not None} == {
        name for name, _ in head.named_parameters()
    }
    assert head.weight.grad is not None
    assert bool(head.weight.grad.any(1).all())


def test_an_unknown_head_suggests_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"'cosin'.* 'cosine'"):
        make_head("cosin", 3, scale=16.0)


# The cosines alone


def test_scores_are_the_cosines_times_the_scale() -> None:
    head = head_of("cosine", 4)
    assert isinstance(head, CosineHead)
    head.scale.data.fill_(7.5)
    cosines = head.cosines(FEATURES)
    assert torch.equal(head(FEATURES), 7.5 * cosines)
    assert float(cosines.detach().abs().max()) <= 1 + 1e-6
    assert torch.equal(head.cosines(FEATURES, fixed=2), cosines)


@pytest.mark.parametrize("fixed", [0, 1, 3, 4])
def test_fixed_rows_get_no_gradient(fixed: int) -> None:
    head, free = head_of("cosine", 4), head_of("cosine", 4)
    assert isinstance(head, CosineHead) and isinstance(free, CosineHead)
    features = FEATURES.clone().requires_grad_()
    (head.cosines(features, fixed=fixed) ** 3).sum().backward()
    (free.cosines(FEATURES) ** 3).sum().backward()
    assert free.weight.grad is not None
    assert bool(free.weight.grad.any(1).all())
    if fixed < 4:
        assert head.weight.grad is not None
        torch.testing.assert_close(head.weight.grad[fixed:], free.weight.grad[fixed:])
    assert head.weight.grad is None or not bool(head.weight.grad[:fixed].any())
    assert features.grad is not None  # but the features learn from all
    assert bool(features.grad.any(1).all())


# The correction


def corrected_head(classes: int = 5) -> CorrectedHead:
    head = head_of("corrected", classes)
    assert isinstance(head, CorrectedHead)
    return head


def test_only_scores_of_the_newest_classes_are_corrected() -> None:
    head = corrected_head()
    before = head(FEATURES)
    assert torch.equal(head.uncorrected(FEATURES), before)
    head.correct(0.5, -3.0, torch.tensor([False, True, False, True, True]))
    after = head(FEATURES)
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])
    torch.testing.assert_close(after[:, [1, 3, 4]], 0.5 * before[:, [1, 3, 4]] - 3)
    assert torch.equal(head.uncorrected(FEATURES), before)


def test_a_correction_replaces_the_previous_one() -> None:
    head, newest = corrected_head(), torch.tensor([False, False, False, True, True])
    head.correct(0.5, -3.0, ~newest)
    head.correct(2.0, 1.0, newest)
    scores = head.uncorrected(FEATURES)
    torch.testing.assert_close(head(FEATURES), torch.cat([scores[:, :3], 2 * scores[:, 3:] + 1], 1))


def test_growing_drops_the_correction() -> None:
    head = corrected_head()
    before = head(FEATURES)
    head.correct(0.5, -3.0, torch.ones(5, dtype=torch.bool))
    head.grow(2)
    assert (float(head.alpha), float(head.beta)) == (1.0, 0.0)
    assert head.newest.tolist() == [False] * 7
    torch.testing.assert_close(head(FEATURES)[:, :5], before)
    assert torch.equal(head(FEATURES), head.uncorrected(FEATURES))


def test_a_correction_is_not_trained() -> None:
    head = corrected_head()
    head.correct(0.5, -3.0, torch.ones(5, dtype=torch.bool))
    assert {name for name, _ in head.named_parameters()} == {"weight", "bias"}
    assert set(head.state_dict()) == {"weight", "bias", "alpha", "beta", "newest"}


def test_a_correction_survives_saving_and_restoring_of_its_network() -> None:
    samples = Samples.of(FEATURES, torch.arange(20) % 5)
    network = make_network("mlp", "corrected", samples, seed=0).grown(5, 0, "head").frozen()
    assert isinstance(network.head, CorrectedHead)
    network.head.correct(0.25, -1.5, torch.tensor([False, False, True, False, True]))
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    restored = restore_network("mlp", "corrected", (6,), tensors)
    assert isinstance(restored.head, CorrectedHead)
    assert (float(restored.head.alpha), float(restored.head.beta)) == (0.25, -1.5)
    assert restored.head.newest.tolist() == [False, False, True, False, True]
    with torch.no_grad():
        found, expected = restored(FEATURES)[1], network(FEATURES)[1]
        assert torch.equal(found, expected)
        assert not torch.allclose(found, network.head.uncorrected(network.features(FEATURES)))
