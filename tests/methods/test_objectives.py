"""Objectives compose the losses as in the equations."""

import math
from typing import Any

import pytest
import torch
from contexts import context

from engram.data import Stream
from engram.methods import OBJECTIVES, make
from engram.methods.objectives import Classification, Distillation
from engram.network import Network, make_network


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


def binary(score: float, target: float) -> float:
    return -(target * math.log(sigmoid(score)) + (1 - target) * math.log(1 - sigmoid(score)))


@pytest.fixture
def networks(vectors: Stream) -> tuple[Network, Network, torch.Tensor]:
    """A student of four classes, its teacher of two, and three inputs, in float64."""
    samples = vectors.tasks[0].train
    teacher = make_network("mlp", "cosine", samples, seed=0).grown(2, 0, "head").double().frozen()
    student = make_network("mlp", "cosine", samples, seed=1).grown(4, 1, "head").double()
    return student, teacher, samples.batch(torch.arange(3)).double()


def test_the_first_task_is_classification_alone(networks: tuple[Network, Network, torch.Tensor]) -> None:
    student, _, inputs = networks
    objective = Distillation(expected_classes=10)
    class_indices = torch.tensor([3, 0, 1])
    scores = student(inputs)[1].tolist()
    expected = sum(binary(scores[i][k], float(k == class_indices[i])) for i in range(3) for k in range(4)) / 3 / 10
    value = objective.loss(context(student, None, torch.ones(4, dtype=torch.bool)))(inputs, class_indices)
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_targets_of_old_classes_are_the_teachers_scores(networks: tuple[Network, Network, torch.Tensor]) -> None:
    student, teacher, inputs = networks
    objective = Distillation(expected_classes=10, distillation=0.7, feature_distillation=0.3)
    class_indices = torch.tensor([2, 3, 2])
    features, scores = (part.tolist() for part in student(inputs))
    old_features, old_scores = (part.tolist() for part in teacher(inputs))
    expected = 0.0
    for i in range(3):
        expected += sum(binary(scores[i][k], float(k == class_indices[i])) for k in (2, 3)) / 3 / 10
        expected += 0.7 * sum(binary(scores[i][k], sigmoid(old_scores[i][k])) for k in (0, 1)) / 3 / 10
        dot = sum(a * b for a, b in zip(features[i], old_features[i], strict=True))
        expected += 0.3 * (1 - dot / math.hypot(*features[i]) / math.hypot(*old_features[i])) / 3
    value = objective.loss(context(student, teacher, torch.tensor([False, False, True, True])))(inputs, class_indices)
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_the_teachers_scores_are_float32_in_mixed_precision() -> None:
    draws = torch.Generator().manual_seed(0)
    teacher_scores = (2 * torch.randn(64, 10, generator=draws)).bfloat16()
    own = (teacher_scores.float() + 0.1).bfloat16()
    gradients = []
    for kind in (torch.bfloat16, torch.float64):
        scores = own.to(kind, copy=True).requires_grad_()
        class_indices, others = torch.zeros(64, dtype=torch.int64), torch.ones(10, dtype=torch.bool)
        Distillation()._distil(scores, teacher_scores.to(kind), class_indices, others).backward()
        assert scores.grad is not None
        gradients.append(scores.grad.double())
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.005


def test_a_known_class_with_new_images_counts_as_in_the_task(networks: tuple[Network, Network, torch.Tensor]) -> None:
    student, teacher, inputs = networks
    objective = Distillation(expected_classes=1, feature_distillation=0.0)
    class_indices = torch.tensor([0, 3, 2])
    scores, old_scores = student(inputs)[1].tolist(), teacher(inputs)[1].tolist()
    expected = sum(binary(scores[i][k], float(k == class_indices[i])) for i in range(3) for k in (0, 2, 3)) / 3
    expected += sum(binary(scores[i][1], sigmoid(old_scores[i][1])) for i in range(3)) / 3
    value = objective.loss(context(student, teacher, torch.tensor([True, False, True, True])))(inputs, class_indices)
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_without_distillation_targets_of_old_classes_are_0(networks: tuple[Network, Network, torch.Tensor]) -> None:
    student, teacher, inputs = networks
    class_indices = torch.tensor([2, 3, 2])
    scores = student(inputs)[1].tolist()
    expected = sum(binary(scores[i][k], float(k == class_indices[i])) for i in range(3) for k in range(4)) / 3
    loss = Classification(expected_classes=1).loss(context(student, teacher, torch.tensor([False, False, True, True])))
    assert loss(inputs, class_indices).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("trained_on", "first"), [([2, 3], 2), ([0, 1, 2, 3], 0)])
def test_a_softmax_is_over_the_classes_that_have_samples(
    networks: tuple[Network, Network, torch.Tensor], trained_on: list[int], first: int
) -> None:
    student, teacher, inputs = networks
    class_indices = torch.tensor([2, 3, 2])
    objective = Distillation(loss_function="softmax", distillation=2.0, feature_distillation=0.0, expected_classes=1)
    scores, old_scores = student(inputs)[1].tolist(), teacher(inputs)[1].tolist()
    expected = 0.0
    for i in range(3):
        total = sum(map(math.exp, scores[i][first:]))
        expected -= math.log(math.exp(scores[i][class_indices[i]]) / total) / 3
        new, old = [sum(math.exp(s) for s in row[:2]) for row in (scores[i], old_scores[i])]
        for k in (0, 1):
            expected -= 2.0 * math.exp(old_scores[i][k]) / old * math.log(math.exp(scores[i][k]) / new) / 3
    in_task = torch.tensor([False, False, True, True])
    made = context(student, teacher, in_task, class_indices=torch.tensor(trained_on))
    assert objective.loss(made)(inputs, class_indices).item() == pytest.approx(expected, rel=1e-9)


def test_if_every_known_class_is_in_the_task_nothing_is_distilled(
    networks: tuple[Network, Network, torch.Tensor],
) -> None:
    student, teacher, inputs = networks
    everything, class_indices = torch.ones(4, dtype=torch.bool), torch.tensor([3, 0, 1])
    for function in ("sigmoid", "softmax"):
        taught, alone = (
            Distillation(loss_function=function, feature_distillation=0.0),
            Classification(loss_function=function),
        )
        values = [
            each.loss(context(student, teacher, everything))(inputs, class_indices).item() for each in (taught, alone)
        ]
        assert values[0] == pytest.approx(values[1]) and math.isfinite(values[0])


def test_without_a_teacher_every_class_of_the_head_is_learned(
    networks: tuple[Network, Network, torch.Tensor],
) -> None:
    student, _, inputs = networks
    newest, class_indices = (
        torch.tensor([False, False, True, True]),
        torch.tensor([3, 0, 1]),
    )  # all tasks together, as joint
    values = [
        each.loss(context(student, None, newest))(inputs, class_indices) for each in (Distillation(), Classification())
    ]
    assert torch.equal(*values)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_settings_of_later_tasks_have_no_effect_on_the_first_task(name: str, images: Stream) -> None:
    others: dict[str, Any] = {
        **{"distillation": 3.0, "feature_distillation": 2.0, "less_forget": 50.0, "margin_weight": 9.0, "margin": 2.0},
        **{
            "imprint": False,
            "freeze_old_weights": False,
            "temperature": 9.0,
            "distillation_share": 0.01,
            "head_distillation": 9.0,
        },
        **{"fine_tuning": 0.0, "balanced_epochs": 1.0, "importance": 1e5, "elastic": 50.0, "projected": 50.0},
        **{"memory_strength": 50.0, "attention": 50.0},
    }
    later = OBJECTIVES[name].of_later_tasks
    quick = {"objective": name, "epochs": 2, "learning_rate": 0.05, "batch_size": 8, "images_per_class": 4}
    plain, other = make("icarl", **quick), make("icarl", **quick, **{k: v for k, v in others.items() if k in later})
    assert later <= plain.settings().keys()
    same = []
    for number, task in enumerate(images.tasks[:2]):
        assert (plain.training_settings(number) == other.training_settings(number)) == (not later or number == 0)
        for learner in (plain, other):
            learner.learn(task)
        states = [learner.trained.state_dict() for learner in (plain, other)]
        same.append(all(torch.equal(states[0][key], states[1][key]) for key in states[0]))
    assert same == [True, not later]
