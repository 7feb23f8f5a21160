"""Methods that encode stored features: their bytes, their accuracy, and their state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from conftest import blobs
from learners_made import learned, quick, same

from engram.data import Stream, split
from engram.errors import UsageError
from engram.features import LinearSVM
from engram.methods import Features, Learner, make
from engram.methods.editing import forget, merge

CODECS: dict[str, dict[str, Any]] = {
    "float16": {"codec": "float16"},
    "int8": {"codec": "int8"},
    "pq": {"codec": "pq"},
    "pq-16": {"codec": "pq", "codec_bytes": 16},
}
CASES = [("features", "float16"), ("features", "int8"), ("features", "pq-16"), ("features-unadapted", "pq")]
# More features than centroids, and a network that drifts little, so that classes are not forgotten.
MANY: dict[str, Any] = {
    **{"features_per_class": 60, "adapter_width": 256, "adapter_steps": 60, "expected_classes": 10},
    **{"learning_rate": 0.03, "schedule": "one-cycle", "epochs": 15, "batch_size": 32, "feature_distillation": 2.0},
}

every_codec = pytest.mark.parametrize("codec", CODECS)


def nbytes(codec: str, count: int) -> int:
    learner = make("features", **CODECS[codec])
    assert isinstance(learner, Features)
    return learner.codec.make().nbytes(count, 64)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return split(blobs(per_class=64), classes_per_task=2, seed=0)


@pytest.fixture(scope="module")
def learn_once(stream: Stream) -> Callable[..., Learner]:
    """A copy of a learner of the first task or of all three, which each method and codec learns once."""

    @cache
    def after_each_task(method: str, codec: str) -> list[Learner]:
        learner, copies = quick(method, **MANY, **CODECS.get(codec, {})), []
        for task in stream:
            learner.learn(task)
            copies.append(copy.deepcopy(learner))
        return copies

    return lambda method, codec, tasks=3: copy.deepcopy(after_each_task(method, codec)[tasks - 1])


def accuracy(learner: Learner, stream: Stream) -> float:
    right = []
    for task in stream:
        predicted = torch.tensor(learner.classes_)[
            learner.scores(task.test.batch(torch.arange(len(task.test)))).argmax(1)
        ]
        right.append(predicted == task.test.labels)
    return float(torch.cat(right).float().mean())


@pytest.mark.parametrize(("method", "codec"), CASES)
class TestEveryCodec:
    def test_the_accuracy_is_nearly_that_of_float32(
        self, method: str, codec: str, stream: Stream, learn_once: Callable[..., Learner]
    ) -> None:
        exact, coded = (accuracy(learn_once(method, name), stream) for name in ("float32", codec))
        assert exact > 0.6
        assert coded > exact - 0.03

    def test_the_bytes_are_those_that_the_codec_predicts(
        self, method: str, codec: str, learn_once: Callable[..., Learner]
    ) -> None:
        memory = learn_once(method, codec).memory
        assert memory.features.codec == CODECS[codec]["codec"]
        assert memory.features.counts.tolist() == [60] * 6
        assert memory.features.nbytes == nbytes(codec, 360) < 360 * 64 * 4
        saved = sum(t.nbytes for name, t in learn_once(method, codec).state().items() if "memory.features" in name)
        assert saved == memory.features.nbytes + 6 * 8  # and a count a class

    def test_the_classifier_is_fitted_on_the_decoded_features(
        self, method: str, codec: str, learn_once: Callable[..., Learner]
    ) -> None:
        learner = learn_once(method, codec)
        expected = LinearSVM().fit(learner.memory.features.rows, learner.memory.features.class_indices)
        assert learner.classifier_ is not None
        assert torch.equal(learner.classifier_.weight_, expected.weight_)

    def test_a_restored_learner_goes_on_to_the_same_end(
        self, method: str, codec: str, stream: Stream, learn_once: Callable[..., Learner]
    ) -> None:
        restored = quick(method, **MANY, **CODECS[codec])
        restored.restore(learn_once(method, codec, tasks=1).state())
        for task in stream.tasks[1:]:
            restored.learn(task)
        assert same(restored.state(), learn_once(method, codec).state())

    def test_features_of_the_other_classes_hardly_change_when_a_class_is_forgotten(
        self, method: str, codec: str, stream: Stream, learn_once: Callable[..., Learner]
    ) -> None:
        learner = learn_once(method, codec)
        before = learner.memory.features.rows
        others = learner.memory.features.class_indices != 3
        forget(learner, stream.classes[3])
        after = learner.memory.features
        assert (len(after), after.codec) == (300, CODECS[codec]["codec"])
        assert after.nbytes == nbytes(codec, 300)
        if CODECS[codec]["codec"] == "pq":  # its codebook is fitted without the class
            assert float((after.rows * before[others]).sum(1).mean()) > 0.99
        else:
            assert torch.allclose(after.rows, before[others], atol=2e-3 if codec == "int8" else 0, rtol=0)

    def test_merged_classes_have_the_same_codec(
        self, method: str, codec: str, stream: Stream, learn_once: Callable[..., Learner]
    ) -> None:
        learner = learn_once(method, codec)
        merge(learner, stream.classes[5], stream.classes[4])
        assert learner.memory.features.codec == CODECS[codec]["codec"]
        assert learner.memory.features.counts.tolist() == [60] * 5
        learner.learn(stream.tasks[2])
        assert learner.memory.features.counts.tolist() == [60] * 6
        assert accuracy(learner, stream) > 0.6


def test_float32_features_are_saved_as_they_are(learn_once: Callable[..., Learner]) -> None:
    learner = learn_once("features", "float32")
    state = learner.state()
    names = {name for name in state if name.startswith("memory.features")}
    assert names == {"memory.features.rows", "memory.features.counts"}
    assert state["memory.features.rows"].dtype == torch.float32
    assert state["memory.features.rows"] is learner.memory.features.rows


@pytest.mark.parametrize(("before", "after"), [("float32", "int8"), ("pq-16", "float32")])
def test_a_new_codec_applies_from_the_next_task_on(
    before: str, after: str, stream: Stream, learn_once: Callable[..., Learner]
) -> None:
    other = quick("features", **MANY, **CODECS.get(after, {}))
    other.restore(learn_once("features", before, tasks=1).state())
    assert other.memory.features.codec == before.removesuffix("-16")
    other.learn(stream.tasks[1])
    assert other.memory.features.codec == after
    assert torch.allclose(other.memory.features.rows.norm(dim=1), torch.ones(240), atol=1e-5)


def test_vectors_that_do_not_move_hardly_change_when_they_are_encoded_again(stream: Stream) -> None:
    learner = quick("features-unadapted", **MANY, codec="pq")
    learner.learn(stream.tasks[0])
    assert learner.network_ is not None
    first = learner.memory.features.rows
    for task in stream.tasks[1:]:
        network = learner.network_.grown(2, 0, "head").requires_grad_(False)
        learner.absorb(task, network)
    after = learner.memory.features.rows[: len(first)]
    assert float((first * after).sum(1).mean()) > 0.999


@every_codec
def test_one_vector_per_class_is_enough(codec: str, vectors: Stream) -> None:
    learner = learned("features", vectors, features_per_class=1, **CODECS[codec])
    assert learner.memory.features.counts.tolist() == [1] * 6
    assert learner.scores(vectors.tasks[0].test.batch(torch.arange(3))).shape == (3, 6)


def test_a_missing_faiss_is_reported_before_anything_is_trained(
    stream: Stream, learn_once: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = learn_once("features", "pq-16").state()
    monkeypatch.setitem(sys.modules, "faiss", None)
    learner = quick("features", **MANY, **CODECS["pq-16"])
    monkeypatch.setattr(type(learner.training), "fit", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(UsageError, match="faiss-cpu"):
        learner.learn(stream.tasks[0])
    learner.restore(known)  # a saved state can be used without faiss
    assert learner.scores(stream.tasks[0].test.batch(torch.arange(3))).shape == (3, 6)
    with pytest.raises(UsageError, match="faiss-cpu"):  # the codebook must be fitted again
        forget(learner, stream.classes[0])
    assert learner.classes_ == stream.classes


def test_a_number_of_parts_that_does_not_divide_the_dimension_is_refused(stream: Stream) -> None:
    learner = quick("features", **MANY, codec="pq", codec_bytes=24)
    assert isinstance(learner, Features)
    with pytest.raises(UsageError, match=r"64 numbers.* 24 .* 16 or 32"):
        learner.learn(stream.tasks[0])
    assert learner.tasks_ == 0
