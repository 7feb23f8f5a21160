"""`inspect`: counts, bytes, settings and history of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_made import DAISY, FORMULA, NAMES, TULIP, copied, network_path
from safetensors.torch import load_file

from engram.errors import DataError
from engram.model import ModelFolder, forget, inspect, load, merge, rename, rollback, save, verify
from engram.model.held_out import Accuracy
from engram.model.model import with_metadata


@pytest.mark.parametrize("kind", ["small_model", "hybrid_model"])
def test_counts_match_the_tensors_on_disk(kind: str, request: pytest.FixtureRequest) -> None:
    folder: ModelFolder = request.getfixturevalue(kind)
    found = json.loads(json.dumps(inspect(folder).to_json()))
    files = ("versions/000002/learner.safetensors", network_path(folder.load()[0]))
    tensors = {name: tensor for file in files for name, tensor in load_file(folder.path / file).items()}
    features, images = tensors["memory.features.rows"], tensors["memory.images.rows"]
    assert [each["name"] for each in found["classes"]] == list(NAMES)
    assert [each["features"] for each in found["classes"]] == tensors["memory.features.counts"].tolist() == [6, 6, 6]
    assert [each["images"] for each in found["classes"]] == ([3, 3, 3] if kind == "hybrid_model" else [0, 0, 0])
    assert [each["seen"] for each in found["classes"]] == [48, 24, 24]
    sizes = found["bytes"]
    assert sizes["features"] == features.nbytes and sizes["images"] == images.nbytes
    assert sizes["memory"] == sum(each["bytes"] for each in found["classes"]) == features.nbytes + images.nbytes
    for part in ("network", "classifier"):
        assert sizes[part] == sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(f"{part}."))
    every_file = [each for each in folder.path.rglob("*") if each.is_file()]
    assert sizes["folder"] == sum(each.stat().st_size for each in every_file) > 2 * sizes["network"]


def test_summary_has_network_settings_and_accuracy(calibrated_model: ModelFolder) -> None:
    found, facts = inspect(calibrated_model), load(calibrated_model).metadata
    assert (found.method, found.network, found.image_size, found.budget) == ("features", "small", 16, None)
    assert (found.version, found.features_per_class) == (2, 24)
    assert found.classifier == "linear SVM (C 1)"
    assert (
        found.held_out_counts == facts.held_out_counts
        and found.held_out_counts.total == (12, 12, 12)
        and found.held_out_counts.estimated
    )
    assert found.accuracy == sum(facts.held_out_counts.correct) / 36
    assert found.interval == pytest.approx(Accuracy(sum(facts.held_out_counts.correct), 36).interval)
    assert found.calibration == facts.calibration and found.calibration.images == 36
    assert found.adaptation == facts.adaptation and found.adaptation is not None and found.adaptation.images == 24
    assert found.settings["epochs"] == 10 and found.settings["momentum"] == 0.9
    assert found.changed == {name: value for name, value in found.settings.items() if value != found.defaults[name]}
    assert {
        "epochs": 10,
        "batch_size": 32,
        "schedule": "one-cycle",
        "features_per_class": 24,
    }.items() <= found.changed.items()
    assert "momentum" not in found.changed and "objective" not in found.changed


def test_history_lists_actions_and_which_versions_are_stored_and_in_use(
    small_model: ModelFolder, tmp_path: Path
) -> None:
    folder = copied(small_model, tmp_path / "model")
    rename(folder, DAISY, "daisy")
    merge(folder, "daisy", TULIP)
    rollback(folder, 2)
    history = inspect(folder).history
    assert [(each.version, each.action, each.stored, each.in_use) for each in history] == [
        (1, "learn", True, False),
        (2, "learn", True, True),
        (3, "rename", True, False),
        (4, "merge", True, False),
    ]
    assert history[0].learned == {"new": 2, "new_samples": 48, "more": 0, "more_samples": 0}
    assert history[1].learned == {"new": 1, "new_samples": 24, "more": 1, "more_samples": 24}
    assert history[2].learned == {} and history[2].details == {"from": DAISY, "to": "daisy"}
    assert [each.created for each in history] == [change.created for change in folder.history()]
    forget(folder, [FORMULA])
    found = inspect(folder)
    assert [each.name for each in found.classes] == [TULIP, DAISY]
    assert [(each.stored, each.in_use, each.details) for each in found.history] == [
        *[(False, False, {})] * 4,
        (True, True, {"classes": 1, "features": 6, "images": 0}),
    ]
    held_out = load(folder).learner.memory.features.held_out
    assert held_out is not None and sum(found.held_out_counts.total) == int(held_out.sum()) > 0


def test_history_of_removed_versions_has_counts_without_names(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    before = inspect(folder).history
    for number in range(5):
        rename(folder, DAISY if number == 0 else f"daisy {number}", f"daisy {number + 1}")
    history = inspect(folder).history
    assert [each.stored for each in history] == [False, False, *[True] * 5]
    assert [each.learned for each in history[:2]] == [each.learned for each in before]
    assert (history[0].details["new"], history[1].details["more"]) == ([2, 48], [1, 24])
    assert history[1].details["accuracy"] == before[1].details["accuracy"]
    assert verify(folder).problems == ()


def test_budget_is_shown(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    with folder.writing() as writer:
        save(writer, with_metadata(load(writer), budget=10_000), action="learn")
    assert inspect(folder).budget == 10_000


def test_damaged_or_missing_model_is_not_inspected(small_model: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        inspect(ModelFolder(tmp_path / "absent"))
    folder = copied(small_model, tmp_path / "model")
    (folder.path / "versions" / "000002" / "learner.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="engram rollback"):
        inspect(folder)


def test_a_default_of_none_is_shown_as_the_number_that_it_stands_for(small_model: ModelFolder) -> None:
    found = inspect(small_model)
    assert found.changed["adapter_width"] == 64
    assert found.defaults["adapter_width"] == 16 * 64  # d = 64
