"""BiC: the correction and how it is fitted, the loss, and the images that are never trained on."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from contexts import context
from scipy.optimize import minimize
from torch import Tensor

from engram.data import Dataset, Samples, Stream, Task, split
from engram.methods import Replay, TrainingContext, make
from engram.methods.bic import BiasCorrection, fit_correction
from engram.network import CorrectedHead, Loss, Network, make_network
from engram.progress import SILENT

QUICK = {"epochs": 3, "batch_size": 32, "learning_rate": 0.05}


def overlapping(per_class: int) -> Stream:
    """Three tasks of two classes, vectors around centres so close that some are misclassified."""
    draws = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(6, 6, generator=draws)
    labels = torch.arange(6).repeat_interleave(per_class)
    train, test = (centres[labels] + torch.randn(len(labels), 6, generator=draws) for _ in range(2))
    names = tuple(f"class {label}" for label in range(6))
    return split(Dataset("overlapping", Samples.of(train, labels), Samples.of(test, labels), names), classes_per_task=2)


def replay(method: str = "bic", **settings: Any) -> Replay:
    made = make(method, **{**QUICK, **settings})
    assert isinstance(made, Replay)
    return made


def head_of(network: Network | None) -> CorrectedHead:
    assert network is not None and isinstance(network.head, CorrectedHead)
    return network.head


# Fitting the correction


def biased(count: int, alpha: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of six classes, the last two biased by α and β, and labels drawn from the unbiased probabilities."""
    draws = torch.Generator().manual_seed(0)
    right = 2 * torch.randn(count, 6, generator=draws, dtype=torch.float64)
    class_indices = torch.multinomial(right.softmax(1), 1, generator=draws).squeeze(1)
    newest = torch.tensor([False] * 4 + [True] * 2)
    return torch.where(newest, (right - beta) / alpha, right), class_indices, newest


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.6, -1.2), (0.8, 0.7), (1.5, -0.4)])
def test_a_known_bias_is_found(alpha: float, beta: float) -> None:
    found = fit_correction(*biased(20_000, alpha, beta), penalty=0.0)
    assert found == pytest.approx((alpha, beta), abs=0.05)


@pytest.mark.parametrize("penalty", [0.0, 0.1, 3.0])
def test_alpha_and_beta_are_those_that_scipy_finds(penalty: float) -> None:
    scores, class_indices, newest = biased(150, 0.6, -1.2)
    raw, labels, mask = scores.numpy(), class_indices.numpy(), newest.numpy()

    def cost(pair: np.ndarray) -> float:
        corrected = np.where(mask, pair[0] * raw + pair[1], raw)
        logs = corrected - np.log(np.exp(corrected).sum(axis=1, keepdims=True))
        return float(-logs[np.arange(len(labels)), labels].mean() + penalty / 2 * (pair[1] ** 2 + (pair[0] - 1) ** 2))

    best = minimize(cost, [1.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-14})
    assert fit_correction(scores, class_indices, newest, penalty) == pytest.approx(tuple(best.x), abs=1e-5)


def test_a_larger_penalty_corrects_less() -> None:
    case = biased(150, 0.6, -1.2)
    found = [fit_correction(*case, penalty=penalty) for penalty in (0.0, 0.1, 3.0)]
    off = [math.hypot(alpha - 1, beta) for alpha, beta in found]
    assert off[0] > 1.1 * off[1] > 1.1**2 * off[2] > 0


def test_alpha_stays_small_if_the_samples_are_separable() -> None:
    scores = torch.tensor([[2.0, -1.0, -2.0], [1.0, 3.0, -3.0], [-1.0, 0.5, 3.0], [0.0, -1.0, 2.0]])
    alpha, beta = fit_correction(scores, torch.tensor([0, 1, 2, 2]), torch.tensor([False, False, True]), penalty=0.1)
    assert 0.5 < alpha < 2
    assert abs(beta) < 1


@pytest.mark.parametrize("class_index", [0, 5])
def test_without_samples_of_old_and_new_classes_nothing_is_corrected(class_index: int) -> None:
    scores, class_indices, newest = biased(50, 0.6, -1.2)
    assert fit_correction(scores, torch.full_like(class_indices, class_index), newest, penalty=0.1) == (1.0, 0.0)


# The loss


@dataclass(frozen=True)
class Pair:
    """A student of six classes, a teacher of four that corrects two of them, and three inputs, in float64."""

    student: Network
    teacher: Network
    inputs: Tensor
    class_indices: Tensor

    def loss(self, taught: bool = True, **settings: Any) -> float:
        in_task = torch.tensor([False] * 4 + [True] * 2)
        made = context(self.student, self.teacher if taught else None, in_task)
        return BiasCorrection(**settings).loss(made)(self.inputs, self.class_indices).item()


@pytest.fixture
def pair(vectors: Stream) -> Pair:
    samples = vectors.tasks[0].train
    teacher = make_network("mlp", "corrected", samples, seed=0).grown(4, 0, "head").double()
    with torch.no_grad():
        teacher.head.weight.mul_(8)
    head_of(teacher).correct(0.5, -1.5, torch.tensor([False, False, True, True]))
    student = make_network("mlp", "corrected", samples, seed=1).grown(6, 1, "head").double()
    with torch.no_grad():
        student.head.weight.mul_(8)
    return Pair(student, teacher.frozen(), samples.batch(torch.arange(3)).double(), torch.tensor([4, 1, 5]))


def linear_scores(network: Network, inputs: Tensor) -> list[list[float]]:
    """w · h(x) + b by a loop, without the correction."""
    rows = list(zip(network.head.weight.tolist(), head_of(network).bias.tolist(), strict=True))
    return [
        [sum(w * x for w, x in zip(weight, features, strict=True)) + bias for weight, bias in rows]
        for features in network.features(inputs).tolist()
    ]


def probabilities(scores: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(score / temperature) for score in scores]
    return [power / sum(powers) for power in powers]


def cross_entropy(pair: Pair) -> float:
    scores = linear_scores(pair.student, pair.inputs)
    return (
        -sum(
            math.log(probabilities(scores[i])[class_index]) for i, class_index in enumerate(pair.class_indices.tolist())
        )
        / 3
    )


def distillation(pair: Pair, temperature: float = 2.0) -> float:
    """Between softmaxes over the four old classes: of the student's scores and of the teacher's corrected ones."""
    total = 0.0
    both = [linear_scores(network, pair.inputs) for network in (pair.student, pair.teacher)]
    for student, teacher in zip(*both, strict=True):
        corrected = [*teacher[:2], *(0.5 * score - 1.5 for score in teacher[2:])]
        ours, theirs = probabilities(student[:4], temperature), probabilities(corrected, temperature)
        total -= sum(p * math.log(q) for p, q in zip(theirs, ours, strict=True)) / 3
    return total


def test_the_loss_weighs_cross_entropy_and_distillation_by_the_share_of_old_classes(pair: Pair) -> None:
    expected = (1 - 4 / 6) * cross_entropy(pair) + 4 / 6 * distillation(pair)
    assert pair.loss() == pytest.approx(expected, rel=1e-9)


def test_the_share_and_the_temperature_are_settings(pair: Pair) -> None:
    expected = 0.9 * cross_entropy(pair) + 0.1 * distillation(pair, temperature=3.0)
    assert pair.loss(distillation_share=0.1, temperature=3.0) == pytest.approx(expected, rel=1e-9)
    assert pair.loss(distillation_share=0.0) == pytest.approx(cross_entropy(pair), rel=1e-9)


def test_labels_count_in_a_task_without_new_classes(pair: Pair) -> None:
    in_task = torch.tensor([True] * 2 + [False] * 2)
    known = (
        make_network("mlp", "corrected", Samples.of(pair.inputs, pair.class_indices), seed=1)
        .grown(4, 1, "head")
        .double()
    )
    loss = BiasCorrection().loss(context(known, pair.teacher, in_task))
    losses = [loss(pair.inputs, torch.tensor(class_indices)).item() for class_indices in ([0, 1, 0], [1, 0, 1])]
    halves = [
        BiasCorrection(distillation_share=0.5).loss(context(known, pair.teacher, in_task))(
            pair.inputs, torch.tensor([0, 1, 0])
        )
    ]
    assert losses[0] == pytest.approx(halves[0].item(), rel=1e-9)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_the_first_task_is_plain_cross_entropy(pair: Pair) -> None:
    assert pair.loss(taught=False) == pytest.approx(cross_entropy(pair), rel=1e-9)


# The correction of a learner


@pytest.fixture(scope="module")
def stream() -> Stream:
    return overlapping(60)


@pytest.fixture(scope="module")
def corrected(stream: Stream) -> Replay:
    """A learner of two tasks; not to be changed."""
    one = replay(images_per_class=20)
    for task in stream.tasks[:2]:
        one.learn(task)
    return one


def test_weight_decay_can_fall_with_the_tasks(stream: Stream) -> None:
    decays = []
    for falls in (False, True):
        one = replay(images_per_class=4, epochs=1, weight_decay=0.6, weight_decay_falls=falls)
        for task in stream.tasks:
            decays.append(one._context(task, one.network_, SILENT).training.weight_decay)
            one.learn(task)
    assert decays == pytest.approx([0.6, 0.6, 0.6, 0.6, 0.3, 0.2])


def test_weight_decay_that_falls_is_used_in_training(stream: Stream) -> None:
    def trained(**settings: Any) -> dict[str, Tensor]:
        one = replay(images_per_class=4, epochs=1, weight_decay_falls=True, **settings)
        one.learn(stream.tasks[0])
        return one.train(stream.tasks[1]).state_dict()

    strong, weak = trained(weight_decay=50.0), trained(weight_decay=0.0)
    norms = [sum(float(each.norm()) for name, each in state.items() if "weight" in name) for state in (strong, weak)]
    assert norms[0] < 0.9 * norms[1]


def test_the_first_task_is_not_corrected(stream: Stream) -> None:
    one = replay(images_per_class=20)
    one.learn(stream.tasks[0])
    head = head_of(one.network_)
    assert (float(head.alpha), float(head.beta), head.newest.tolist()) == (1.0, 0.0, [False, False])


def test_only_scores_of_the_newest_classes_are_corrected(corrected: Replay, stream: Stream) -> None:
    head, features = head_of(corrected.network_), corrected.extract(stream.tasks[0].test)
    alpha, beta = float(head.alpha), float(head.beta)
    assert abs(alpha - 1) > 0.01 and abs(beta) > 0.01
    raw = features @ head.weight.T + head.bias
    scores = corrected.classify(features)
    torch.testing.assert_close(scores[:, :2], raw[:, :2])
    torch.testing.assert_close(scores[:, 2:], alpha * raw[:, 2:] + beta)


def test_the_correction_is_fitted_on_held_out_images(corrected: Replay, stream: Stream) -> None:
    one = replay(images_per_class=20)
    one.learn(stream.tasks[0])
    held_out = one._context(stream.tasks[1], one.network_, SILENT).held_out
    assert held_out is not None
    samples, class_indices = held_out
    head = head_of(corrected.network_)
    raw = corrected.extract(samples) @ head.weight.T + head.bias
    expected = fit_correction(raw, class_indices, torch.tensor([False, False, True, True]), penalty=0.1)
    assert (float(head.alpha), float(head.beta)) == pytest.approx(expected, abs=1e-4)


def test_the_next_student_starts_uncorrected_and_its_teacher_still_corrects(corrected: Replay, stream: Stream) -> None:
    head = head_of(corrected.network_)
    next_one = corrected._context(stream.tasks[2], corrected.network_, SILENT)
    student, teacher = head_of(next_one.student), head_of(next_one.teacher)
    features = corrected.extract(stream.tasks[0].test)
    with torch.no_grad():
        assert torch.equal(teacher(features), corrected.head_scores(features))
        torch.testing.assert_close(student(features)[:, :4], features @ head.weight.T + head.bias)
    assert not torch.allclose(student(features)[:, 2:4], teacher(features)[:, 2:])
    assert (float(student.alpha), float(student.beta), bool(student.newest.any())) == (1.0, 0.0, False)


def test_a_restored_learner_corrects_as_before(corrected: Replay, stream: Stream) -> None:
    restored = replay(images_per_class=20)
    restored.restore({name: tensor.clone() for name, tensor in corrected.state().items()})
    head, before = head_of(restored.network_), head_of(corrected.network_)
    assert torch.equal(head.alpha, before.alpha) and torch.equal(head.beta, before.beta)
    inputs = stream.tasks[1].test.batch(torch.arange(20))
    assert torch.equal(restored.scores(inputs), corrected.scores(inputs))


def test_with_a_linear_head_the_same_weights_are_learned_and_nothing_is_corrected(
    corrected: Replay, stream: Stream
) -> None:
    one = replay("bic-uncorrected", images_per_class=20)
    for task in stream.tasks[:2]:
        one.learn(task)
    assert one.network_ is not None and not isinstance(one.network_.head, CorrectedHead)
    assert torch.equal(one.network_.head.weight, head_of(corrected.network_).weight)
    assert not torch.equal(*(each.scores(stream.tasks[0].test.batch(torch.arange(9))) for each in (one, corrected)))


def test_the_correction_raises_accuracy_when_old_classes_have_few_images() -> None:
    stream = overlapping(150)
    accuracies: dict[str, list[list[float]]] = {}
    for method in ("bic", "bic-uncorrected"):
        one = replay(method, epochs=10, images_per_class=20)
        accuracies[method] = []
        for seen, task in enumerate(stream, start=1):
            one.learn(task)
            right = []
            for earlier in stream.tasks[:seen]:
                best = one.classify(one.extract(earlier.test)).argmax(1)
                right.append(float((torch.tensor(one.classes_)[best] == earlier.test.labels).double().mean()))
            accuracies[method].append(right)
    better, worse = accuracies["bic"], accuracies["bic-uncorrected"]
    assert better[0] == worse[0]
    for seen in (1, 2):
        assert np.mean(better[seen]) > np.mean(worse[seen]) + 0.02
        assert np.mean(better[seen][:-1]) > np.mean(worse[seen][:-1]) + 0.05  # the old classes


# Images that are never trained on


@dataclass(frozen=True, kw_only=True)
class Recorded(BiasCorrection):
    """BiC that records, for each task, the bytes of the rows it trained on and of those held out."""

    trained: list[set[bytes]] = field(default_factory=list)
    held_out: list[dict[bytes, int]] = field(default_factory=list)  # and their class indices

    def loss(self, context: TrainingContext) -> Loss:
        loss = super().loss(context)
        assert context.held_out is not None
        samples, class_indices = context.held_out
        rows = [row.numpy().tobytes() for row in samples.batch(torch.arange(len(samples)))]
        self.trained.append(set())
        self.held_out.append(dict(zip(rows, class_indices.tolist(), strict=True)))

        def recorded(inputs: Tensor, class_indices: Tensor) -> Tensor:
            self.trained[-1].update(row.numpy().tobytes() for row in inputs)
            return loss(inputs, class_indices)

        return recorded


EXEMPLARS: list[dict[str, Any]] = [{"images_per_class": 20}, {"images_total": 120}]


@pytest.mark.parametrize("exemplars", EXEMPLARS, ids=["per-class", "total"])
def test_held_out_images_are_never_trained_on(stream: Stream, exemplars: dict[str, Any]) -> None:
    one = replay(epochs=1, **exemplars)
    recorded = one.objective = Recorded()
    held_out: set[bytes] = set()
    trained: set[bytes] = set()
    for task in stream:
        stored = {row.numpy().tobytes() for row in one.memory.images.rows}
        one.learn(task)
        held_out |= recorded.held_out[-1].keys()
        trained |= recorded.trained[-1]
        arrived = {row.numpy().tobytes() for row in task.train.batch(torch.arange(len(task.train)))}
        assert recorded.trained[-1] | recorded.held_out[-1].keys() == stored | arrived
        assert not held_out & trained
    assert held_out & {row.numpy().tobytes() for row in one.memory.images.rows}
    assert trained & {row.numpy().tobytes() for row in one.memory.images.rows}


@pytest.mark.parametrize("exemplars", EXEMPLARS, ids=["per-class", "total"])
def test_one_in_ten_exemplars_is_held_out(stream: Stream, exemplars: dict[str, Any]) -> None:
    one = replay(epochs=1, **exemplars)
    recorded = one.objective = Recorded()
    held_out: dict[bytes, int] = {}
    for task in stream:
        one.learn(task)
        held_out |= recorded.held_out[-1]
        memory, classes = one.memory.images, len(one.classes_)
        size = exemplars.get("images_per_class") or 120 // classes
        assert memory.counts.tolist() == [size] * classes
        for class_index in range(classes):
            rows = [row.numpy().tobytes() for row in memory.rows[memory.class_indices == class_index]]
            assert [place for place, row in enumerate(rows) if row in held_out] == list(range(1, size, 10))
            assert all(held_out[rows[place]] == class_index for place in range(1, size, 10))


@pytest.mark.parametrize(
    ("exemplars", "expected"), [(EXEMPLARS[0], [2, 2, 2]), (EXEMPLARS[1], [6, 6, 3])], ids=["per-class", "total"]
)
def test_as_many_are_held_out_of_a_new_class_as_of_an_old_one(
    stream: Stream, exemplars: dict[str, Any], expected: list[int]
) -> None:
    one = replay(epochs=1, **exemplars)
    for seen, (number, task) in enumerate(zip(expected, stream, strict=True), start=1):
        held_out = one._context(task, one.network_, SILENT).held_out
        assert held_out is not None
        assert torch.bincount(held_out[1]).tolist() == [number] * (2 * seen)
        one.learn(task)


def test_the_images_held_out_are_a_function_of_the_seed(stream: Stream) -> None:
    one, other = replay(images_per_class=20), replay(images_per_class=20, seed=1)
    task = stream.tasks[0]
    assert torch.equal(one.held_out(task), one.held_out(task))
    assert not torch.equal(one.held_out(task), other.held_out(task))


def test_new_images_of_a_known_class_do_not_release_held_out_ones(stream: Stream) -> None:
    one = replay(epochs=1, images_per_class=20)
    recorded = one.objective = Recorded()
    first, second = stream.tasks[:2]
    places = [(first.train.labels == label).nonzero().squeeze(1) for label in first.classes]
    early = first.train.select(torch.cat([places[0][:30], places[1]]))
    one.learn(Task(0, first.classes, early, first.test))
    both = (*second.classes, first.classes[0])
    rows = torch.cat([second.train.rows, first.train.rows[places[0][30:]]])
    late = Samples(first.train.inputs, rows, torch.cat([second.train.labels, first.train.labels[places[0][30:]]]))
    one.learn(Task(1, both, late, late))
    one.learn(stream.tasks[2])
    held_out = set().union(*recorded.held_out)
    assert not held_out & set().union(*recorded.trained)
    memory = one.memory.images
    assert memory.counts.tolist() == [20] * 6
    rows_of_it = [row.numpy().tobytes() for row in memory.rows[memory.class_indices == 0]]
    assert [place for place, row in enumerate(rows_of_it) if row in held_out] == [1, 11]


def test_a_small_class_does_not_limit_later_classes() -> None:
    stream = overlapping(40)
    first = stream.tasks[0]
    few = torch.cat([(first.train.labels == label).nonzero().squeeze(1)[:5] for label in first.classes])
    one = replay(epochs=1, images_per_class=20)
    with pytest.warns(match="fewer than 20"):
        one.learn(Task(0, first.classes, first.train.select(few), first.test))
    one.learn(stream.tasks[1])
    assert one.memory.images.counts.tolist() == [5, 5, 20, 20]
