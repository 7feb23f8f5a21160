"""Image replay and iCaRL: which images are stored, how many, their loss, and the nearest mean."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from contexts import context
from learners_made import same
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Stream, Task
from engram.errors import UsageError
from engram.features import Memory
from engram.methods import Learner, Replay, TrainingContext, make
from engram.methods.objectives import Distillation
from engram.methods.replay import Exemplars
from engram.network import Loss, Network, extract, make_network
from engram.progress import Phase

QUICK = {"epochs": 3, "batch_size": 16, "learning_rate": 0.2, "expected_classes": 6}


def replay(method: str = "icarl", **settings: Any) -> Replay:
    made = make(method, **{**QUICK, **settings})
    assert isinstance(made, Replay)
    return made


@pytest.mark.parametrize("method", ["icarl", "bic"])
def test_a_replay_method_needs_images(method: str, images: Stream) -> None:
    learner = make(method, epochs=1, images_per_class=0)
    with pytest.raises(UsageError, match=f"'{method}'"):
        learner.learn(images.tasks[0])


def unit_features(learner: Learner, inputs: Tensor) -> Tensor:
    """Unit features of raw inputs in the learner's network."""
    return F.normalize(extract(learner.trained, Samples.of(inputs, torch.zeros(len(inputs), dtype=torch.int64))))


def greedy(vectors: Tensor, keep: int) -> list[int]:
    """Herding by its definition: each pick brings the mean of the picked nearest to the mean of all."""
    points = vectors.double().numpy()
    picked: list[int] = []
    for k in range(1, keep + 1):
        distances = np.linalg.norm(points.mean(0) - (points[picked].sum(0) + points) / k, axis=1)
        distances[picked] = np.inf
        picked.append(int(distances.argmin()))
    return picked


class Watcher(Phase):
    """A progress that counts the exemplars at every step."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.counted: list[tuple[str, int]] = []

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        self.name = name
        self.advance()
        yield self
        self.advance()

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.counted.append((self.name, len(self.learner.memory.images)))


# Classification


def test_predictions_are_the_nearest_mean_of_the_exemplars_in_the_present_network(vectors: Stream) -> None:
    one = replay(images_total=30)
    for seen, task in enumerate(vectors.tasks[:2], start=1):
        one.learn(task)
        memory = one.memory.images
        means = []
        for class_index in range(2 * seen):
            units = unit_features(one, memory.rows[memory.class_indices == class_index]).double()
            mean = sum(units, torch.zeros(64)) / len(units)
            means.append(mean / math.hypot(*mean.tolist()))
        for earlier in vectors.tasks[:seen]:
            features = one.extract(earlier.test)
            for vector, scores in zip(features.double(), one.classify(features), strict=True):
                unit = vector / math.hypot(*vector.tolist())
                distances = [math.hypot(*(unit - mean).tolist()) for mean in means]
                assert int(scores.argmax()) == distances.index(min(distances))
                assert scores.tolist() == pytest.approx([-(distance**2) for distance in distances], abs=1e-5)


@pytest.mark.parametrize(("flip", "mirrored_means"), [(True, True), (True, False), (False, True)])
def test_class_means_include_mirror_images_if_training_mirrors(
    images: Stream, flip: bool, mirrored_means: bool
) -> None:
    one = replay(images_per_class=4, flip=flip, mirrored_means=mirrored_means, epochs=1)
    one.learn(images.tasks[0])
    assert one.classifier_ is not None
    memory = one.memory.images
    for class_index in range(2):
        rows = memory.rows[memory.class_indices == class_index]  # (4, height, width, channels)
        views = torch.cat([rows, rows.flip(2)]) if flip and mirrored_means else rows
        mean = F.normalize(unit_features(one, views).double().mean(0), dim=0)
        features = F.normalize(one.extract(images.tasks[0].test))
        expected = -(features.double() - mean).square().sum(1)
        assert one.classify(features)[:, class_index].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_heads_scores_differ_from_those_of_the_nearest_mean(vectors: Stream) -> None:
    one = replay(images_total=30)
    for task in vectors.tasks[:2]:
        one.learn(task)
    test = vectors.tasks[0].test
    features = one.extract(test)
    scores = one.head_scores(features)
    assert torch.equal(scores, one.trained(test.batch(torch.arange(len(test))))[1])
    assert scores.shape == (len(test), 4)
    assert not torch.equal(scores.argmax(1), one.classify(features).argmax(1))


def test_with_predict_with_head_the_head_classifies(vectors: Stream) -> None:
    one = replay(images_total=30, predict_with="head")
    one.learn(vectors.tasks[0])
    features = one.extract(vectors.tasks[0].test)
    assert torch.equal(one.classify(features), one.head_scores(features))


# Which images are stored


def test_exemplars_are_stored_in_herding_order(images: Stream) -> None:
    one = replay("gamma-icarl", images_per_class=4)
    for already, task in zip((0, 8), images, strict=True):
        sources = one.learn(task)
        features = unit_features(one, task.train.batch(torch.arange(len(task.train))))
        expected = [-1 - slot for slot in range(already)]
        for label in task.classes:
            positions = (task.train.labels == label).nonzero().squeeze(1)
            expected += positions[greedy(features[positions], 4)].tolist()
        assert sources.images.tolist() == expected
        assert len(sources.features) == 0


def test_exemplars_are_the_original_images_and_their_bytes_are_counted(images: Stream) -> None:
    one = replay("gamma-icarl", images_per_class=4)
    originals = torch.empty(0, 8, 8, 3, dtype=torch.uint8)
    for task in images:
        sources = one.learn(task)
        originals = torch.cat([originals, task.train.batch(sources.images[sources.images >= 0])])
    memory = one.memory.images
    assert memory.rows.dtype == torch.uint8
    assert torch.equal(memory.rows, originals)
    assert memory.nbytes == one.memory.nbytes == 16 * 8 * 8 * 3


def test_old_and_new_images_of_a_known_class_are_herded_together(vectors: Stream) -> None:
    first, second = vectors.tasks[:2]
    again = first.classes[0]
    halves = [
        torch.cat([(first.train.labels == label).nonzero().squeeze(1)[part] for label in classes])
        for part, classes in ((slice(12), first.classes), (slice(12, 24), (again,)))
    ]
    one = replay("gamma-icarl", images_per_class=6)
    early = first.train.select(halves[0])
    one.learn(Task(0, first.classes, early, early))
    before = one.memory.images.rows[:6]
    rows = torch.cat([second.train.rows, first.train.select(halves[1]).rows])
    late = Samples(first.train.inputs, rows, torch.cat([second.train.labels, torch.full((12,), again)]))
    sources = one.learn(Task(1, (*second.classes, again), late, late))
    candidates = torch.cat([before, first.train.batch(halves[1])])
    expected = candidates[greedy(unit_features(one, candidates), 6)]
    assert torch.equal(one.memory.images.rows[:6], expected)
    assert bool((sources.images[:6] < 0).any()) and bool((sources.images[:6] >= 0).any())
    assert one.memory.images.counts.tolist() == [6] * 4


# How many


def test_the_exemplars_of_a_class_stay_the_same(vectors: Stream) -> None:
    one = replay("gamma-icarl", images_per_class=5)
    for seen, task in enumerate(vectors, start=1):
        before = one.memory.images.rows.tolist()
        one.learn(task)
        assert one.memory.images.counts.tolist() == [5] * (2 * seen)
        assert one.memory.images.rows.tolist()[: len(before)] == before


def test_a_total_is_shared_equally_and_every_class_keeps_its_first_exemplars(vectors: Stream) -> None:
    one = replay(images_total=40)
    for classes, share, task in zip((2, 4, 6), (20, 10, 6), vectors, strict=True):
        before = one.memory.images
        sources = one.learn(task)
        memory = one.memory.images
        assert memory.counts.tolist() == [share] * classes
        for class_index in range(classes - 2):
            assert torch.equal(
                memory.rows[memory.class_indices == class_index],
                before.rows[before.class_indices == class_index][:share],
            )
            first = class_index * (len(before) // (classes - 2))
            assert sources.images[memory.class_indices == class_index].tolist() == [
                -1 - first - place for place in range(share)
            ]


def test_a_total_is_never_exceeded(vectors: Stream) -> None:
    one = replay(images_total=40)
    watcher = Watcher(one)
    for task in vectors:
        one.learn(task, watcher)
    assert {name for name, _ in watcher.counted} == {"train", "extract", "herd"}
    assert [max(count for phase, count in watcher.counted if phase == name) for name in ("train", "herd")] == [40, 40]
    assert max(count for _, count in watcher.counted) == 40
    assert len(one.memory.images) == 36


def test_a_total_smaller_than_the_number_of_classes_is_refused_before_training(vectors: Stream) -> None:
    one = replay(images_total=3)
    one.learn(vectors.tasks[0])
    before, watcher = {name: tensor.clone() for name, tensor in one.state().items()}, Watcher(one)
    with pytest.raises(UsageError, match=r"images_total=3 .* 4 classes"):
        one.learn(vectors.tasks[1], watcher)
    assert not watcher.counted
    assert same(before, one.state())


def test_a_total_of_as_many_images_as_classes_suffices(vectors: Stream) -> None:
    one = replay(images_total=4)
    for task in vectors.tasks[:2]:
        one.learn(task)
    assert one.memory.images.counts.tolist() == [1] * 4


def test_images_per_class_and_images_total_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="images_per_class or images_total"):
        make("icarl", images_per_class=3, images_total=30)


def test_setting_one_number_drops_the_default_of_the_other(vectors: Stream) -> None:
    assert replay().exemplars == Exemplars(images_total=2000)
    assert replay("gamma-icarl").exemplars == Exemplars(images_per_class=20)
    per_class, total = replay(images_per_class=3), replay("gamma-icarl", images_total=30)
    assert per_class.exemplars == Exemplars(images_per_class=3)
    assert total.exemplars == Exemplars(images_total=30)
    for task in vectors.tasks[:2]:
        per_class.learn(task)
        total.learn(task)
    assert per_class.memory.images.counts.tolist() == [3] * 4
    assert total.memory.images.counts.tolist() == [7] * 4


def test_twenty_images_per_class_are_the_default() -> None:
    assert [Exemplars().per_class(classes) for classes in (1, 100)] == [20, 20]


# Their loss


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


def binary(score: float, target: float) -> float:
    return -(target * math.log(sigmoid(score)) + (1 - target) * math.log(1 - sigmoid(score)))


@dataclass(frozen=True)
class Batch:
    """Two exemplars of classes 0 and 1, and two of the new classes 2 and 3, for two networks in float64."""

    student: Network
    teacher: Network
    inputs: Tensor
    class_indices: Tensor

    @property
    def scores(self) -> tuple[list[list[float]], list[list[float]]]:
        return self.student(self.inputs)[1].tolist(), self.teacher(self.inputs)[1].tolist()

    def loss(self, class_indices: Tensor | None = None, **settings: Any) -> float:
        objective = Distillation(expected_classes=10, feature_distillation=0.0, **settings)
        loss = objective.loss(context(self.student, self.teacher, torch.tensor([False, False, True, True])))
        return loss(self.inputs, self.class_indices if class_indices is None else class_indices).item()


@pytest.fixture
def batch(vectors: Stream) -> Batch:
    samples = vectors.tasks[0].train
    teacher = make_network("mlp", "linear", samples, seed=0).grown(2, 0, "head").double().frozen()
    student = make_network("mlp", "linear", samples, seed=1).grown(4, 1, "head").double()
    return Batch(student, teacher, samples.batch(torch.tensor([0, 24, 3, 30])).double(), torch.tensor([0, 3, 1, 2]))


def test_targets_of_an_exemplar_are_the_teachers_scores_and_0_for_new_classes(batch: Batch) -> None:
    scores, targets = batch.scores
    expected = 0.0
    for i, class_index in enumerate(batch.class_indices.tolist()):
        expected += sum(binary(scores[i][k], sigmoid(targets[i][k])) for k in (0, 1))
        expected += sum(binary(scores[i][k], float(k == class_index)) for k in (2, 3))
    assert batch.loss() == pytest.approx(expected / 4 / 10, rel=1e-9)


def test_the_label_of_an_exemplar_is_not_used(batch: Batch) -> None:
    assert batch.loss(torch.tensor([1, 3, 0, 2])) == batch.loss()
    assert batch.loss(torch.tensor([0, 2, 1, 3])) != batch.loss()


def test_the_label_of_an_exemplar_can_be_its_target(batch: Batch) -> None:
    scores, targets = batch.scores
    expected = 0.0
    for i, class_index in enumerate(batch.class_indices.tolist()):
        for k in (0, 1):
            expected += binary(scores[i][k], float(k == class_index) if class_index < 2 else sigmoid(targets[i][k]))
        expected += sum(binary(scores[i][k], float(k == class_index)) for k in (2, 3))
    assert batch.loss(exemplar_targets="label") == pytest.approx(expected / 4 / 10, rel=1e-9)


def test_labels_are_targets_in_a_batch_of_exemplars_alone(batch: Batch) -> None:
    scores, _ = batch.scores
    class_indices = torch.tensor([0, 1, 1, 0])
    expected = sum(
        binary(scores[i][k], float(k == class_index)) for i, class_index in enumerate(class_indices) for k in range(4)
    )
    assert batch.loss(class_indices, exemplar_targets="label") == pytest.approx(expected / 4 / 10, rel=1e-9)


def test_the_weight_of_distillation_is_a_setting(batch: Batch) -> None:
    scores, targets = batch.scores
    distilled = sum(binary(scores[i][k], sigmoid(targets[i][k])) for i in range(4) for k in (0, 1)) / 4 / 10
    assert batch.loss(distillation=1.0) - batch.loss(distillation=0.0) == pytest.approx(distilled, rel=1e-9)
    assert batch.loss(distillation=2.5) - batch.loss(distillation=0.0) == pytest.approx(2.5 * distilled, rel=1e-9)


def test_without_distillation_scores_of_old_classes_change_more(vectors: Stream) -> None:
    drift = {}
    for distillation in (0.0, 1.0):
        one = replay(images_total=30, distillation=distillation, epochs=5)
        one.learn(vectors.tasks[0])
        before = [one.head_scores(one.extract(task.test)).sigmoid() for task in vectors.tasks[:2]]
        one.learn(vectors.tasks[1])
        after = [one.head_scores(one.extract(task.test)).sigmoid()[:, :2] for task in vectors.tasks[:2]]
        drift[distillation] = float((torch.cat(after) - torch.cat(before)).abs().mean())
    assert drift[1.0] < 0.5 * drift[0.0]


# Training on them


@dataclass(frozen=True, kw_only=True)
class Recorded(Distillation):
    """Distillation that records its batches."""

    given: list[tuple[bytes, int]] = field(default_factory=list)

    def loss(self, context: TrainingContext) -> Loss:
        loss = super().loss(context)

        def recorded(inputs: Tensor, class_indices: Tensor) -> Tensor:
            self.given.extend(
                (row.numpy().tobytes(), int(class_index))
                for row, class_index in zip(inputs, class_indices, strict=True)
            )
            return loss(inputs, class_indices)

        return recorded


def test_every_exemplar_is_trained_on_once_per_epoch_with_its_class(vectors: Stream) -> None:
    one = replay(images_total=10, epochs=2)
    one.objective = Recorded(expected_classes=6)
    one.learn(vectors.tasks[0])
    one.objective.given.clear()
    column_of = {label: class_index for class_index, label in enumerate(vectors.classes)}
    expected = []
    for task in vectors.tasks[:2]:
        for row, label in zip(task.train.batch(torch.arange(len(task.train))), task.train.labels, strict=True):
            if task.index == 1 or row.tolist() in one.memory.images.rows.tolist():
                expected.append((row.numpy().tobytes(), column_of[int(label)]))
    assert len(expected) == 10 + 48
    one.train(vectors.tasks[1])
    assert sorted(one.objective.given) == sorted(2 * expected)


def test_the_rehearsal_begins_with_the_exemplars_and_their_labels(vectors: Stream) -> None:
    one = replay(images_total=12)
    for task in vectors.tasks[:2]:
        one.learn(task)
    rehearsal, last = one.rehearsal(vectors.tasks[2]), vectors.tasks[2].train
    label_of = {
        row.numpy().tobytes(): int(label)
        for task in vectors
        for row, label in zip(task.train.batch(torch.arange(len(task.train))), task.train.labels, strict=True)
    }
    rows = rehearsal.batch(torch.arange(len(rehearsal)))
    assert torch.equal(rows, torch.cat([one.memory.images.rows, last.batch(torch.arange(len(last)))]))
    assert rehearsal.labels.tolist() == [label_of[row.numpy().tobytes()] for row in rows]
    assert rehearsal.labels.unique().tolist() == [0, 1, 2, 3, 4, 5]


def test_exemplars_change_the_training(vectors: Stream) -> None:
    one, forgetful = replay(images_total=12), replay(images_total=12)
    one.learn(vectors.tasks[0])
    forgetful.restore(one.state())
    assert same(one.train(vectors.tasks[1]).state_dict(), forgetful.train(vectors.tasks[1]).state_dict())
    forgetful.memory_ = Memory()
    assert not same(one.train(vectors.tasks[1]).state_dict(), forgetful.train(vectors.tasks[1]).state_dict())
