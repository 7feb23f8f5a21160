"""EFC, AdaGauss and rotation labels: penalties on drift, and heads that are dropped after training."""

from typing import Any

import pytest
import torch
from contexts import context
from learners_made import quick
from torch import nn

from engram.data import Samples, Stream
from engram.errors import UsageError
from engram.methods import OBJECTIVES, TrainingContext
from engram.methods.adagauss import ProjectedDistillation, collapse
from engram.methods.efc import FeatureConsolidation, feature_matrix
from engram.methods.objectives import Distillation
from engram.network import Carried, make_network, unchanged_statistics
from engram.progress import SILENT


@pytest.fixture
def trained(vectors: Stream) -> TrainingContext:
    samples = vectors.tasks[0].train.select(torch.arange(5))
    samples = Samples.of(samples.batch(torch.arange(5)).double(), samples.labels)
    student = make_network("mlp", "cosine", samples, seed=0).grown(3, 0, "head").double()
    class_indices = torch.tensor([0, 1, 0, 1, 1])
    return context(student, None, torch.ones(3, dtype=torch.bool), samples=samples, class_indices=class_indices)


def test_the_feature_matrix_is_the_expected_square_of_the_scores_gradient(trained: TrainingContext) -> None:
    network = trained.student.eval()
    expected = torch.zeros(network.dimension, network.dimension, dtype=torch.float64)
    for row in range(5):
        with torch.no_grad():
            feature = network.features(trained.samples.batch(torch.tensor([row])))[0]
        feature.requires_grad_(True)
        probabilities = network.head(feature[None])[0].softmax(0)
        for class_index in range(3):
            (gradient,) = torch.autograd.grad(probabilities[class_index].log(), feature, retain_graph=True)
            expected += probabilities[class_index].detach() * torch.outer(gradient, gradient) / 5
    torch.testing.assert_close(feature_matrix(trained).double(), expected, rtol=1e-4, atol=1e-7)


def test_the_penalty_on_drift_uses_the_feature_matrix(trained: TrainingContext) -> None:
    d = trained.student.dimension
    matrix = torch.diag(torch.arange(d, dtype=torch.float64))
    trained.student.carried = Carried({"feature_matrix": matrix})
    penalty = FeatureConsolidation(elastic=2.0, rigid=0.5, expected_classes=10).drift_penalty(trained)
    before = torch.zeros(1, d, dtype=torch.float64)
    after = before.clone()
    after[0, 3] = 0.2
    assert float(penalty(after, before)) == pytest.approx((2.0 * 3 + 0.5) * 0.2**2 / 10)


def test_the_feature_matrix_is_carried_saved_and_counted(vectors: Stream) -> None:
    learner = quick("features", objective="efc")
    learner.learn(vectors.tasks[0])
    d = learner.trained.dimension
    assert learner.memory.carried_bytes == 4 * d * d
    other = quick("features", objective="efc")
    other.restore(learner.state())
    assert torch.equal(
        other.trained.carried.tensors()["feature_matrix"], learner.trained.carried.tensors()["feature_matrix"]
    )


def test_collapse_is_minus_the_clipped_diagonal_of_the_cholesky_factor() -> None:
    rows = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)).double() * torch.tensor([3.0, 0.5, 0.1])
    factor = torch.linalg.cholesky(torch.cov(rows.T) + 1e-4 * torch.eye(3))
    assert float(collapse(rows)) == pytest.approx(-float((1 + factor[1, 1] + factor[2, 2]) / 3))
    flat = rows.clone()
    flat[:, 2] = flat[:, 1]  # one direction is lost
    assert float(collapse(flat)) > float(collapse(rows))


def test_projected_distillation_is_the_distance_after_the_projection(trained: TrainingContext) -> None:
    objective = ProjectedDistillation(projected=3.0, anti_collapse=0.5, expected_classes=10)
    penalty = objective.drift_penalty(trained)
    projection = trained.student.auxiliary["projection"].double()
    draws = torch.Generator().manual_seed(1)
    features, before = (torch.randn(80, trained.student.dimension, generator=draws).double() for _ in range(2))
    distance = (projection(features) - before).square().mean()
    expected = (3.0 * distance + 0.5 * collapse(features)) / 10
    assert penalty(features, before).item() == pytest.approx(expected.item())


def test_features_are_kept_from_collapsing_on_the_first_task_too(trained: TrainingContext) -> None:
    inputs = trained.samples.batch(torch.arange(5))
    plain, adagauss = Distillation(expected_classes=10), ProjectedDistillation(anti_collapse=0.5, expected_classes=10)
    collapsed = collapse(trained.student.features(inputs))
    expected = plain.loss(trained)(inputs, trained.class_indices) + 0.5 * collapsed / 10
    assert adagauss.loss(trained)(inputs, trained.class_indices).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("settings", [{"objective": "adagauss"}, {"rotation_labels": 1.0}])
def test_auxiliary_heads_are_trained_and_dropped(settings: dict[str, Any], images: Stream) -> None:
    learner, plain = quick("features", **settings), quick("features")
    for one in (learner, plain):
        for task in images:
            one.learn(task)
    assert not learner.trained.auxiliary
    assert learner.state().keys() == plain.state().keys()
    assert not learner.trained.extracts_like(plain.trained)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rotated_images_add_the_loss_of_an_auxiliary_head(objective: str, images: Stream) -> None:
    learner = quick("features", objective=objective, rotation_labels=0.5)
    task = images.tasks[0]
    made = learner._context(task, None, SILENT)
    made.student.train()
    loss, both = learner.objective.loss(made), learner.objective.training_loss(made)
    inputs, class_indices = task.train.batch(torch.arange(6)), made.class_indices[:6]
    torch.manual_seed(3)
    turns = torch.randint(1, 4, (6,)).tolist()
    turned = torch.stack([image.rot90(turn, (0, 1)) for image, turn in zip(inputs, turns, strict=True)])
    scores = made.student.auxiliary["rotations"](made.student.features(turned))
    labels = torch.tensor([3 * int(c) + turn - 1 for c, turn in zip(class_indices, turns, strict=True)])
    extra = learner.objective.classification(scores, labels, torch.ones(6, dtype=torch.bool))
    torch.manual_seed(3)
    expected = loss(inputs, class_indices) + 0.5 * extra
    assert both(inputs, class_indices).item() == pytest.approx(expected.item(), rel=1e-4)


def test_rotation_labels_can_be_limited_to_the_first_task(images: Stream) -> None:
    plain, every = quick("features"), quick("features", rotation_labels=1.0)
    first = quick("features", rotation_labels=1.0, rotation_tasks="first")
    assert quick("features", rotation_tasks="first").training_settings(1) == plain.training_settings(1)
    assert first.training_settings(0) == every.training_settings(0) != plain.training_settings(0)
    assert first.training_settings(1) != every.training_settings(1)
    assert [first.work(10, task, tunes=True).passes for task in (0, 1)] == [2, 1]
    assert [every.work(10, task, tunes=True).passes for task in (0, 1)] == [2, 2]
    for one in (first, every):
        one.learn(images.tasks[0])
    assert first.trained.extracts_like(every.trained)
    plain.restore(first.state())  # so it trains on the second task from the same network
    for one in (first, every, plain):
        one.learn(images.tasks[1])
    assert first.trained.extracts_like(plain.trained) and not first.trained.extracts_like(every.trained)


def test_rotated_images_leave_the_running_statistics_alone() -> None:
    norm = nn.BatchNorm2d(2).train()
    with unchanged_statistics(norm):
        norm(torch.randn(4, 2, 3, 3) + 5)
    assert torch.equal(norm.running_mean, torch.zeros(2)) and norm.momentum == 0.1


def test_vectors_cannot_be_rotated(vectors: Stream) -> None:
    with pytest.raises(UsageError, match="rotation_labels"):
        quick("features", rotation_labels=1.0).learn(vectors.tasks[0])


def test_a_softmax_distils_at_a_temperature(vectors: Stream) -> None:
    scores, teacher = torch.tensor([[2.0, -1.0]]), torch.tensor([[0.5, 1.5]])
    objective = Distillation(loss_function="softmax", temperature=2.0)
    value = objective._distil(scores, teacher, torch.tensor([0]), torch.tensor([True, True]))
    expected = -((teacher / 2).softmax(1) * (scores / 2).log_softmax(1)).sum()
    assert float(value) == pytest.approx(float(expected))
