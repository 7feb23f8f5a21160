"""What every method promises: a new one is tested by being in METHODS."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import blobs
from lazy_made import as_lazy
from learners_made import learned as learned_of
from learners_made import quick as quick_of
from safetensors.torch import save

from engram.data import Dataset, Samples, Stream, Task, split
from engram.methods import METHODS, Learner

quick = functools.partial(quick_of, epochs=1)
learned = functools.partial(learned_of, epochs=1)
# One of each kind of learner, and those that do more with images than to train on them and to store some.
HANDLES_IMAGES = ("features", "hybrid", "lwf", "icarl", "bic", "gem", "sdc", "adc", "joint")


@pytest.fixture(scope="module")
def vectors() -> Stream:
    """Two tasks of two classes, vectors."""
    return split(blobs(classes=4, per_class=16), classes_per_task=2, seed=0)


@pytest.fixture(scope="module")
def learn_once(vectors: Stream) -> Callable[[str], Learner]:
    """A learner that has learned all of `vectors`; not to be changed."""
    return functools.cache(lambda method: learned(method, vectors))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    def test_scores_have_a_column_per_class_seen_so_far(self, method: str, vectors: Stream) -> None:
        learner = quick(method)
        for seen, task in enumerate(vectors, start=1):
            learner.learn(task)
            inputs = task.test.batch(torch.arange(5))
            assert learner.scores(inputs).shape == (5, 2 * seen)
            assert bool(learner.scores(inputs).isfinite().all())
        assert learner.classes_ == vectors.classes

    def test_learns_images_too(self, method: str, images: Stream) -> None:
        learner = learned(method, images)
        assert learner.scores(images.tasks[0].test.batch(torch.arange(3))).shape == (3, 4)

    def test_same_seed_same_result_another_seed_another(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learner]
    ) -> None:
        first = learn_once(method).state()
        assert same(first, learned(method, vectors).state())
        assert not same(first, learned(method, vectors, seed=1).state())

    def test_training_leaves_the_learner_and_the_task_as_they_were(self, method: str, vectors: Stream) -> None:
        learner = quick(method)
        learner.learn(vectors.tasks[0])
        task = vectors.tasks[1]
        before, inputs, labels = copy.deepcopy(learner.state()), task.train.inputs.clone(), task.train.labels.clone()
        network = learner.train(task)
        assert same(before, learner.state())
        learner.absorb(task, network)
        assert torch.equal(inputs, task.train.inputs)
        assert torch.equal(labels, task.train.labels)

    def test_a_restored_learner_goes_on_to_the_same_end(
        self, method: str, vectors: Stream, learn_once: Callable[[str], Learner]
    ) -> None:
        begun = quick(method)
        begun.learn(vectors.tasks[0])
        restored = quick(method)
        restored.restore(begun.state())
        for task in vectors.tasks[1:]:
            restored.learn(task)
        assert same(learn_once(method).state(), restored.state())

    def test_what_is_saved_is_the_network_and_the_memory_and_little_else(
        self, method: str, learn_once: Callable[[str], Learner]
    ) -> None:
        learner = learn_once(method)
        assert learner.network_ is not None
        network = sum(tensor.nbytes for tensor in learner.network_.state_dict().values())
        assert len(save(learner.state())) <= 1.05 * (network + learner.memory.nbytes) + 2**16

    def test_says_where_every_row_of_its_memory_came_from(self, method: str, vectors: Stream) -> None:
        learner = quick(method)
        for task in vectors:
            before = learner.memory
            kept = learner.learn(task)
            for sources, now, then in (
                (kept.features, learner.memory.features, before.features),
                (kept.images, learner.memory.images, before.images),
            ):
                assert len(sources) == len(now)
                labels = torch.tensor(learner.classes_)[now.class_indices] if len(now) else torch.empty(0)
                for source, label in zip(sources.tolist(), labels.tolist(), strict=True):
                    origin = (
                        task.train.labels[source] if source >= 0 else learner.classes_[then.class_indices[-1 - source]]
                    )
                    assert int(origin) == label

    def test_a_single_class_tasks_of_different_sizes_and_small_classes(self, method: str) -> None:
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

    def test_more_images_of_a_known_class_make_no_second_one(self, method: str, vectors: Stream) -> None:
        learner = quick(method)
        learner.learn(vectors.tasks[0])
        both = (*vectors.tasks[1].classes, vectors.tasks[0].classes[0])
        everything = Samples(vectors.tasks[0].train.inputs, *_all_rows(vectors))
        learner.learn(Task(1, both, everything.of_classes(both), everything.of_classes(both)))
        assert learner.classes_ == (*vectors.tasks[0].classes, *vectors.tasks[1].classes)
        assert learner.scores(everything.inputs[:2]).shape == (2, 4)


@pytest.mark.parametrize("method", HANDLES_IMAGES)
def test_learns_the_same_from_images_that_must_be_made(method: str, images: Stream) -> None:
    made = [replace(task, train=as_lazy(task.train), test=as_lazy(task.test)) for task in images]
    here, there = learned(method, images, crop=6), learned(method, replace(images, tasks=tuple(made)), crop=6)
    assert same(here.state(), there.state())
    assert here.memory.images.rows.shape[1:] in ((0,), (8, 8, 3))  # kept whole, not as they were cropped


def _all_rows(stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.cat([task.train.rows for task in stream])
    return rows, torch.cat([task.train.labels for task in stream])
