"""LUCIR: its three losses, old weights that stay, new ones that are imprinted, and features of both signs."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import patterns
from contexts import context
from torch import Tensor

from engram.data import Samples, Stream, Task, split
from engram.errors import UsageError
from engram.methods import Replay, make
from engram.methods.lucir import Rebalancing
from engram.network import CosineHead, make_network
from engram.network.losses import margin_ranking
from engram.progress import SILENT

QUICK = {"epochs": 3, "batch_size": 16, "learning_rate": 0.1, "images_per_class": 5}


def lucir(**settings: Any) -> Replay:
    made = make("lucir", **{**QUICK, **settings})
    assert isinstance(made, Replay)
    return made


def learned(stream: Stream, tasks: int, **settings: Any) -> Replay:
    one = lucir(**settings)
    for task in stream.tasks[:tasks]:
        one.learn(task)
    return one


# Margins between old classes and new ones

COSINES = torch.tensor(
    [
        [0.9, 0.1, 0.3, 0.6, 0.5],  # of class 0: short of the margin to 0.6 by 0.2, to 0.5 by 0.1
        [0.2, 0.4, -0.3, 0.1, -0.5],  # of class 1: to 0.1 by 0.2, to −0.3 not at all
        [0.9, 0.9, 0.9, -1.0, 0.9],  # of class 3, which is new
    ],
    dtype=torch.float64,
)
NEW = torch.tensor([False, False, True, True, True])


def test_samples_of_old_classes_are_ranked_against_the_two_nearest_new_classes() -> None:
    value = margin_ranking(COSINES, torch.tensor([0, 1, 3]), NEW, top_k=2, margin=0.5)
    assert value.item() == pytest.approx((0.2 + 0.1 + 0.2 + 0.0) / 4, abs=1e-12)


def test_top_k_and_margin_are_settings() -> None:
    value = margin_ranking(COSINES, torch.tensor([0, 1, 3]), NEW, top_k=1, margin=0.4)
    assert value.item() == pytest.approx((0.1 + 0.1) / 2, abs=1e-12)


def test_with_fewer_new_classes_than_top_k_all_are_ranked() -> None:
    new = torch.tensor([False, False, False, False, True])
    value = margin_ranking(COSINES, torch.tensor([0, 1, 3]), new, top_k=2, margin=0.5)
    # 0.5 − 0.9 + 0.5, 0.5 − 0.4 − 0.5 and, class 3 now being old, 0.5 + 1 + 0.9.
    assert value.item() == pytest.approx((0.1 + 0.0 + 2.4) / 3, abs=1e-12)


def test_without_old_samples_or_new_classes_the_margin_loss_is_0() -> None:
    assert margin_ranking(COSINES, torch.tensor([2, 4, 3]), NEW, top_k=2, margin=0.5).item() == 0.0
    none = torch.zeros(5, dtype=torch.bool)
    assert margin_ranking(COSINES, torch.tensor([0, 1, 3]), none, top_k=2, margin=0.5).item() == 0.0


# The loss


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    dot = sum(a * b for a, b in zip(left, right, strict=True))
    return dot / math.hypot(*left) / math.hypot(*right)


class Case:
    """A student of six classes and its teacher of four, in float64, and the three terms of their loss by hand."""

    def __init__(self, samples: Samples) -> None:
        made = [make_network("mlp", "cosine", samples, seed=seed, scale=7.0, last_relu=False) for seed in (0, 1)]
        self.teacher = made[0].grown(4, 0, "head").double().frozen()
        self.student = made[1].grown(6, 1, "head").double()
        self.inputs = samples.batch(torch.tensor([0, 1, 24, 25])).double()
        self.class_indices = torch.tensor([4, 1, 3, 5])
        features, before = self.student.features(self.inputs).tolist(), self.teacher.features(self.inputs).tolist()
        cosines = [[cosine(vector, row) for row in self.student.head.weight.tolist()] for vector in features]
        self.classification = self.forgetting = self.ranking = 0.0
        for i, class_index in enumerate(self.class_indices.tolist()):
            powers = [math.exp(7.0 * value) for value in cosines[i]]
            self.classification -= math.log(powers[class_index] / sum(powers)) / 4
            self.forgetting += (1 - cosine(features[i], before[i])) / 4
            if class_index < 4:
                self.ranking += sum(max(0.0, 0.5 - cosines[i][class_index] + cosines[i][new]) for new in (4, 5)) / 4
        assert self.ranking > 0 and self.forgetting > 0

    def loss(self, in_task: tuple[int, ...] = (4, 5), taught: bool = True, **settings: Any) -> float:
        mask = torch.isin(torch.arange(6), torch.tensor(in_task))
        one = context(self.student, self.teacher if taught else None, mask)
        return Rebalancing(**settings).loss(one)(self.inputs, self.class_indices).item()


@pytest.fixture
def case(vectors: Stream) -> Case:
    return Case(vectors.tasks[0].train)


def test_the_less_forget_term_weighs_the_root_of_old_over_new(case: Case) -> None:
    expected = case.classification + 5 * math.sqrt(4 / 2) * case.forgetting + case.ranking
    assert case.loss() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("freeze_old_weights", [True, False])
def test_every_term_counts_by_its_weight_alone(case: Case, freeze_old_weights: bool) -> None:
    whole = case.loss(less_forget=3.0, margin_weight=0.7, freeze_old_weights=freeze_old_weights)
    without_forgetting = case.loss(less_forget=0.0, margin_weight=0.7, freeze_old_weights=freeze_old_weights)
    without_margins = case.loss(less_forget=3.0, margin_weight=0.0, freeze_old_weights=freeze_old_weights)
    assert whole - without_forgetting == pytest.approx(3 * math.sqrt(2) * case.forgetting, rel=1e-9)
    assert whole - without_margins == pytest.approx(0.7 * case.ranking, rel=1e-9)
    plain = case.loss(less_forget=0.0, margin_weight=0.0, freeze_old_weights=freeze_old_weights)
    assert plain == pytest.approx(case.classification, rel=1e-9)


def test_a_known_class_with_new_images_counts_as_old(case: Case) -> None:
    assert case.loss(in_task=(0, 4, 5)) == case.loss()


def test_the_first_task_is_cross_entropy_alone(case: Case) -> None:
    assert case.loss(in_task=(0, 1, 2, 3, 4, 5), taught=False) == pytest.approx(case.classification, rel=1e-9)


def test_frozen_weights_of_old_classes_get_no_gradient(case: Case) -> None:
    moved = {}
    for freeze_old_weights in (True, False):
        case.student.zero_grad()
        one = context(case.student, case.teacher, torch.arange(6) >= 4)
        Rebalancing(freeze_old_weights=freeze_old_weights).loss(one)(case.inputs, case.class_indices).backward()
        assert case.student.head.weight.grad is not None
        moved[freeze_old_weights] = case.student.head.weight.grad.abs().sum(1) > 0
    assert moved[True].tolist() == [False] * 4 + [True] * 2
    assert moved[False].tolist() == [True] * 6


# Weights of classes


def test_frozen_weights_of_old_classes_stay_to_the_last_bit(vectors: Stream) -> None:
    one = learned(vectors, 1)
    for task in vectors.tasks[1:]:
        before = one.trained.head.weight.clone()
        one.learn(task)
        after = one.trained.head.weight
        assert torch.equal(after[: len(before)], before)
        assert len(after) == len(before) + 2


def test_weights_of_old_classes_move_if_they_are_not_frozen(vectors: Stream) -> None:
    one = learned(vectors, 1, freeze_old_weights=False)
    before = one.trained.head.weight.clone()
    one.learn(vectors.tasks[1])
    assert bool(((one.trained.head.weight[:2] - before).abs() > 1e-4).any(dim=1).all())


def test_imprinted_weights_are_the_mean_features_in_the_old_network(vectors: Stream) -> None:
    one, task = learned(vectors, 1), vectors.tasks[1]
    before = one.trained
    prepared = one._context(task, before, SILENT)
    one.objective.prepare(prepared)
    for class_index, label in enumerate(task.classes, start=2):
        total = [0.0] * 64
        for position in (task.train.labels == label).nonzero().squeeze(1):
            vector = before.features(task.train.batch(position[None]))[0].tolist()
            total = [sum_ + value / math.hypot(*vector) for sum_, value in zip(total, vector, strict=True)]
        expected = [value / math.hypot(*total) for value in total]
        assert prepared.student.head.weight[class_index].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(prepared.student.head.weight[:2], before.head.weight)


def test_new_weights_are_random_without_imprinting(vectors: Stream) -> None:
    one = learned(vectors, 1, imprint=False)
    weights = []
    for objective in (one.objective, Rebalancing()):
        prepared = one._context(vectors.tasks[1], one.network_, SILENT)
        weights.append(prepared.student.head.weight.detach().clone())
        objective.prepare(prepared)
        weights.append(prepared.student.head.weight.detach().clone())
    random, left, _, imprinted = weights
    assert torch.equal(random, left)
    assert not torch.allclose(random[2:], imprinted[2:], atol=0.1)


def test_in_the_first_task_nothing_is_imprinted(vectors: Stream) -> None:
    one = lucir()
    prepared = one._context(vectors.tasks[0], None, SILENT)
    before = prepared.student.head.weight.detach().clone()
    one.objective.prepare(prepared)
    assert torch.equal(prepared.student.head.weight, before)


def test_another_head_is_refused_before_training(vectors: Stream) -> None:
    one = lucir(head="linear")
    with pytest.raises(UsageError, match="cosine"):
        one.learn(vectors.tasks[0])
    assert one.network_ is None and one.tasks_ == 0


# Features


def task_for(network: str) -> Task:
    if network == "mlp":
        inputs = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
        samples = Samples.of(inputs, torch.arange(40) % 2)
        return Task(0, (0, 1), samples, samples)
    return split(patterns(classes=2, per_class=6, side=32 if network == "resnet32" else 8), classes_per_task=2).tasks[0]


def features_of(method: str, network: str) -> Tensor:
    """Features of a task in the method's new network, not yet trained."""
    task = task_for(network)
    student = make(method, network=network)._context(task, None, SILENT).student.eval()
    with torch.no_grad():
        return student.features(task.train.batch(torch.arange(len(task.train))))


@pytest.mark.parametrize("network", ["small", "mlp", "resnet32"])
def test_only_lucirs_features_have_both_signs(network: str) -> None:
    signed = features_of("lucir", network)
    assert bool((signed < 0).any()) and bool((signed > 0).any())
    for other in ("icarl", "features"):
        assert bool((features_of(other, network) >= 0).all())


# Fine-tuning the head on as many images of every class


def test_balanced_fine_tuning_changes_only_the_head(images: Stream) -> None:
    without, tuned = learned(images, 2), learned(images, 2, balanced_epochs=1.0)
    before, after = without.trained.state_dict(), tuned.trained.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.scale"}
    assert isinstance(tuned.trained.head, CosineHead)


def test_balanced_fine_tuning_needs_exemplars(images: Stream) -> None:
    without, tuned = learned(images, 1), learned(images, 1, balanced_epochs=1.0)
    before, after = without.trained.state_dict(), tuned.trained.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_defaults_are_the_papers() -> None:
    made = make("lucir")
    assert (made.head, made.last_relu) == ("cosine", False)
    training = made.training
    assert (training.epochs, training.learning_rate, training.learning_rate_decay, training.weight_decay) == (
        160,
        0.1,
        10.0,
        5e-4,
    )
    assert [round(share * training.epochs) for share in training.milestones] == [80, 120]
    assert made.objective == Rebalancing(less_forget=5.0, margin=0.5, top_k=2, imprint=True, freeze_old_weights=True)
