"""EEIL: distillation head by head, fine-tuning on balanced images, and noise on the gradient."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from contexts import context
from learners_made import same
from progress_made import Recorder
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Stream, concatenate
from engram.features import herd
from engram.methods import METHODS, Learner, Replay, TrainingContext, make
from engram.methods.eeil import CrossDistillation
from engram.network import Loss, Network, Training, extract, make_network
from engram.progress import SILENT

QUICK = {"epochs": 4, "batch_size": 16, "learning_rate": 0.05, "images_total": 20}


def eeil(**settings: Any) -> Replay:
    made = make("eeil", **{**QUICK, **settings})
    assert isinstance(made, Replay)
    return made


def learned(stream: Stream, tasks: int, **settings: Any) -> Replay:
    one = eeil(**settings)
    for task in stream.tasks[:tasks]:
        one.learn(task)
    return one


def weights_of(learner: Learner) -> dict[str, Tensor]:
    assert learner.network_ is not None
    return {name: tensor.clone() for name, tensor in learner.network_.state_dict().items()}


# The loss


def probabilities(scores: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(score / temperature) for score in scores]
    return [power / sum(powers) for power in powers]


class Case:
    """A student of seven classes and its teacher of five, two of the first task and three of the second, in float64."""

    def __init__(self, samples: Samples) -> None:
        made = [make_network("mlp", "linear", samples, seed=seed) for seed in (0, 1, 2)]
        grown = [network.grown(classes, 0, "head") for network, classes in zip(made, (5, 7, 7), strict=True)]
        with torch.no_grad():
            for network in grown:
                network.head.weight.mul_(20)  # so that the softmaxes are far from even
        self.teacher, self.before = grown[0].double().frozen(), grown[2].double().frozen()
        self.student = grown[1].double()
        self.inputs = samples.batch(torch.tensor([0, 24, 1])).double()
        self.class_indices = torch.tensor([5, 2, 6])

    def context(self, taught: bool = True) -> TrainingContext:
        in_task, task_of_class = torch.arange(7) >= 5, torch.tensor([0, 0, 1, 1, 1, 2, 2])
        return context(self.student, self.teacher if taught else None, in_task, task_of_class=task_of_class)

    def cross_entropy(self) -> float:
        scores = self.student(self.inputs)[1].tolist()
        return (
            -sum(
                math.log(probabilities(scores[i])[class_index])
                for i, class_index in enumerate(self.class_indices.tolist())
            )
            / 3
        )

    def distillation(self, teacher: Network, *heads: list[int], temperature: float = 2.0) -> float:
        total = 0.0
        both = [network(self.inputs)[1].tolist() for network in (self.student, teacher)]
        for ours, theirs in zip(*both, strict=True):
            for head in heads:
                targets = probabilities([theirs[k] for k in head], temperature)
                predicted = probabilities([ours[k] for k in head], temperature)
                total -= sum(p * math.log(q) for p, q in zip(targets, predicted, strict=True)) / 3
        return total


@pytest.fixture
def case(vectors: Stream) -> Case:
    return Case(vectors.tasks[0].train)


def test_every_earlier_task_is_distilled_as_a_head_of_its_own(case: Case) -> None:
    value = CrossDistillation().loss(case.context())(case.inputs, case.class_indices).item()
    assert value == pytest.approx(case.cross_entropy() + case.distillation(case.teacher, [0, 1], [2, 3, 4]), rel=1e-9)
    at_once = case.cross_entropy() + case.distillation(case.teacher, [0, 1, 2, 3, 4])
    assert abs(value - at_once) > 0.01


def test_temperature_and_weight_of_the_distillation_are_settings(case: Case) -> None:
    objective = CrossDistillation(temperature=3.0, head_distillation=0.4)
    distilled = case.distillation(case.teacher, [0, 1], [2, 3, 4], temperature=3.0)
    value = objective.loss(case.context())(case.inputs, case.class_indices).item()
    assert value == pytest.approx(case.cross_entropy() + 0.4 * distilled, rel=1e-9)


def test_without_distillation_or_a_teacher_the_loss_is_cross_entropy(case: Case) -> None:
    without = CrossDistillation(head_distillation=0.0).loss(case.context())(case.inputs, case.class_indices)
    first = CrossDistillation().loss(case.context(taught=False))(case.inputs, case.class_indices)
    assert [without.item(), first.item()] == pytest.approx([case.cross_entropy()] * 2, rel=1e-9)


def test_in_fine_tuning_the_network_before_it_is_the_teacher_of_every_head(case: Case) -> None:
    value = CrossDistillation()._loss(case.context(), case.before)(case.inputs, case.class_indices).item()
    expected = case.cross_entropy() + case.distillation(case.before, [0, 1], [2, 3, 4], [5, 6])
    assert value == pytest.approx(expected, rel=1e-9)


# Balanced fine-tuning


def test_balanced_samples_have_as_many_images_of_new_classes_as_exemplars_of_old_ones(vectors: Stream) -> None:
    one, task = learned(vectors, 2), vectors.tasks[2]  # 20 images of four classes: five of each
    present = one._context(task, one.network_, SILENT)
    positions = present.balanced()
    assert positions[:20].tolist() == list(range(20))
    assert torch.equal(present.samples.batch(positions[:20]), one.memory.images.rows)
    assert torch.bincount(present.class_indices[positions]).tolist() == [5] * 6
    features = F.normalize(extract(present.student.eval(), task.train))
    expected = []
    for label in task.classes:
        arrived = (task.train.labels == label).nonzero().squeeze(1)
        expected += arrived[herd(features[arrived], 5)].tolist()
    assert (positions[20:] - 20).tolist() == expected


def test_balanced_samples_complete_the_exemplars_of_a_known_class(vectors: Stream) -> None:
    one, known, new = learned(vectors, 2), vectors.tasks[0], vectors.tasks[2]  # five images of each of four classes
    both = replace(new, classes=(*known.classes, *new.classes), train=concatenate(known.train, new.train))
    present = one._context(both, one.network_, SILENT)
    assert torch.bincount(present.class_indices[present.balanced()]).tolist() == [5] * 6


@dataclass(frozen=True, kw_only=True)
class Recorded(CrossDistillation):
    """EEIL that records the teacher of the newest head, and the batches of fine-tuning."""

    before: list[Network] = field(default_factory=list)
    tuned_on: list[tuple[bytes, int]] = field(default_factory=list)

    def _loss(self, context: TrainingContext, before: Network | None) -> Loss:
        loss = super()._loss(context, before)
        if before is None:
            return loss
        self.before.append(before)

        def recorded(inputs: Tensor, class_indices: Tensor) -> Tensor:
            rows = [row.numpy().tobytes() for row in inputs]
            self.tuned_on.extend(zip(rows, class_indices.tolist(), strict=True))
            return loss(inputs, class_indices)

        return recorded


def test_fine_tuning_trains_on_balanced_images_with_the_previous_stage_as_teacher(vectors: Stream) -> None:
    one = learned(vectors, 1)
    recorded = one.objective = Recorded()
    plain = eeil(fine_tuning=0.0)
    plain.restore({name: tensor.clone() for name, tensor in one.state().items()})
    exemplars, task = one.memory.images, vectors.tasks[1]
    one.learn(task)
    plain.learn(task)
    assert len(recorded.before) == 1
    assert same(recorded.before[0].state_dict(), weights_of(plain))  # also after fine-tuning
    assert not same(weights_of(one), weights_of(plain))
    tuned_on = [one_of for one_of in sorted(set(recorded.tuned_on)) for _ in range(3)]
    assert sorted(recorded.tuned_on) == tuned_on  # 0.75 of four epochs
    assert torch.bincount(torch.tensor([class_index for _, class_index in set(recorded.tuned_on)])).tolist() == [10] * 4
    rows = {row for row, _ in recorded.tuned_on}
    assert rows >= {row.numpy().tobytes() for row in exemplars.rows}
    arrived = {row.numpy().tobytes() for row in task.train.batch(torch.arange(len(task.train)))}
    assert len(rows & arrived) == 20


def test_fine_tuning_needs_exemplars_and_a_positive_setting(vectors: Stream) -> None:
    with_it, without = eeil(), eeil(fine_tuning=0.0)
    recorders = []
    for task in vectors.tasks[:2]:
        for one in (with_it, without):
            recorders.append(Recorder())
            one.learn(task, recorders[-1])
        assert same(weights_of(with_it), weights_of(without)) == (task.index == 0)
    # 20 exemplars and 20 new ones in batches of 16 are three steps an epoch.
    fine_tuning = [[steps for name, steps, _ in each.phases if name == "fine-tune"] for each in recorders]
    assert fine_tuning == [[], [], [9], []]


def test_the_learning_rate_of_fine_tuning_is_a_setting(vectors: Stream) -> None:
    plain, still, tuned = (
        weights_of(learned(vectors, 2, **settings))
        for settings in ({"fine_tuning": 0.0}, {"fine_tuning_learning_rate": 1e-9}, {"fine_tuning_learning_rate": 0.1})
    )
    moved = {name: float((tuned[name] - plain[name]).abs().max()) for name in plain if "weight" in name}
    assert min(moved.values()) > 1e-4
    assert all(torch.allclose(still[name], plain[name], rtol=0, atol=1e-6) for name in plain)


# Noise on the gradient


def disturbed(vectors: Stream, *, batch: int, epoch: int, seed: int = 0, **settings: Any) -> tuple[Network, Tensor]:
    """The gradients of a network after noise was added to zeros, and that of its largest layer, 128 by 128."""
    network = make_network("mlp", "linear", vectors.tasks[0].train, seed=0).grown(2, 0, "head")
    for parameter in network.extractor.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Training(**settings)._add_noise(network, batch, epoch, torch.Generator().manual_seed(seed))
    largest = max(network.parameters(), key=lambda parameter: parameter.numel())
    assert largest.grad is not None and largest.grad.shape == (128, 128)
    return network, largest.grad


@pytest.mark.parametrize(("epoch", "batch"), [(0, 1), (0, 50), (3, 10)])
def test_the_noise_falls_from_epoch_to_epoch_and_is_that_of_a_sum_over_the_batch(
    vectors: Stream, epoch: int, batch: int
) -> None:
    _, noise = disturbed(vectors, batch=batch, epoch=epoch, gradient_noise=0.3)
    deviation = 0.3 / (1 + epoch) ** 0.55 / batch
    assert noise.std().item() == pytest.approx(deviation, rel=0.02)
    assert abs(noise.mean().item()) < 4 * deviation / 128


def test_how_fast_the_noise_falls_is_a_setting(vectors: Stream) -> None:
    _, noise = disturbed(vectors, batch=2, epoch=9, gradient_noise=0.5, gradient_noise_decay=1.0)
    assert noise.std().item() == pytest.approx(0.5 / 10 / 2, rel=0.02)


def test_a_parameter_without_a_gradient_gets_no_noise(vectors: Stream) -> None:
    network, _ = disturbed(vectors, batch=1, epoch=0, gradient_noise=0.3)
    assert network.head.weight.grad is None


def test_the_same_seed_gives_the_same_noise(vectors: Stream) -> None:
    first, again, other = (disturbed(vectors, batch=4, epoch=1, seed=seed, gradient_noise=0.3)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    once, twice, without = (weights_of(learned(vectors, 1, gradient_noise=noise)) for noise in (0.3, 0.3, 0.0))
    assert same(once, twice)
    assert not same(once, without)


def test_noise_is_off_unless_a_method_asks_for_it() -> None:
    assert Training().gradient_noise == 0.0
    assert {name for name in METHODS if make(name).training.gradient_noise} == {"eeil"}


def test_the_defaults_are_the_papers() -> None:
    made = make("eeil")
    training = made.training
    assert made.head == "linear"
    assert (training.epochs, training.learning_rate, training.learning_rate_decay, training.weight_decay) == (
        40,
        0.1,
        10.0,
        1e-4,
    )
    assert [round(share * training.epochs) for share in training.milestones] == [10, 20, 30]
    assert (training.brightness, training.contrast) == (63.0, 0.8)
    assert (training.gradient_noise, training.gradient_noise_decay) == (0.3, 0.55)
    objective = made.objective
    assert isinstance(objective, CrossDistillation)
    assert (objective.temperature, objective.head_distillation) == (2.0, 1.0)
    assert objective.fine_tuning * training.epochs == 30
    assert objective.fine_tuning_learning_rate * training.learning_rate == pytest.approx(0.01)
