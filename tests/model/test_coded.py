"""A model whose stored features are quantised (`codec=pq`)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import engram
from models_made import DAISY, FORMULA, NAMES, SIDE, TULIP, copied, draw

from engram import IncrementalClassifier
from engram.data import Samples, Task
from engram.errors import UsageError
from engram.features import Int8, ProductQuantisation
from engram.methods import editing, make
from engram.model import (
    LearnOptions,
    ModelFolder,
    evaluate,
    export,
    forget,
    inspect,
    learn,
    load,
    merge,
    rename,
    verify,
)
from engram.model.plan import plan_update_of_samples

OPTIONS = LearnOptions(
    method="features",
    image_size=SIDE,
    epochs=6,
    features_per_class=80,
    hold_out=0.2,
    settings={"adapter_steps": 60, "adapter_width": 64, "codec": "pq"},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Four classes of eighty vectors, more than there are centroids; those of two were adapted."""
    return taught(tmp_path_factory.mktemp("coded"), OPTIONS)


def taught(place: Path, options: LearnOptions) -> ModelFolder:
    folder = ModelFolder(place / "model")
    learn(folder, draw(place / "1", NAMES[:2], 80), options)
    learn(folder, draw(place / "2", (*NAMES[2:], "aster"), 80), options)
    return folder


def test_inspect_shows_the_codec_and_counts_every_byte(model: ModelFolder) -> None:
    found = inspect(model)
    assert (found.codec, found.settings["codec"]) == ("pq", "pq")
    assert found.bytes.features == found.bytes.memory == ProductQuantisation().nbytes(320, 64)
    assert found.bytes.shared == (256 + 64) * 64 * 2  # a codebook and a rotation
    assert sum(each.bytes for each in found.classes) + found.bytes.shared == found.bytes.memory
    assert "(pq, 40,960 of it shared by all)" in " ".join(
        engram("inspect", "model", cwd=model.path.parent).stdout.split()
    )


def test_quantised_model_is_intact_and_as_accurate_as_float32(model: ModelFolder, tmp_path: Path) -> None:
    assert verify(model).intact
    exact = taught(tmp_path, replace(OPTIONS, settings={**OPTIONS.settings, "codec": "float32"}))
    tested = draw(tmp_path / "test", (*NAMES, "aster"), 10)
    right = [evaluate(load(each), tested).accuracy for each in (model, exact)]
    assert right[0] >= right[1] - 0.05
    assert right[0] > 0.5


def test_quantised_model_can_be_edited(model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "model")
    rename(folder, DAISY, "daisy")
    forget(folder, ["aster"])
    merge(folder, FORMULA, TULIP)
    assert verify(folder).intact
    found = inspect(folder)
    assert [each.features for each in found.classes] == [80] * 2
    assert found.bytes.memory == ProductQuantisation().nbytes(160, 64)


def test_after_forgetting_codebook_and_rotation_are_those_of_the_remaining_vectors() -> None:
    inputs, labels = torch.randn(600, 16, generator=torch.Generator().manual_seed(0)), torch.arange(600) % 3
    samples = Samples.of(inputs, labels)
    learner = make("features", network="mlp", epochs=1, features_per_class=200, codec="pq")
    learner.learn(Task(0, (0, 1, 2), samples, samples))
    before, rows = learner.memory.features.vectors, learner.memory.features.class_indices != 1
    editing.forget(learner, 1)
    after = learner.memory.features.vectors
    expected = ProductQuantisation().encode(before.approximations()[rows])  # 400 vectors: more than 256 centroids
    assert after.tensors().keys() == expected.tensors().keys() == {"codes", "codebook", "rotation"}
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in after.tensors().items())
    assert not torch.equal(after.tensors()["rotation"], before.tensors()["rotation"])
    assert float((after.decode() * before.decode()[rows]).sum(1).mean()) > 0.98


def test_quantised_features_are_exported_decoded(model: ModelFolder, tmp_path: Path) -> None:
    export(load(model), tmp_path / "memory.npz")
    arrays = np.load(tmp_path / "memory.npz")
    assert arrays["features"].dtype == np.float32
    assert np.array_equal(arrays["features"], load(model).learner.memory.features.rows.numpy())
    assert np.allclose(np.linalg.norm(arrays["features"], axis=1), 1, atol=1e-5)


def test_plan_predicts_the_stored_bytes_exactly(model: ModelFolder) -> None:
    plan = plan_update_of_samples(load(model), {"rose": 30}, (SIDE, SIDE, 3), LearnOptions())
    assert plan.memory_bytes == ProductQuantisation().nbytes(350, 64)


def test_budget_includes_the_codebook(model: ModelFolder) -> None:
    budget = ProductQuantisation().nbytes(5 * 60, 64)
    plan = plan_update_of_samples(load(model), {"rose": 80}, (SIDE, SIDE, 3), LearnOptions(budget=budget))
    assert (plan.learner.settings()["features_per_class"], plan.memory_bytes) == (60, budget)
    fewer = plan_update_of_samples(load(model), {"rose": 80}, (SIDE, SIDE, 3), LearnOptions(budget=budget - 1))
    assert fewer.learner.settings()["features_per_class"] == 59
    with pytest.raises(UsageError, match=rf"one vector of each would be {ProductQuantisation().nbytes(5, 64):,}\."):
        plan_update_of_samples(load(model), {"rose": 80}, (SIDE, SIDE, 3), LearnOptions(budget=500))


def test_a_changed_codec_takes_effect_at_the_next_update(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    before = load(folder).learner.memory.features.rows
    rose = draw(tmp_path / "rose", ("rose",), 8)
    learn(folder, rose, LearnOptions(settings={"codec": "int8"}))  # a single class: the network stays as it is
    found = inspect(folder)
    assert (found.codec, found.bytes.memory) == ("int8", Int8().nbytes(24, 64))
    after = load(folder).learner.memory.features.rows[: len(before)]
    assert float((before * after).sum(1).min()) > 0.9999


def test_without_faiss_a_quantised_model_predicts_but_does_not_learn(
    model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    loaded = load(model)
    assert loaded.probabilities(torch.zeros(1, SIDE, SIDE, 3, dtype=torch.uint8)).shape == (1, 4)
    with pytest.raises(UsageError, match="faiss-cpu must be installed"):
        plan_update_of_samples(loaded, {"rose": 30}, (SIDE, SIDE, 3), replace(OPTIONS, settings={}))


def test_estimator_accepts_a_codec_as_a_setting(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    labels = np.arange(60) % 3
    inputs = draws.normal(size=(60, 5)) + 6 * np.eye(3, 5)[labels]
    classifier = IncrementalClassifier(settings={"codec": "int8"}, random_state=0).fit(inputs, labels)
    assert classifier.score(inputs, labels) > 0.9
    classifier.save(tmp_path / "model")
    again = IncrementalClassifier.load(tmp_path / "model")
    assert again.model_.learner.memory.features.codec == "int8"
    assert np.array_equal(again.predict(inputs), classifier.predict(inputs))
