"""Hybrid: exemplars are replayed and are among the adapter's pairs; other objectives; the method engram."""

from typing import Any

import pytest
import torch
from learners_made import same
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Stream
from engram.features import Adapter, LinearSVM, Pairs, RidgeAdapter
from engram.methods import Features, Learner, make
from engram.methods.features import Hybrid
from engram.network import CorrectedHead, extract
from engram.progress import SILENT

QUICK: dict[str, Any] = {"epochs": 3, "batch_size": 16, "learning_rate": 0.2}
KEPT: dict[str, Any] = {"images_per_class": 5, "features_per_class": 8}


def hybrid(**settings: Any) -> Hybrid:
    made = make("hybrid", **{**QUICK, **KEPT, "expected_classes": 6, "adapter": "ridge", **settings})
    assert isinstance(made, Hybrid)
    return made


def inputs_of(samples: Samples) -> Tensor:
    return samples.batch(torch.arange(len(samples)))


def of_no_class(inputs: Tensor) -> Samples:
    return Samples.of(inputs, torch.zeros(len(inputs), dtype=torch.int64))


def test_hybrid_trains_the_network_of_icarl_with_as_many_images(vectors: Stream) -> None:
    one, features = hybrid(), make("features", **QUICK, expected_classes=6, features_per_class=8, adapter="ridge")
    icarl = make("gamma-icarl", **QUICK, expected_classes=6, images_per_class=5)
    for task in vectors:
        assert one.training_settings(1) == icarl.training_settings(1)
        for learner in (one, icarl, features):
            learner.learn(task)
        assert same(one.trained.state_dict(), icarl.trained.state_dict())
        assert torch.equal(one.memory.images.rows, icarl.memory.images.rows)
        # Without exemplars the second network differs.
        assert same(one.trained.state_dict(), features.trained.state_dict()) == (task.index == 0)


def test_images_and_features_of_every_class_are_stored_and_their_bytes_counted(images: Stream) -> None:
    one = hybrid()
    for seen, task in enumerate(images, start=1):
        one.learn(task)
        assert one.memory.images.counts.tolist() == [5] * (2 * seen)
        assert one.memory.features.counts.tolist() == [8] * (2 * seen)
        assert one.memory.images.nbytes == 2 * seen * 5 * 8 * 8 * 3
        assert one.memory.features.nbytes == 2 * seen * 8 * 64 * 4
        assert one.memory.nbytes == one.memory.images.nbytes + one.memory.features.nbytes


def test_images_total_does_not_change_features_per_class(vectors: Stream) -> None:
    one = make("hybrid", **QUICK, images_total=14, features_per_class=8, adapter="ridge")
    for task in vectors:
        one.learn(task)
    assert one.memory.images.counts.tolist() == [2] * 6
    assert one.memory.features.counts.tolist() == [8] * 6


@pytest.mark.parametrize("objective", ["distillation", "bic"])
def test_every_row_of_the_memory_matches_its_source(images: Stream, objective: str) -> None:
    one = make("hybrid", **{**QUICK, "learning_rate": 0.05}, **KEPT, objective=objective, adapter="identity")
    for task in images:
        before = one.memory
        sources = one.learn(task)
        arrived = inputs_of(task.train)
        fresh = F.normalize(extract(one.trained, task.train))
        for source, image in zip(sources.images.tolist(), one.memory.images.rows, strict=True):
            assert torch.equal(image, arrived[source] if source >= 0 else before.images.rows[-1 - source])
        for source, feature in zip(sources.features.tolist(), one.memory.features.rows, strict=True):
            assert torch.equal(feature, fresh[source] if source >= 0 else before.features.rows[-1 - source])
        assert [int((each < 0).sum()) for each in sources] == [task.index * 16, task.index * 10]


def test_the_exemplars_of_a_new_class_are_the_images_of_its_first_features(vectors: Stream) -> None:
    one = hybrid()
    for task in vectors:
        sources = one.learn(task)
        for class_index in range(2 * task.index, 2 * task.index + 2):
            images = sources.images[one.memory.images.class_indices == class_index].tolist()
            features = sources.features[one.memory.features.class_indices == class_index].tolist()
            assert features[:5] == images
            assert min(features) >= 0


# The adapter's pairs


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Pairs]:
    """The pairs that ridge adapters are fitted to."""
    pairs: list[Pairs] = []
    fit = RidgeAdapter.fit

    def recording(self: RidgeAdapter, given: Pairs, **options: Any) -> Adapter:
        pairs.append(given)
        return fit(self, given, **options)

    monkeypatch.setattr(RidgeAdapter, "fit", recording)
    return pairs


def test_exemplars_are_among_the_pairs(vectors: Stream, recorded: list[Pairs]) -> None:
    one = hybrid(adapter="ridge")
    one.learn(vectors.tasks[0])
    assert not recorded
    for task in vectors.tasks[1:]:
        exemplars, before = one.memory.images, one.trained
        one.learn(task)
        pairs = recorded[-1]
        assert len(pairs.class_indices) == 10 * task.index + 48
        paired = of_no_class(torch.cat([exemplars.rows, inputs_of(task.train)]))
        assert torch.equal(pairs.old, extract(before, paired))
        assert torch.equal(pairs.new, extract(one.trained, paired))
        class_indices = [one.classes_.index(label) for label in task.train.labels.tolist()]
        assert pairs.class_indices.tolist() == [*exemplars.class_indices.tolist(), *class_indices]
    assert len(recorded) == 2


def test_stored_features_are_adapted_by_these_pairs(vectors: Stream, recorded: list[Pairs]) -> None:
    one = hybrid(adapter="ridge")
    one.learn(vectors.tasks[0])
    stored = one.memory.features.rows
    one.learn(vectors.tasks[1])
    adapter = RidgeAdapter().fit(recorded[0])
    assert torch.equal(one.memory.features.rows[:16], adapter(stored))
    assert not torch.allclose(one.memory.features.rows[:16], stored, atol=1e-3)


# Other objectives


def accuracy(learner: Learner, stream: Stream) -> float:
    right = [
        learner.scores(inputs_of(task.test)).argmax(1)
        == torch.tensor([learner.classes_.index(label) for label in task.test.labels.tolist()])
        for task in stream
    ]
    return float(torch.cat(right).double().mean())


@pytest.mark.parametrize(("method", "objective"), [("features", "lucir"), ("hybrid", "bic")])
class TestOtherObjectives:
    def learner(self, method: str, objective: str, **settings: Any) -> Features:
        given = {**QUICK, "learning_rate": 0.05, "features_per_class": 8, "adapter": "ridge", **settings}
        if method == "hybrid":
            given["images_per_class"] = 5
        made = make(method, objective=objective, **given)
        assert isinstance(made, Features)
        return made

    def test_the_objective_brings_its_head_and_its_training(self, method: str, objective: str) -> None:
        made = make(method, objective=objective)
        assert made.name == method
        assert made.settings()["objective"] == objective
        assert (made.head, made.last_relu) == {"lucir": ("cosine", False), "bic": ("corrected", True)}[objective]
        assert made.training == make(objective).training

    def test_vectors_are_learned_and_stored_features_classify(
        self, method: str, objective: str, vectors: Stream
    ) -> None:
        one = self.learner(method, objective, epochs=10)
        for task in vectors:
            one.learn(task)
        memory = one.memory.features
        assert memory.counts.tolist() == [8] * 6
        assert len(one.memory.images) == (30 if method == "hybrid" else 0)
        features = one.extract(vectors.tasks[0].test)
        expected = LinearSVM(C=1.0).fit(memory.rows, memory.class_indices).scores(F.normalize(features))
        assert torch.allclose(one.classify(features), expected, atol=1e-5)
        assert not torch.allclose(one.classify(features), one.head_scores(features), atol=0.1)
        assert accuracy(one, vectors) > 0.5  # chance is 1/6


def test_with_lucir_old_weights_stay_and_features_have_both_signs(vectors: Stream) -> None:
    one = make("features", objective="lucir", **{**QUICK, "learning_rate": 0.05}, features_per_class=8, adapter="ridge")
    one.learn(vectors.tasks[0])
    before = one.trained.head.weight.clone()
    one.learn(vectors.tasks[1])
    assert torch.equal(one.trained.head.weight[:2], before)
    assert bool((one.memory.features.rows < 0).any())


def test_with_bic_the_correction_needs_exemplars(vectors: Stream) -> None:
    newest = {}
    for method, images in (("hybrid", {"images_per_class": 5}), ("features", {})):
        one = make(
            method, objective="bic", **{**QUICK, "learning_rate": 0.05}, features_per_class=8, adapter="ridge", **images
        )
        for task in vectors.tasks[:2]:
            one.learn(task)
        head = one.trained.head
        assert isinstance(head, CorrectedHead)
        newest[method] = (head.newest.tolist(), (float(head.alpha), float(head.beta)) != (1.0, 0.0))
    assert newest == {"hybrid": ([False, False, True, True], True), "features": ([False] * 4, False)}


def test_with_bic_held_out_images_are_among_the_pairs(vectors: Stream, recorded: list[Pairs]) -> None:
    one = make("hybrid", objective="bic", adapter="ridge", **{**QUICK, "learning_rate": 0.05}, **KEPT)
    assert isinstance(one, Hybrid)
    one.learn(vectors.tasks[0])
    present = one._context(vectors.tasks[1], one.network_, SILENT)
    assert present.held_out is not None
    assert torch.bincount(present.held_out[1]).tolist() == [1] * 4
    assert (present.exemplars, len(present.samples)) == (8, 8 + 46)
    one.learn(vectors.tasks[1])
    assert len(recorded[0].class_indices) == 10 + 48


@pytest.mark.parametrize("objective", ["distillation", "bic"])
def test_without_images_hybrid_equals_features(objective: str, images: Stream) -> None:
    settings = {**QUICK, "features_per_class": 8, "adapter": "ridge", "objective": objective}
    none, features = make("hybrid", **settings, images_per_class=0), make("features", **settings)
    for task in images:
        assert none.training_settings(1) == features.training_settings(1)  # they share their networks
        none.learn(task)
        features.learn(task)
    left, right = none.state(), features.state()
    assert none.memory.nbytes == features.memory.nbytes
    assert same(*({name: value for name, value in each.items() if "images" not in name} for each in (left, right)))


def test_exemplars_can_be_stored_from_a_later_task_on(images: Stream) -> None:
    learner = hybrid(images_per_class=0)
    learner.learn(images.tasks[0])
    more = hybrid(images_per_class=3)
    more.restore(learner.state())
    more.learn(images.tasks[1])
    assert more.memory.images.counts.tolist() == [0, 0, 3, 3]


def test_engram_stores_int8_features_and_images_only_if_set(images: Stream) -> None:
    for count in (0, 2):
        ours = make("engram", **QUICK, images_per_class=count, features_per_class=8, adapter_steps=5)
        for task in images:
            ours.learn(task)
        assert ours.memory.features.codec == "int8"
        assert ours.memory.images.counts.tolist() == [count] * 4
