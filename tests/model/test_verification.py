"""`verify` finds damaged files, and intact files whose content is inconsistent; it changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from learners_made import OF_EACH_STATE, learned
from models_made import DAISY, copied, files_of
from torch import Tensor

from engram import storage
from engram.data import Stream
from engram.errors import DataError, EngramError, EngramWarning, UsageError
from engram.model import Metadata, Model, ModelFolder, forget, inspect, load, merge, rename, rollback, save, verify
from engram.model.manifest import File, Pointer
from engram.model.saving import VerifyResult

State = dict[str, Tensor]


@pytest.fixture
def model(small_model: ModelFolder, tmp_path: Path) -> ModelFolder:
    return copied(small_model, tmp_path / "model")


def publish(folder: ModelFolder, change: Callable[[State], object] = lambda state: None, **fields: Any) -> ModelFolder:
    """Save a third version: the second with something changed, every checksum right."""
    manifest, tensors = folder.load(2)
    change(tensors)
    known: dict[str, Any] = {
        "method": manifest.method,
        "settings": manifest.settings,
        "classes": manifest.classes,
        "details": manifest.details,
    }
    with folder.writing() as writer:
        writer.publish(tensors, action="learn", **{**known, **fields})
    assert folder.problems() == []  # the files are as they were saved
    return folder


@pytest.mark.parametrize("kind", ["small_model", "hybrid_model"])
def test_unchanged_model_is_intact(kind: str, request: pytest.FixtureRequest) -> None:
    folder: ModelFolder = request.getfixturevalue(kind)
    size = sum(each.stat().st_size for each in folder.path.rglob("*") if each.is_file())
    found = verify(folder)
    assert found == VerifyResult(versions=(1, 2), in_use=2, newer=(), leftovers=(), bytes=size, problems=())
    assert found.intact and found.to_json()["intact"] is True


def test_every_damaged_file_is_named_and_the_rest_is_checked(model: ModelFolder) -> None:
    (model.path / "versions" / "000001" / "learner.safetensors").write_bytes(b"")
    (model.path / "notes.txt").write_text("")
    found = verify(model)
    assert not found.intact and found.versions == (1, 2)
    assert [each.split()[0] for each in found.problems] == ["versions/000001/learner.safetensors", "notes.txt"]


def test_without_a_pointer_the_versions_on_disk_are_checked(model: ModelFolder) -> None:
    (model.path / "current.json").unlink()
    found = verify(model)
    assert (found.versions, found.in_use) == ((1, 2), None)
    assert len(found.problems) == 1 and found.problems[0].startswith("current.json ")


def test_missing_model_is_a_problem(tmp_path: Path) -> None:
    found = verify(ModelFolder(tmp_path / "absent"))
    assert len(found.problems) == 1 and "absent" in found.problems[0] and found.versions == ()
    assert not (tmp_path / "absent").exists()


def test_verify_lists_leftovers_and_the_next_writer_removes_them(model: ModelFolder) -> None:
    forget(model, [DAISY])  # version 3, the only one
    shutil.copytree(model.path / "versions" / "000003", model.path / "versions" / "000002")
    (model.path / "versions" / f"{storage.ASIDE}half").mkdir()
    before = files_of(model.path)
    found = verify(model)
    assert found.intact and found.leftovers == (f"versions/{storage.ASIDE}half", "versions/000002")
    assert files_of(model.path) == before
    with pytest.warns(EngramWarning, match="versions/000002"):
        rollback(model, 3)
    assert [each.name for each in (model.path / "versions").iterdir()] == ["000003"]


def test_an_older_copy_of_current_json_loses_no_version(model: ModelFolder) -> None:
    older = (model.path / "current.json").read_bytes()
    rename(model, DAISY, "daisy")
    rename(model, "daisy", "bellis")
    (model.path / "current.json").write_bytes(older)
    before = files_of(model.path)
    found = verify(model)
    assert found.intact and (found.in_use, found.newer, found.leftovers) == (2, (3, 4), ())
    assert files_of(model.path) == before
    rename(model, DAISY, "marguerite")  # the next writer lists them again
    assert model.versions() == [1, 2, 3, 4, 5] and verify(model).newer == ()
    assert rollback(model, 4).classes[1] == "bellis"


def test_verify_changes_nothing_where_there_is_no_model(tmp_path: Path) -> None:
    (tmp_path / f"{storage.ASIDE}theirs").write_text("not ours")
    assert not verify(ModelFolder(tmp_path)).intact
    assert files_of(tmp_path) == {f"{storage.ASIDE}theirs": b"not ours"}


def times(name: str, factor: float) -> Callable[[State], object]:
    return lambda state: state.update({name: state[name] * factor})


def row(name: str, value: float) -> Callable[[State], object]:
    def change(state: State) -> None:
        state[name] = state[name].clone()
        state[name][0] = value

    return change


def cut(*names: str) -> Callable[[State], object]:
    return lambda state: state.update({name: state[name][:-1] for name in names})


CLASSIFIER = tuple(f"classifier.{part}" for part in ("classes", "weight", "intercept"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (times("memory.features.rows", 2), "18 of its 18 stored features"),
        (row("memory.features.rows", 0.0), "1 of its 18 stored features"),
        (row("memory.features.rows", float("nan")), "memory.features.rows"),
        (row("network.mean", float("inf")), "network.mean"),
        (row("classifier.intercept", float("nan")), "classifier.intercept"),
        (row("memory.features.counts", 5), "17"),
        (cut("memory.features.rows"), "memory.features.held_out"),
        (cut("memory.features.counts"), "2 instead of 3"),
        (lambda state: state.update({"memory.features.rows": torch.ones(18, 1)}), "(1,) instead of (64,)"),
        (lambda state: state.update({"memory.features.rows": state["memory.features.rows"].double()}), "float64"),
        (cut("network.head.weight"), "network.head.weight"),
        (cut(*CLASSIFIER), "classifier.classes"),
        (row("classifier.classes", 7), "3 classes"),
        (row("classes", 1), "label"),
        (row("task_of_class", 9), "2 tasks"),
        (cut("task_of_class"), "task_of_class"),
        (cut("classes"), "classes"),
        (lambda state: state.pop("memory.images.rows"), "versions/000003: "),
        (lambda state: state.update({"memory.images.rows": torch.tensor(1.0)}), "do not fit together"),
        (lambda state: state.pop("classifier.weight"), "LinearSVM"),
        (lambda state: state.clear(), "versions/000003: "),
        (lambda state: state.update({"shape": torch.tensor([16])}), "versions/000003: "),
        (lambda state: state.update({"shape": torch.tensor([16, 16, 1])}), "versions/000003: "),
        (lambda state: state.update({"shape": torch.zeros(0, dtype=torch.int64)}), "Inputs of shape ()"),
        (lambda state: state.update({"network.head.weight": torch.ones(3)}), "versions/000003: "),
        (lambda state: state.update({"memory.features.rows": torch.tensor(1.0)}), "versions/000003: "),
        (lambda state: state.update({"classifier.weight": torch.ones(3, 2)}), "versions/000003: "),
        (lambda state: state.update({"shape": torch.tensor([4000, 4000, 3])}), "4000"),
        (lambda state: state.update({"shape": torch.tensor([16, 16, 3], dtype=torch.int32)}), "int32"),
        (lambda state: state.update({"tasks": torch.tensor([2.0])}), "tasks"),
        (lambda state: state.update({"network.mean": torch.zeros(2)}), "network.std"),
        (lambda state: state.update({"unheard_of": torch.zeros(2)}), "unheard_of"),
        (row("memory.features.counts", -6), "negative"),
    ],
)
def test_tensors_that_contradict_each_other_are_found(
    change: Callable[[State], object], problem: str, model: ModelFolder
) -> None:
    found = verify(publish(model, change))
    with suppress(DataError):  # numbers that are wrong do not prevent loading; everything else does
        load(model)
    assert found.problems[0].startswith("versions/000003: ")
    assert any(problem in each for each in found.problems), found.problems
    assert all(each.startswith("versions/000003: ") for each in found.problems)  # the others are not


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"classes": ("a", "b")}, "classes"),
        ({"details": {"seen": [1, 2]}}, "2 counts"),
        (
            {"details": {"seen": [1, 2, 3], "budget": 4607}},
            "4,607",
        ),
        ({"details": {"seen": [1, 2, -3]}}, "seen.2"),
        ({"details": {"seen": [1, 2, 3], "unheard of": 1}}, "unheard of"),
        ({"method": "pickle\x1b[31m"}, r"'pickle\x1b[31m'"),
        ({"method": "finetune"}, "'finetune'"),
        ({"settings": {"network": "resnet18"}}, "learner"),
        ({"details": {"seen": [1, 2, 3], "held_out_counts": {"correct": [1], "total": [2]}}}, "3 classes"),
        ({"details": {"seen": [1, 2, 3], "held_out_counts": {"correct": [2, 0, 0], "total": [1, 0, 0]}}}, "3 classes"),
        ({"settings": {"weights": "/etc/hostname"}}, "weights"),
        ({"settings": {"unlabelled": "/"}}, "unlabelled"),
        ({"settings": {"device": "meta"}}, "device"),
        ({"settings": {"network": "hf:someone/something"}}, "hf:someone/something"),
        ({"settings": {"learning_rate": -1}}, "'learning_rate'"),
        ({"settings": {"crop": 1}}, "do not fit together"),  # less than the network can take
    ],
)
def test_a_manifest_that_contradicts_its_tensors_is_found(
    fields: dict[str, Any], problem: str, model: ModelFolder
) -> None:
    found = verify(publish(model, **fields))
    assert len(found.problems) == 1 and problem in found.problems[0], found.problems
    with suppress(DataError, UsageError):  # what can be loaded can be used
        loaded = load(model)
        assert loaded.scores(loaded.blank_input).shape == (1, 3)


def test_a_huge_file_is_refused_without_reading_it_into_memory(model: ModelFolder) -> None:
    manifest = model.current()
    learner = model.path / "versions" / "000002" / "learner.safetensors"
    size = 2**26
    os.truncate(learner, size)  # sparse
    for sha256 in ("0" * 64, hashlib.file_digest(learner.open("rb"), "sha256").hexdigest()):
        content = dataclasses.replace(manifest, learner=File(sha256, size)).serialise()
        (learner.parent / "manifest.json").write_bytes(content)
        digests = {**model.pointer().versions, 2: hashlib.sha256(content).hexdigest()}
        (model.path / "current.json").write_bytes(Pointer(current=2, versions=digests).serialise())
        tracemalloc.start()
        assert "learner.safetensors" in verify(model).problems[0]
        with pytest.raises(DataError, match=r"learner\.safetensors"):
            load(model)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size / 4


def quantised(state: State, count: int) -> None:
    """Replace the stored features by `count` vectors of one byte each."""
    for name in [name for name in state if name.startswith("memory.features.")]:
        del state[name]
    codebook = torch.zeros(1, 256, 64, dtype=torch.float16)
    codebook[:, :, 0] = 1
    parts = {"codes": torch.zeros(count, 1, dtype=torch.uint8), "codebook": codebook}
    parts |= {"rotation": torch.eye(64).half(), "held_out": torch.zeros(count, dtype=torch.bool)}
    parts |= {"counts": torch.tensor([count, 0, 0])}
    state.update({f"memory.features.{name}": tensor for name, tensor in parts.items()})


def test_few_bytes_that_stand_for_more_features_than_fit_into_memory_are_refused(
    model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(model, lambda state: quantised(state, 1000))
    assert verify(folder).intact
    monkeypatch.setattr("engram.model.saving.machine_memory", lambda: 4 * 1000 * 64 - 1)
    assert "256,000 bytes" in verify(folder).problems[0]
    with pytest.raises(DataError, match="256,000 bytes"):
        load(folder)


def infinite_buffer(model: Model) -> None:
    next(model.learner.trained.buffers())[0] = float("inf")


def nan_weight(model: Model) -> None:
    with torch.no_grad():
        next(model.learner.trained.parameters())[0] = float("nan")


def double_precision(model: Model) -> None:
    model.learner.trained.double()


def tensor_of_no_model(model: Model) -> None:
    state = model.learner.state
    model.learner.state = lambda: {**state(), "unheard_of": torch.zeros(2)}  # type: ignore[method-assign]


def huge_images(model: Model) -> None:
    model.learner.shape_ = (4000, 4000, 3)


def negative_count(model: Model) -> None:
    object.__setattr__(model.metadata, "seen", (1, 2, -3))


CHANGES = (infinite_buffer, nan_weight, double_precision, tensor_of_no_model, huge_images, negative_count)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_saved_that_verify_would_reject(change: Callable[[Model], None], model: ModelFolder) -> None:
    loaded, before = load(model), files_of(model.path)
    change(loaded)
    with pytest.raises(EngramError, match="not published"), model.writing() as writer:
        save(writer, loaded, action="learn")
    assert files_of(model.path) == before


def test_memory_within_budget_is_no_problem(model: ModelFolder) -> None:
    assert verify(publish(model, details={"seen": [1, 2, 3], "budget": 4608})).intact


def test_exemplars_are_checked_too(hybrid_model: ModelFolder, tmp_path: Path) -> None:
    folder = publish(copied(hybrid_model, tmp_path / "model"), cut("memory.images.rows"))
    (problem,) = verify(folder).problems
    assert "versions/000003" in problem and "8" in problem and "9" in problem


def test_verifying_changes_neither_the_model_nor_its_files(model: ModelFolder) -> None:
    before = files_of(model.path)
    assert verify(model) == verify(model)
    assert files_of(model.path) == before


@pytest.mark.parametrize("method", OF_EACH_STATE)
def test_a_model_of_any_method_is_intact_before_and_after_merge_and_forget(
    method: str, vectors: Stream, tmp_path: Path
) -> None:
    learner = learned(method, vectors)
    folder, names = ModelFolder(tmp_path / "model"), tuple(map(str, learner.classes_))
    with folder.writing() as writer:
        save(writer, Model(learner, names, Metadata(seen=(24,) * 6)), action="learn")
    assert verify(folder).problems == ()
    found = inspect(folder)
    own = sum(each.bytes for each in found.classes)
    assert own + found.bytes.shared == found.bytes.memory == learner.memory.nbytes
    merge(folder, names[0], names[4])
    assert verify(folder).problems == ()
    forget(folder, [names[2], names[4]])
    assert verify(folder).problems == ()
    assert [(each.name, each.seen) for each in inspect(folder).classes] == [(names[n], 24) for n in (1, 3, 5)]
