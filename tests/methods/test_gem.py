"""GEM: the projection, its constraints, and that a step raises no earlier task's loss."""

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from contexts import context
from learners_made import learned

from engram.data import Samples, Stream
from engram.methods.gem import GEM, projected
from engram.network import Network, Training, make_network

RANDOM = torch.Generator().manual_seed(0)


def test_a_gradient_that_violates_nothing_stays_as_it_is() -> None:
    gradient, constraints = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    assert torch.equal(projected(gradient, constraints, 0.5), gradient)


def test_with_one_constraint_its_component_is_removed() -> None:
    gradient, constraint = torch.tensor([3.0, -4.0, 1.0]), torch.tensor([0.0, 2.0, 0.0])
    torch.testing.assert_close(projected(gradient, constraint[None], 0.0), torch.tensor([3.0, 0.0, 1.0]))
    # v = max(γ, −g·c / c·c) = max(γ, 2)
    torch.testing.assert_close(projected(gradient, constraint[None], 0.5), torch.tensor([3.0, 0.0, 1.0]))
    torch.testing.assert_close(projected(gradient, constraint[None], 2.5), torch.tensor([3.0, 1.0, 1.0]))


@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_with_several_the_multipliers_minimise_the_dual_problem(strength: float) -> None:
    gradient, constraints = torch.randn(20, generator=RANDOM), torch.randn(5, 20, generator=RANDOM)
    constraints[0] -= gradient  # surely violated
    g, G = gradient.double().numpy(), constraints.double().numpy()

    def dual(v: np.ndarray) -> tuple[float, np.ndarray]:
        moved = g + v @ G
        return float(moved @ moved) / 2, G @ moved

    best = scipy.optimize.minimize(
        dual, np.full(5, strength), jac=True, bounds=[(strength, None)] * 5, options={"ftol": 1e-15, "gtol": 1e-10}
    )
    found = projected(gradient, constraints, strength)
    np.testing.assert_allclose(found, g + best.x @ G, atol=1e-4)
    assert bool((constraints @ found > -1e-4).all())


@pytest.fixture
def student() -> Network:
    return make_network(
        "mlp", "linear", Samples.of(torch.randn(4, 5, generator=RANDOM), torch.arange(4)), seed=0
    ).grown(4, 0, "head")


@pytest.mark.parametrize(("settings", "groups"), [({}, 2), ({"constraints": "one"}, 1)])
def test_after_the_hook_no_constraint_is_violated(settings: dict[str, Any], groups: int, student: Network) -> None:
    """The first two samples are exemplars, of two tasks; gradients are of the others, and then reversed."""
    objective = GEM(memory_strength=0.0, expected_classes=4, **settings)
    samples = Samples.of(torch.randn(4, 5, generator=RANDOM), torch.arange(4))
    training = context(
        student,
        student.frozen(),
        torch.tensor([False, False, True, True]),
        samples=samples,
        class_indices=torch.arange(4),
        exemplars=2,
        task_of_class=torch.tensor([0, 1, 2, 2]),
    )
    loss, weights = objective.loss(training), list(student.parameters())
    parts = [torch.tensor([0]), torch.tensor([1])] if groups == 2 else [torch.tensor([0, 1])]
    constraints = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss(samples.batch(rows), rows), weights)])
        for rows in parts
    ]
    (-loss(samples.batch(torch.arange(2)), torch.arange(2))).backward()  # unlearns both
    hook = objective.gradient_hook(training)
    assert hook is not None
    hook(torch.Generator())
    found = torch.cat([w.grad.flatten() for w in weights if w.grad is not None])
    for constraint in constraints:
        assert float(constraint @ found) > -1e-6
    if groups == 1:
        torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-6, rtol=0)


def test_without_stored_images_there_is_no_hook(student: Network) -> None:
    assert GEM().gradient_hook(context(student, None, torch.ones(4, dtype=torch.bool))) is None


def test_stored_images_are_constraints_and_not_trained_on(vectors: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    fit = Training.fit
    monkeypatch.setattr(
        Training,
        "fit",
        lambda self, network, samples, *rest, **more: (
            seen.append(len(samples)),
            fit(self, network, samples, *rest, **more),
        )[1],
    )
    learner = learned("gem", vectors)
    assert seen == [len(task.train) for task in vectors]
    assert len(learner.memory.images) > 0
