"""What every method promises: a new one is tested by being in METHODS."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from conftest import blobs
from lazy_made import as_lazy
from learners_made import OF_EACH_KIND, same
from learners_made import learned as learned_of
from learners_made import quick as quick_of
from safetensors.torch import save
from torch import Tensor

from engram.data import Dataset, Samples, Stream, Task, split
from engram.features import Memory
from engram.methods import METHODS, Learner, MemorySources

quick = functools.partial(quick_of, epochs=1)
learned = functools.partial(learned_of, epochs=1)
# Methods that do more with images than to train on them: store them, hold them out, perturb them.
HANDLES_IMAGES = ("features", "bic", "gem", "adc", "joint")


class Step(NamedTuple):
    """What one task did to a learner."""

    before: Memory
    sources: MemorySources
    after: Memory
    unchanged: bool  # whether training left the learner and the task as they were
    scores: Tensor  # of some inputs


class Learned(NamedTuple):
    """A learner and its steps, one per task; not to be changed."""

    learner: Learner
    steps: list[Step]


@pytest.fixture(scope="module")
def vectors() -> Stream:
    """Two tasks of two classes, vectors."""
    return split(blobs(classes=4, per_class=16), classes_per_task=2, seed=0)


@pytest.fixture(scope="module")
def learn_once(vectors: Stream) -> Callable[[str], Learned]:
    """Learns all of `vectors` by a method, once for all tests."""

    @functools.cache
    def learn(method: str) -> Learned:
        learner, steps = quick(method), []
        for task in vectors:
            before, memory, samples = copy.deepcopy(learner), learner.memory, copy.deepcopy(task.train)
            network = learner.train(task)
            unchanged = same(before.state(), learner.state()) if before.tasks_ else learner.network_ is None
            sources = learner.absorb(task, network)
            unchanged &= torch.equal(samples.inputs, task.train.inputs)
            unchanged &= torch.equal(samples.labels, task.train.labels)
            scores = learner.scores(task.test.batch(torch.arange(5)))
            steps.append(Step(memory, sources, learner.memory, unchanged, scores))
        return Learned(learner, steps)

    return learn


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    def test_scores_have_a_column_per_class_seen_so_far(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learned]
    ) -> None:
        learner, steps = learn_once(method)
        assert [step.scores.shape for step in steps] == [(5, 2), (5, 4)]
        assert all(bool(step.scores.isfinite().all()) for step in steps)
        assert learner.classes_ == vectors.classes

    def test_training_leaves_the_learner_and_the_task_as_they_were(
        self, method: str, learn_once: Callable[[str], Learned]
    ) -> None:
        assert all(step.unchanged for step in learn_once(method).steps)

    def test_a_restored_learner_goes_on_to_the_same_end(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learned]
    ) -> None:
        begun, restored = quick(method), quick(method)
        begun.learn(vectors.tasks[0])
        restored.restore(begun.state())
        restored.learn(vectors.tasks[1])
        assert same(learn_once(method).learner.state(), restored.state())

    def test_the_state_holds_the_network_and_the_memory_and_little_else(
        self, method: str, learn_once: Callable[[str], Learned]
    ) -> None:
        learner, _ = learn_once(method)
        network = sum(tensor.nbytes for tensor in learner.trained.state_dict().values())
        assert len(save(learner.state())) <= 1.05 * (network + learner.memory.nbytes) + 2**16

    def test_every_row_of_the_memory_has_a_source_of_its_class(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learned]
    ) -> None:
        learner, steps = learn_once(method)
        for task, step in zip(vectors, steps, strict=True):
            for sources, after, before in (
                (step.sources.features, step.after.features, step.before.features),
                (step.sources.images, step.after.images, step.before.images),
            ):
                assert len(sources) == len(after)
                for source, class_index in zip(sources.tolist(), after.class_indices.tolist(), strict=True):
                    of_task = source >= 0
                    label = (
                        task.train.labels[source] if of_task else learner.classes_[before.class_indices[-1 - source]]
                    )
                    assert int(label) == learner.classes_[class_index]

    def test_new_images_of_a_known_class_add_no_second_class(self, method: str, vectors: Stream) -> None:
        learner = quick(method)
        learner.learn(vectors.tasks[0])
        both = (*vectors.tasks[1].classes, vectors.tasks[0].classes[0])
        rows, labels = (torch.cat([getattr(task.train, name) for task in vectors]) for name in ("rows", "labels"))
        everything = Samples(vectors.tasks[0].train.inputs, rows, labels)
        learner.learn(Task(1, both, everything.of_classes(both), everything.of_classes(both)))
        assert learner.classes_ == (*vectors.tasks[0].classes, *vectors.tasks[1].classes)
        assert learner.scores(everything.inputs[:2]).shape == (2, 4)


@pytest.mark.parametrize("method", OF_EACH_KIND)
class TestOneMethodOfEachKind:
    def test_images_can_be_learned(self, method: str, images: Stream) -> None:
        learner = learned(method, images)
        assert learner.scores(images.tasks[0].test.batch(torch.arange(3))).shape == (3, 4)

    def test_another_seed_has_another_result(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learned]
    ) -> None:
        assert not same(learn_once(method).learner.state(), learned(method, vectors, seed=1).state())

    def test_a_task_may_have_a_single_class_and_a_class_few_samples(self, method: str) -> None:
        labels = torch.tensor([0] * 3 + [1] * 9 + [2] * 5 + [3] * 2)
        inputs = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(0)) + 4 * labels[:, None]
        samples = Samples.of(inputs, labels)
        data = Dataset("uneven", samples, samples, ("a", "b", "c", "d"))
        stream = split(data, classes_per_task=2, first_task=1, class_order=[0, 1, 2, 3])
        assert [len(task.classes) for task in stream] == [1, 2, 1]
        asked = any(what in METHODS[method].keeps for what in ("features", "images"))
        with pytest.warns(match="fewer than") if asked else nullcontext():
            learner = learned(method, stream)
        assert learner.scores(inputs).shape == (19, 4)


@pytest.mark.parametrize("method", HANDLES_IMAGES)
def test_lazy_images_give_the_same_result(method: str, images: Stream) -> None:
    made = [replace(task, train=as_lazy(task.train), test=as_lazy(task.test)) for task in images]
    here, there = learned(method, images, crop=6), learned(method, replace(images, tasks=tuple(made)), crop=6)
    assert same(here.state(), there.state())
    assert here.memory.images.rows.shape[1:] in ((0,), (8, 8, 3))  # stored whole, not cropped
