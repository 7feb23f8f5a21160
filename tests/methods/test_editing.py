"""Forgetting and merging classes: the removed class is gone, the others are classified as before."""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from learners_made import learned, quick
from torch.nn import functional as F

from engram.data import Samples, Stream
from engram.errors import UsageError
from engram.features import herd
from engram.methods import METHODS, Learner, make
from engram.methods.editing import forget, merge
from engram.methods.replay import held_out_rows
from engram.network import CorrectedHead, CosineHead, LinearHead

LONGER = {"epochs": 6, "adapter_steps": 20}  # so that a class was known before it is forgotten
# One method of each kind of memory, head and classifier.
KINDS = (
    *("features", "hybrid", "icarl", "eeil", "lucir", "bic", "il2m", "lwf", "ewc", "joint"),
    *("sdc", "dpcr", "fecam", "fetril", "gaussian-replay"),
)
every_kind = pytest.mark.parametrize("method", KINDS)


@pytest.fixture(scope="module")
def learn_once(vectors: Stream) -> Callable[[str], Learner]:
    """A copy of a learner of all of `vectors`, which each method learns once."""
    once = functools.cache(lambda method: learned(method, vectors, **LONGER))
    return lambda method: copy.deepcopy(once(method))


def predictions(learner: Learner, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels of all test samples, and the predicted ones."""
    tests = [task.test for task in stream]
    inputs = torch.cat([test.batch(torch.arange(len(test))) for test in tests])
    predicted = torch.tensor(learner.classes_)[learner.scores(inputs).argmax(1)]
    return torch.cat([test.labels for test in tests]), predicted


@every_kind
class TestEveryMethod:
    def test_after_a_class_is_forgotten_the_others_are_classified_at_least_as_well(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learner]
    ) -> None:
        learner = learn_once(method)
        label = vectors.classes[1]
        truth, before = predictions(learner, vectors)
        others = truth != label
        forget(learner, label)
        _, after = predictions(learner, vectors)
        assert learner.classes_ == tuple(other for other in vectors.classes if other != label)
        assert len(learner.task_of_class_) == learner.trained.classes == 5
        assert not bool((after == label).any())
        right = [float((predicted[others] == truth[others]).float().mean()) for predicted in (before, after)]
        assert right[1] >= right[0] - 0.02

    def test_the_state_holds_nothing_of_a_forgotten_class(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learner]
    ) -> None:
        learner = learn_once(method)
        class_index = 3
        memory = learner.memory
        own = [row for kind in (memory.features, memory.images) for row in kind.rows[kind.class_indices == class_index]]
        own += [tensor[class_index] for tensor in (memory.statistics.means, memory.statistics.triangles) if len(tensor)]
        head_row = learner.trained.head.weight[class_index].clone()
        assert own or METHODS[method].keeps in ("nothing", "importance of weights")
        forget(learner, vectors.classes[class_index])
        everything = b"".join(tensor.numpy().tobytes() for tensor in learner.state().values())
        for row in [*own, head_row]:
            assert row.numpy().tobytes() not in everything

    def test_a_forgotten_class_can_be_learned_again(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learner]
    ) -> None:
        learner = learn_once(method)
        for label in vectors.tasks[2].classes:
            forget(learner, label)
        learner.learn(vectors.tasks[2])
        assert learner.classes_ == vectors.classes
        assert bool(learner.scores(vectors.tasks[0].test.batch(torch.arange(4))).isfinite().all())

    def test_a_merged_class_is_gone_and_the_memory_does_not_grow(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learner]
    ) -> None:
        learner = learn_once(method)
        into, label = vectors.tasks[2].classes
        before = learner.memory.nbytes
        merge(learner, label, into)
        assert learner.classes_ == tuple(other for other in vectors.classes if other != label)
        assert learner.trained.classes == 5
        assert learner.memory.nbytes <= before

    def test_an_edited_learner_is_restored_from_its_state(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learner]
    ) -> None:
        learner = learn_once(method)
        merge(learner, vectors.classes[0], vectors.classes[5])
        forget(learner, vectors.classes[2])
        other = quick(method, **LONGER)
        other.restore(learner.state())
        inputs = vectors.tasks[0].test.batch(torch.arange(6))
        assert torch.equal(other.scores(inputs), learner.scores(inputs))


@every_kind
def test_a_class_under_two_names_is_still_recognised_when_they_are_merged(method: str, vectors: Stream) -> None:
    twice = vectors.tasks[1].classes[1]  # half of its samples have another label

    def halved(samples: Samples) -> Samples:
        labels = samples.labels.clone()
        labels[(labels == twice).nonzero().squeeze(1)[::2]] = 100
        return replace(samples, labels=labels)

    second = replace(
        vectors.tasks[1],
        classes=(*vectors.tasks[1].classes, 100),
        train=halved(vectors.tasks[1].train),
        test=halved(vectors.tasks[1].test),
    )
    stream = replace(vectors, tasks=(vectors.tasks[0], second))
    learner = learned(method, stream, **LONGER)
    truth, before = predictions(learner, stream)
    merge(learner, 100, twice)
    _, after = predictions(learner, stream)
    own = (truth == twice) | (truth == 100)
    found = [float(((predicted == twice) | (predicted == 100))[own].float().mean()) for predicted in (before, after)]
    assert found[1] >= found[0] - 0.1


def test_features_of_merged_classes_are_herded_together_to_the_number_of_the_larger_class(vectors: Stream) -> None:
    learner = learned("features", vectors, features_per_class=6, **LONGER)
    rows, class_indices = learner.memory.features.rows, learner.memory.features.class_indices
    both = torch.cat([rows[class_indices == 1], rows[class_indices == 4]])
    merge(learner, vectors.classes[4], vectors.classes[1])
    features = learner.memory.features
    assert features.counts.tolist() == [6, 6, 6, 6, 6]
    assert torch.equal(features.rows[features.class_indices == 1], both[herd(both, 6)])


def test_exemplars_of_merged_classes_are_herded_by_their_unit_features(vectors: Stream) -> None:
    learner = learned("icarl", vectors, images_per_class=6, **LONGER)
    rows, class_indices = learner.memory.images.rows, learner.memory.images.class_indices
    both = torch.cat([rows[class_indices == 1], rows[class_indices == 4]])
    unit = F.normalize(learner.extract(Samples.of(both, torch.zeros(len(both), dtype=torch.int64))))
    merge(learner, vectors.classes[4], vectors.classes[1])
    images = learner.memory.images
    assert torch.equal(images.rows[images.class_indices == 1], both[herd(unit, 6)])


def test_held_out_exemplars_stay_held_out_when_their_classes_are_merged(vectors: Stream) -> None:
    learner = learned("bic", vectors, images_per_class=13, **LONGER)

    def parts() -> list[set[tuple[float, ...]]]:
        images = learner.memory.images
        held_out = held_out_rows(images.counts)
        return [{tuple(row) for row in images.rows[part].tolist()} for part in (~held_out, held_out)]

    trained, held_out = parts()
    merge(learner, vectors.classes[4], vectors.classes[1])
    assert learner.memory.images.counts.tolist() == [13] * 5
    assert all(now <= before for now, before in zip(parts(), (trained, held_out), strict=True))


def test_merged_rows_of_a_cosine_head_become_their_mean_direction_and_of_a_linear_head_their_mean() -> None:
    rows = torch.tensor([[3.0, 0.0], [0.0, 2.0], [0.0, 5.0]])
    cosine, linear = CosineHead(2), LinearHead(2)
    for head in (cosine, linear):
        head.grow(3)
        head.weight.data = rows.clone()
    linear.bias.data = torch.tensor([1.0, 2.0, 3.0])
    for head in (cosine, linear):
        head.regroup([[2], [0, 1]])
    torch.testing.assert_close(cosine.weight.data, F.normalize(torch.tensor([[0.0, 1.0], [1.0, 1.0]])))
    torch.testing.assert_close(linear.weight.data, torch.tensor([[0.0, 5.0], [1.5, 1.0]]))
    assert linear.bias.tolist() == pytest.approx([3.0, 1.5 + math.log(2)])


def test_a_correction_is_applied_to_merged_classes_and_kept_by_the_others() -> None:
    features = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def head() -> CorrectedHead:
        made = CorrectedHead(3)
        made.grow(4)
        made.weight.data = torch.arange(12.0).view(4, 3).sin()
        made.correct(0.5, -1.5, torch.tensor([False, False, True, True]))
        return made

    before, merged, dropped = head()(features), head(), head()
    merged.regroup([[0], [1, 3], [2]])
    expected = before[:, [1, 3]].mean(1) + math.log(2)
    torch.testing.assert_close(merged(features), torch.stack([before[:, 0], expected, before[:, 2]], 1))
    dropped.regroup([[1], [3]])
    assert dropped.newest.tolist() == [False, True]
    torch.testing.assert_close(dropped(features), before[:, [1, 3]])


def test_an_impossible_edit_is_refused_and_changes_nothing(vectors: Stream) -> None:
    learner = make("finetune", epochs=1, expected_classes=6)
    learner.learn(vectors.tasks[0])
    known, before = learner.classes_, learner.state()
    with pytest.raises(UsageError, match="99"):
        forget(learner, 99)
    with pytest.raises(UsageError):
        merge(learner, known[0], known[0])
    assert all(torch.equal(tensor, learner.state()[name]) for name, tensor in before.items())
    forget(learner, known[0])
    with pytest.raises(UsageError):
        forget(learner, known[1])


def test_classes_forgotten_together_or_one_by_one_leave_the_same_state(vectors: Stream) -> None:
    at_once, one_by_one = (learned("features", vectors, **LONGER) for _ in range(2))
    labels = vectors.classes[4], vectors.classes[1]
    forget(at_once, *labels, labels[0])
    for label in labels:
        forget(one_by_one, label)
    assert at_once.classes_ == one_by_one.classes_
    for name, tensor in one_by_one.state().items():
        assert torch.allclose(at_once.state()[name], tensor), name
