"""Adapters: a known drift, the paper's loss, the closed form, the cache, and the automatic choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model
import torch
from progress_made import Recorder
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import TrainingError
from engram.features import (
    ADAPTERS,
    CLASSIFIERS,
    Adapter,
    AutoAdapter,
    IdentityAdapter,
    MLPAdapter,
    Pairs,
    RidgeAdapter,
    adapt,
)
from engram.features.adapters import AdapterNetwork, recognised
from engram.network import Cache
from engram.randomness import generator as generator_for
from engram.randomness import seeded
from engram.settings import Choice

D = 16
CLASSES = 20  # the first ten are stored, the others are the task's


def rotation(angle: float, seed: int = 0) -> Tensor:
    """A rotation by up to `angle`."""
    matrix = torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    skew = matrix - matrix.T
    return torch.linalg.matrix_exp(angle * skew / torch.linalg.matrix_norm(skew, 2)).float()


@dataclass
class Drift:
    """Clustered unit vectors in the old feature space, and the same rotated in the new one."""

    stored: Tensor  # vectors of old classes, old space
    truth: Tensor  # the same in the new space
    pairs: Pairs  # vectors of the task's classes in both, of various lengths
    centres: Tensor  # of all classes in the new space: a head

    def omega(self, adapted: Tensor) -> float:
        """ω: the mean cosine between adapted vectors and true ones."""
        return (adapted.double() * self.truth.double()).sum(1).mean().item()


def made(adapter: str, **settings: Any) -> Adapter:
    """The adapter of this name; settings that it does not have are ignored, as in a learner."""
    return Choice(ADAPTERS, adapter, settings).make()


def drift(angle: float, count: int = 3000) -> Drift:
    random = torch.Generator().manual_seed(1)
    centres = F.normalize(torch.randn(CLASSES, D, generator=random))
    class_indices = torch.arange(count) % 10 + 10

    def clustered(labels: Tensor) -> Tensor:
        return F.normalize(centres[labels] + 0.2 * torch.randn(len(labels), D, generator=random))

    turn = rotation(angle)
    stored, old = clustered(torch.arange(500) % 10), clustered(class_indices)
    lengths = [0.5 + 3 * torch.rand(count, 1, generator=random) for _ in range(2)]
    new_centres = centres @ turn.T

    def classification(features: Tensor, class_indices: Tensor) -> Tensor:
        return F.cross_entropy(8 * F.normalize(features) @ new_centres.T, class_indices)

    pairs = Pairs(old * lengths[0], old @ turn.T * lengths[1], class_indices, classification)
    return Drift(stored, stored @ turn.T, pairs, new_centres)


@pytest.fixture(scope="module")
def far() -> Drift:
    return drift(angle=2.5)


@pytest.fixture(scope="module")
def near() -> Drift:
    return drift(angle=0.8)


# Known drift


@pytest.mark.parametrize("adapter", ["mlp", "ridge"])
@pytest.mark.parametrize(("distance", "unadapted"), [("near", 0.95), ("far", 0.5)])
def test_a_rotation_is_undone_for_classes_that_were_not_in_the_pairs(
    adapter: str, distance: str, unadapted: float, request: pytest.FixtureRequest
) -> None:
    known: Drift = request.getfixturevalue(distance)
    assert known.omega(known.stored) < unadapted
    adapted = made(adapter, adapter_steps=400, adapter_width=96).fit(known.pairs, task=1)(known.stored)
    assert known.omega(adapted) > 0.98
    torch.testing.assert_close(adapted.norm(dim=1), torch.ones(len(adapted)))
    assert adapted.dtype == torch.float32
    assert not adapted.requires_grad


@pytest.mark.parametrize("adapter", ["mlp", "ridge", "auto"])
def test_unlabelled_pairs_improve_the_adapter_and_are_not_classified(adapter: str, far: Drift) -> None:
    def classification(features: Tensor, class_indices: Tensor) -> Tensor:
        assert len(features) == len(class_indices) > 0 and bool((class_indices >= 0).all())
        assert far.pairs.classification is not None
        return far.pairs.classification(features, class_indices)

    few = Pairs(far.pairs.old[:12], far.pairs.new[:12], far.pairs.class_indices[:12], classification)
    labels = torch.cat([few.class_indices, torch.full((2988,), -1)])
    all_of_them = Pairs(far.pairs.old, far.pairs.new, labels, classification)
    omegas = [
        far.omega(made(adapter, adapter_steps=240, adapter_width=96).fit(pairs, task=1)(far.stored))
        for pairs in (few, all_of_them)
    ]
    assert omegas[1] > 0.97 > omegas[0]


def test_alpha_weighs_similarity(far: Drift) -> None:
    omegas = {}
    for alpha in (0.0, 100.0):
        adapter = MLPAdapter(alpha=alpha, adapter_steps=100, adapter_width=64)
        omegas[alpha] = far.omega(adapter.fit(far.pairs, task=1)(far.stored))
    assert omegas[0.0] < omegas[100.0] - 0.2


@pytest.mark.parametrize("count", [200, 30])  # more pairs than hidden units, and fewer
def test_the_last_layer_starts_at_the_ridge_solution(count: int, far: Drift) -> None:
    old, new = F.normalize(far.pairs.old[:count]), F.normalize(far.pairs.new[:count])
    with seeded(0):
        adapter = AdapterNetwork(D, width=50, depth=2)
    adapter.initialise(old, new)
    *hidden, last = adapter.layers
    with torch.no_grad():
        outputs = nn.Sequential(*hidden)((old - old.mean(0)) @ adapter.scaling).double().numpy()
    penalty = 0.1 * ((outputs - outputs.mean(0)) ** 2).sum() / 50
    expected = sklearn.linear_model.Ridge(penalty).fit(outputs, new.double().numpy())
    np.testing.assert_allclose(last.weight.detach().numpy(), expected.coef_, atol=1e-4)
    np.testing.assert_allclose(last.bias.detach().numpy(), expected.intercept_, atol=1e-4)


def test_inputs_are_shrunk_halfway_to_white(far: Drift) -> None:
    old = F.normalize(far.pairs.old)
    adapter = AdapterNetwork(D, width=8, depth=1)
    adapter.initialise(old, old)
    sizes = np.linalg.eigvalsh(np.cov(old.double().numpy().T, bias=True))
    after = np.linalg.eigvalsh(np.cov(((old - old.mean(0)) @ adapter.scaling).double().numpy().T, bias=True))
    np.testing.assert_allclose(after, sizes / (sizes + sizes.mean()), rtol=1e-4)


def test_the_least_squares_start_needs_fewer_steps(far: Drift) -> None:
    taught, others = slice(0, 2000), slice(2000, None)  # pairs of the same classes
    pairs = replace(
        far.pairs,
        old=far.pairs.old[taught],
        new=far.pairs.new[taught],
        class_indices=far.pairs.class_indices[taught],
    )
    old, new = F.normalize(far.pairs.old[others]), F.normalize(far.pairs.new[others])

    def omega(start: str, steps: int) -> float:
        adapter = made("mlp", adapter_init=start, adapter_steps=steps).fit(pairs, task=1)
        return (adapter(old) * new).sum(1).mean().item()

    assert omega("least-squares", 1) > 0.85 and abs(omega("random", 1)) < 0.5
    assert omega("least-squares", 20) > omega("random", 20)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_pairs_are_enough(count: int, far: Drift) -> None:
    pairs = Pairs(far.pairs.old[:count], far.pairs.new[:count], far.pairs.class_indices[:count])
    adapted = MLPAdapter(adapter_steps=5).fit(pairs, task=1)(far.stored)
    torch.testing.assert_close(adapted.norm(dim=1), torch.ones(len(adapted)))


@pytest.mark.parametrize("adapter", ["mlp", "auto"])
@pytest.mark.parametrize("classes", [1, 2])
def test_identical_pairs_translate_all_vectors(adapter: str, classes: int) -> None:
    one, other = F.normalize(torch.randn(2, 16, generator=torch.Generator().manual_seed(0)))
    moved = F.normalize(one + 0.02 * other, dim=0)
    pairs = Pairs(one.expand(5, -1), moved.expand(5, -1), torch.arange(5) % classes)
    fitted = made(adapter).fit(pairs)
    assert fitted.name == "ridge"
    near = F.normalize(one + 0.3 * torch.randn(50, 16, generator=torch.Generator().manual_seed(1)) / 4)
    assert torch.allclose(fitted(near), F.normalize(near + moved - one), atol=1e-5)


def test_auto_is_ridge_if_a_held_out_class_has_one_sample(far: Drift) -> None:
    old, new = (torch.cat([each[:8], each[-1:]]) for each in (far.pairs.old, far.pairs.new))
    pairs = Pairs(old, new, torch.tensor([0] * 8 + [1]))
    assert AutoAdapter(adapter_steps=20).fit(pairs).name == "ridge"


def test_vectors_are_adapted_in_blocks(near: Drift, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Negative(IdentityAdapter):
        def __call__(self, vectors: Tensor) -> Tensor:
            seen.append(len(vectors))
            return -vectors

    monkeypatch.setattr("engram.features.memory.ADAPTED_ROWS", 4)
    vectors = torch.arange(20.0).view(10, 2)
    assert torch.equal(adapt(Negative(), vectors), -vectors)
    assert seen == [4, 4, 2]


def test_identity_leaves_vectors_as_they_are(far: Drift) -> None:
    adapter = IdentityAdapter().fit(far.pairs)
    assert torch.equal(adapter(far.stored), far.stored)
    assert not adapter.needs_pairs


# The loss


def test_training_matches_adam_on_the_papers_loss() -> None:
    """Three steps of Adam on α (1 − cos(v, φ(v̄))) + L_cls(φ(v̄)), by autograd."""
    random = torch.Generator().manual_seed(3)
    old, new = torch.randn(10, 4, generator=random), torch.randn(10, 4, generator=random)
    class_indices, head = torch.arange(10) % 3, torch.randn(3, 4, generator=random)
    how = {"adapter_init": "random", "adapter_learning_rate": 1e-3, "adapter_steps": 3, "adapter_batch": 10}
    settings = MLPAdapter(alpha=0.7, adapter_width=5, adapter_depth=1, **how)  # type: ignore[arg-type]

    def classification(features: Tensor, class_indices: Tensor) -> Tensor:
        return F.cross_entropy(features @ head.T, class_indices)

    with seeded(2, "adapter", 6):
        first, second = nn.Linear(4, 5), nn.Linear(5, 4)
    parameters = [first.weight, first.bias, second.weight, second.bias]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    # The learning rate falls along a cosine: 1, 3/4 and 1/4 of 0.001 at thirds of the way.
    for step, learning_rate in enumerate((1e-3, 0.75e-3, 0.25e-3), 1):
        unit = old / old.square().sum(1, keepdim=True).sqrt()
        hidden = (2 * unit @ first.weight.T + first.bias).clamp(min=0)  # √d = 2
        out = hidden @ second.weight.T + second.bias
        adapted = out / out.square().sum(1, keepdim=True).sqrt()
        lengths = new.square().sum(1, keepdim=True).sqrt()
        similarity = (1 - (adapted * new / lengths).sum(1)).mean()
        scores = (adapted * lengths) @ head.T
        classes = -scores.log_softmax(1)[torch.arange(10), class_indices].mean()
        gradients = torch.autograd.grad(0.7 * similarity + classes, parameters)
        with torch.no_grad():
            for p, gradient, (mean, square) in zip(parameters, gradients, moments, strict=True):
                mean.mul_(0.9).add_(0.1 * gradient)
                square.mul_(0.999).add_(0.001 * gradient**2)
                p -= learning_rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)

    adapter = settings.fit(Pairs(old, new, class_indices, classification), seed=2, task=6)
    assert adapter is settings
    for found, expected in zip(settings.network_.parameters(), parameters, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-6)


def test_the_head_gets_adapted_vectors_of_the_new_length_with_their_classes() -> None:
    class_indices = torch.arange(50)
    new = F.normalize(torch.randn(50, 4, generator=torch.Generator().manual_seed(0))) * (1 + class_indices[:, None])
    seen: list[int] = []

    def classification(features: Tensor, targets: Tensor) -> Tensor:
        torch.testing.assert_close(features.detach().norm(dim=1), 1.0 + targets)
        seen.extend(targets.tolist())
        return features.sum() * 0

    settings = MLPAdapter(adapter_steps=8, adapter_batch=16, adapter_width=8)
    settings.fit(Pairs(new.flip(1), new, class_indices, classification))
    assert sorted(seen) == sorted([*range(50)] * 2)


def test_only_the_adapter_is_trained(near: Drift) -> None:
    head = nn.Linear(D, CLASSES).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    stored, old, new = near.stored.clone(), near.pairs.old.clone(), near.pairs.new.clone()
    pairs = replace(near.pairs, classification=lambda v, y: F.cross_entropy(head(v), y))
    MLPAdapter(adapter_steps=10, adapter_width=8).fit(pairs)(near.stored)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    assert torch.equal(near.stored, stored)
    assert torch.equal(near.pairs.old, old) and torch.equal(near.pairs.new, new)


# The cache


def counted(drift: Drift, cache_key: Sequence[object] | None) -> tuple[Pairs, list[int]]:
    """The pairs of a drift, and a list with one entry per call of their L_cls."""
    calls: list[int] = []

    def classification(features: Tensor, class_indices: Tensor) -> Tensor:
        calls.append(len(features))
        return features.sum()

    return replace(drift.pairs, classification=classification, cache_key=cache_key), calls


@pytest.mark.parametrize("adapter", ["mlp", "auto"])
def test_an_adapter_that_was_fitted_before_is_read_from_the_cache(adapter: str, near: Drift, tmp_path: Path) -> None:
    pairs, calls = counted(near, ("L_cls", near.centres))
    unidentified = replace(pairs, cache_key=None)

    def adapted(pairs: Pairs, cache: Cache | None) -> Tensor:
        return made(adapter, adapter_steps=5, adapter_width=8).fit(pairs, task=1, cache=cache)(near.stored)

    once, cache = adapted(pairs, Cache(tmp_path)), Cache(tmp_path)
    fitting = len(calls)
    assert torch.equal(adapted(pairs, cache), once) and len(calls) == fitting
    assert torch.equal(adapted(unidentified, cache), once) and len(calls) == 2 * fitting
    assert torch.equal(adapted(pairs, None), once) and len(calls) == 3 * fitting


def test_an_adapter_of_other_pairs_another_loss_or_other_settings_is_fitted(near: Drift, tmp_path: Path) -> None:
    key: tuple[object, ...] = ("L_cls", near.centres)
    pairs = replace(near.pairs, cache_key=key)
    how: dict[str, Any] = {"adapter_steps": 2, "adapter_width": 8}
    asked: list[tuple[dict[str, Any], Pairs, int, int]] = [
        (how, pairs, 0, 1),
        ({**how, "adapter_steps": 3}, pairs, 0, 1),
        ({**how, "alpha": 1.0}, pairs, 0, 1),
        (how, replace(pairs, old=pairs.new, new=pairs.old), 0, 1),
        (how, replace(pairs, class_indices=pairs.class_indices.flip(0)), 0, 1),
        (how, pairs, 1, 1),
        (how, pairs, 0, 2),
        (how, replace(pairs, cache_key=("another", near.centres)), 0, 1),
        (how, replace(pairs, cache_key=("L_cls", near.centres + 1e-6)), 0, 1),
    ]
    for settings, of, seed, task in asked:
        MLPAdapter(**settings).fit(of, seed=seed, task=task, cache=Cache(tmp_path))
    assert len(list(tmp_path.iterdir())) == len(asked)


# The network φ


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(64, 4), (64, 64), (4, 64)]),  # d → 16 d → 16 d → d
        ({"adapter_depth": 1}, [(64, 4), (4, 64)]),
        ({"adapter_depth": 4}, [(64, 4), (64, 64), (64, 64), (64, 64), (4, 64)]),
        ({"adapter_width": 10}, [(10, 4), (10, 10), (4, 10)]),
    ],
)
def test_depth_and_width_are_those_of_the_hidden_layers(
    settings: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    pairs = Pairs(vectors, vectors, torch.zeros(6, dtype=torch.int64))
    adapter = MLPAdapter(adapter_steps=1, **settings)  # type: ignore[arg-type]
    adapter.fit(pairs)
    layers = adapter.network_.layers
    assert [tuple(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear)] == expected
    assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU] * (len(expected) - 1) + [nn.Linear]
    assert not any(parameter.requires_grad for parameter in adapter.network_.parameters())


def test_the_papers_adapter_on_imagenet_has_75_million_parameters() -> None:
    with torch.device("meta"):
        adapter = AdapterNetwork(512, 16 * 512, 2)
    assert sum(p.numel() for p in adapter.parameters()) == 513 * 8192 + 8193 * 8192 + 8193 * 512 == 75_514_368


def test_the_adapter_is_a_function_of_seed_and_task(near: Drift) -> None:
    def adapted(seed: int, task: int) -> Tensor:
        return MLPAdapter(adapter_steps=20, adapter_width=16).fit(near.pairs, seed=seed, task=task)(near.stored)

    first = adapted(0, 1)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert torch.equal(adapted(0, 1), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(adapted(1, 1), first)
    assert not torch.equal(adapted(0, 2), first)


def test_the_order_of_pairs_is_that_of_its_purpose() -> None:
    class_indices = torch.arange(12)
    vectors = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    seen: list[int] = []

    def classification(features: Tensor, targets: Tensor) -> Tensor:
        seen.extend(targets.tolist())
        return features.sum() * 0

    adapter = MLPAdapter(adapter_steps=6, adapter_batch=5, adapter_width=4)
    adapter.fit(Pairs(vectors, vectors, class_indices, classification), seed=3, task=1)
    expected = [torch.randperm(12, generator=generator_for(3, "pairs", 1, epoch)).tolist() for epoch in (0, 1)]
    assert seen == expected[0] + expected[1]


def test_the_number_of_steps_does_not_depend_on_the_number_of_pairs() -> None:
    vectors = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    steps: list[int] = []

    def classification(features: Tensor, targets: Tensor) -> Tensor:
        steps.append(len(targets))
        return features.sum() * 0

    adapter = MLPAdapter(adapter_steps=8, adapter_batch=5, adapter_width=4)
    adapter.fit(Pairs(vectors, vectors, torch.arange(12), classification), seed=3, task=1)
    assert steps == [4] * 8


# Refusals


@pytest.mark.parametrize("adapter", ["mlp", "ridge", "auto"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["old", "new"])
def test_pairs_that_are_not_finite_are_refused(adapter: str, bad: float, side: str) -> None:
    vectors = {"old": torch.ones(20, 3), "new": torch.ones(20, 3)}
    vectors[side][11, 2] = bad
    pairs = Pairs(**vectors, class_indices=torch.zeros(20, dtype=torch.int64))
    with pytest.raises(TrainingError, match="NaN or infinity"):
        made(adapter, adapter_steps=1).fit(pairs)


# Ridge


def least_squares(pairs: Pairs, penalty: float) -> Callable[[np.ndarray], np.ndarray]:
    """The penalised problem as ordinary least squares with rows added, solved by numpy."""

    def unit(vectors: np.ndarray) -> np.ndarray:
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    old, new = unit(pairs.old.double().numpy()), unit(pairs.new.double().numpy())
    x, change = old - old.mean(0), (new - new.mean(0)) - (old - old.mean(0))
    strength = penalty * np.mean(np.var(old, axis=0)) * len(x)
    added = np.sqrt(strength) * np.eye(x.shape[1])
    solution, *_ = np.linalg.lstsq(np.vstack([x, added]), np.vstack([change, np.zeros_like(added)]), rcond=None)
    return lambda v: unit((v - old.mean(0)) @ (np.eye(x.shape[1]) + solution) + new.mean(0))


@pytest.mark.parametrize("penalty", [1e-6, 1e-3, 0.5, 20.0])
@pytest.mark.parametrize("count", [300, 10])  # ten pairs do not determine sixteen dimensions
def test_ridge_matches_least_squares_with_added_rows(penalty: float, count: int) -> None:
    random = torch.Generator().manual_seed(5)
    old, new = torch.randn(count, D, generator=random) + 0.5, torch.randn(count, D, generator=random) - 0.5
    pairs = Pairs(old, new, torch.zeros(count, dtype=torch.int64))
    stored = F.normalize(torch.randn(40, D, generator=random))
    found = RidgeAdapter(adapter_penalty=penalty).fit(pairs)(stored)
    np.testing.assert_allclose(found, least_squares(pairs, penalty)(stored.double().numpy()), atol=1e-5)


def test_ridge_leaves_vectors_as_they_are_where_nothing_has_moved() -> None:
    vectors = torch.randn(50, D, generator=torch.Generator().manual_seed(0))
    stored = F.normalize(torch.randn(9, D, generator=torch.Generator().manual_seed(1)))
    adapter = RidgeAdapter().fit(Pairs(vectors, 3 * vectors, torch.zeros(50, dtype=torch.int64)))
    torch.testing.assert_close(adapter(stored), stored)


def test_ridge_of_a_single_pair_moves_everything_along_with_it() -> None:
    old, new = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    adapter = RidgeAdapter().fit(Pairs(old, new, torch.zeros(1, dtype=torch.int64)))
    torch.testing.assert_close(adapter(torch.tensor([[1.0, 0.0]])), torch.tensor([[0.0, 1.0]]))


# The automatic choice


def classes_of_pairs(classes: int, per_class: int, moved: Callable[[Tensor], Tensor]) -> Pairs:
    """Clusters of unit vectors (n, 16) before and after a move."""
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, 16, generator=draws).repeat_interleave(per_class, 0)
    old = F.normalize(centres + 0.5 * torch.randn(len(centres), 16, generator=draws))
    return Pairs(old, F.normalize(moved(old)), torch.arange(classes).repeat_interleave(per_class))


def turned() -> Tensor:
    """A rotation or reflection (16, 16)."""
    return torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))[0]


@pytest.mark.parametrize(
    ("better", "classes", "per_class", "moved"),
    [
        ("ridge", 10, 30, lambda old: old @ turned()),
        ("mlp", 40, 60, lambda old: (old @ turned()).abs()),  # which no linear map does
    ],
    ids=["linear", "nonlinear"],
)
@pytest.mark.parametrize("classifier", ["nearest-mean", "ridge"])
def test_auto_chooses_the_adapter_with_the_higher_accuracy_on_classes_without_pairs(
    better: str, classes: int, per_class: int, moved: Callable[[Tensor], Tensor], classifier: str
) -> None:
    both = classes_of_pairs(classes + 10, per_class, moved)
    stored, task = both.class_indices < 10, both.class_indices >= 10
    pairs = replace(both.select(task), make_classifier=CLASSIFIERS[classifier])
    how: dict[str, Any] = {"adapter_width": 64, "adapter_steps": 240}
    accuracy = {}
    for name, adapter in (("ridge", RidgeAdapter()), ("mlp", MLPAdapter(**how))):
        adapted = adapter.fit(pairs, task=1)(both.old[stored])
        fitted = CLASSIFIERS[classifier]().fit(
            torch.cat([adapted, pairs.new]), torch.cat([both.class_indices[stored], pairs.class_indices])
        )
        right = fitted.scores(both.new[stored]).argmax(1) == both.class_indices[stored]
        accuracy[name] = right.float().mean().item()
    assert max(accuracy, key=lambda name: accuracy[name]) == better  # on classes without pairs
    assert AutoAdapter(**how).fit(pairs, task=1).name == better


def test_auto_is_ridge_for_a_linear_map_of_few_classes() -> None:
    for classes in (1, 2, 3):
        pairs = classes_of_pairs(classes, 60, lambda old: old @ turned())
        assert AutoAdapter(adapter_width=32, adapter_steps=50).fit(pairs, task=1).name == "ridge"


def test_held_out_classes_weigh_as_much_as_the_others() -> None:
    first, second = torch.eye(4)[:2]
    labels = torch.tensor([0] * 2 + [1] * 6)
    rows = torch.where(labels[:, None] == 0, first, second)

    class Constant(IdentityAdapter):
        def __call__(self, vectors: Tensor) -> Tensor:
            return second.expand_as(vectors)

    pairs = Pairs(rows, rows, labels)
    assert recognised(IdentityAdapter(), pairs, labels == 0) == 1.0
    # Now both classes have the same mean, and the first one wins ties: one image right and three wrong.
    assert recognised(Constant(), pairs, labels == 0) == 0.5


@pytest.mark.parametrize(
    ("adapter", "steps"), [("identity", 0), ("ridge", 0), ("mlp", 250), ("auto", 730)], ids=lambda value: str(value)
)
def test_most_steps_is_the_number_of_steps_taken(adapter: str, steps: int) -> None:
    taken = []

    def counted(adapted: Tensor, class_indices: Tensor) -> Tensor:
        taken.append(1)
        return adapted.sum() * 0

    settings = made(adapter, adapter_steps=250, adapter_width=64)
    pairs = classes_of_pairs(40, 60, torch.abs)  # no linear map makes this, so `auto` goes on to an MLP
    settings.fit(replace(pairs, classification=counted), task=1)
    assert len(taken) == settings.most_steps == steps


def test_trials_report_the_phase_adapt() -> None:
    draws = torch.Generator().manual_seed(0)
    old = torch.randn(60, 8, generator=draws)
    pairs = Pairs(old, old + 0.1 * torch.randn(60, 8, generator=draws), torch.arange(60) % 5)
    progress = Recorder()
    AutoAdapter(adapter_steps=7, adapter_width=16).fit(pairs, task=1, progress=progress)
    assert {name for name, _, _ in progress.phases} == {"adapt"}
    steps = [steps for _, steps, _ in progress.phases]
    assert steps[:4] == [7, None] * 2  # two trials of the MLP and of ridge
    assert steps[4:] in ([7], [None])  # then the better of them, on all pairs
