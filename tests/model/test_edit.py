"""`forget`, `rename`, `merge` and `rollback`; nothing of a forgotten class is left in any file."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from models_made import DAISY, FORMULA, NAMES, TULIP, copied, draw, files_of, network_path
from refusals import STEPS, Failing
from torch import Tensor

from engram import storage
from engram.data.labelled import read_images, scan
from engram.errors import DataError, EngramError, EngramWarning, UsageError
from engram.model import (
    LearnOptions,
    Model,
    ModelFolder,
    forget,
    inspect,
    learn,
    load,
    merge,
    preview_forget,
    rename,
    rollback,
    verify,
)
from engram.model.folder import Writer

EDITS: dict[str, Callable[[ModelFolder], object]] = {
    "forget": lambda folder: forget(folder, [DAISY]),
    "rename": lambda folder: rename(folder, DAISY, "daisy"),
    "merge": lambda folder: merge(folder, DAISY, TULIP),
    "rollback": lambda folder: rollback(folder),
}


@pytest.fixture
def model(small_model: ModelFolder, tmp_path: Path) -> ModelFolder:
    return copied(small_model, tmp_path / "model")


def photos(small_model: ModelFolder) -> tuple[Tensor, list[str]]:
    """All images that it has learned, and the names of their classes."""
    places = [read_images(scan(small_model.path.parent / place), 16) for place in ("1", "2")]
    names = [each.class_names[label] for each in places for label in each.samples.labels.tolist()]
    return torch.cat([each.samples.batch(torch.arange(len(each.samples))) for each in places]), names


def answers(model: Model, images: Tensor) -> list[str]:
    return [model.names[class_index] for class_index in model.scores(images).argmax(1).tolist()]


# Forgetting


def renderings(tensor: Tensor) -> Iterator[bytes]:
    """Numbers in every encoding in which they may be stored."""
    if tensor.dtype == torch.uint8:
        yield tensor.numpy().tobytes()
        return
    values = tensor.detach().numpy()
    for kind in (np.float64, np.float32, np.float16):
        yield values.astype(kind).tobytes()
    yield tensor.detach().bfloat16().view(torch.int16).numpy().tobytes()


def traces(model: Model, name: str) -> dict[str, list[bytes]]:
    """The traces of a class in a model, by kind, as bytes to search for."""
    class_index, learner = model.class_index(name), model.learner
    assert learner.classifier_ is not None
    memory = learner.memory
    stored = memory.features.rows[memory.features.class_indices == class_index]
    images = (
        memory.images.rows[memory.images.class_indices == class_index] if len(memory.images) else memory.images.rows
    )
    return {
        "vectors": [each for row in stored for each in renderings(row)],
        "images": [each for image in images for each in renderings(image)],
        "head": list(renderings(learner.trained.head.weight[class_index])),
        "classifier": list(renderings(learner.classifier_.weight_[class_index])),
        "name": [
            *(name.encode(encoding) for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le")),
            json.dumps(name)[1:-1].encode(),
            "ga\u0308nseblu\u0308mchen".encode(),
        ],
    }


def found(path: Path, searched: dict[str, list[bytes]]) -> dict[str, set[str]]:
    """The files that contain traces of each kind."""
    files = files_of(path)
    return {
        kind: {name for name, content in files.items() if any(each in content for each in renders)}
        for kind, renders in searched.items()
    }


@pytest.mark.parametrize("kind", ["small_model", "hybrid_model"])
def test_no_file_contains_a_trace_of_a_forgotten_class(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = copied(request.getfixturevalue(kind), tmp_path / "model")
    searched = {number: traces(load(folder, version=number), DAISY) for number in (1, 2)}
    for number, each in searched.items():  # before `forget`, the same search finds all of them
        place = f"versions/{number:06d}"
        manifests = {f"versions/{n:06d}/manifest.json" for n in (1, 2)}
        there = found(folder.path, each)
        assert {what for what, files in there.items() if files} == {*each} - (
            {"images"} if not each["images"] else set()
        )
        assert there["vectors"] == there["head"] == there["classifier"] == {f"{place}/learner.safetensors"}
        assert there["name"] == manifests
    assert bool(searched[2]["images"]) == (kind == "hybrid_model")
    every_vector = [row for number in (1, 2) for row in searched[number]["vectors"][1::4]]  # as float32
    learners = [content for name, content in files_of(folder.path).items() if name.endswith("learner.safetensors")]
    assert all(any(row in content for content in learners) for row in every_vector) and len(every_vector) == 12

    done = forget(folder, [DAISY])
    assert files_of(folder.path).keys() == {
        ".lock",
        "current.json",
        "versions/000003/manifest.json",
        "versions/000003/learner.safetensors",
        network_path(folder.current()),
    }
    for each in searched.values():
        assert not any(found(folder.path, each).values())
    assert done.classes == (TULIP, FORMULA) and done.details["removed_versions"] == [1, 2]
    assert verify(folder).problems == ()


def test_forgetting_leaves_the_other_classes_and_updates_all_counts(
    calibrated_model: ModelFolder, tmp_path: Path
) -> None:
    model = copied(calibrated_model, tmp_path / "model")
    images, names = photos(calibrated_model)
    before, was = answers(load(model), images), load(model).metadata
    forget(model, [DAISY])
    after = load(model)
    others = [number for number, name in enumerate(names) if name != DAISY]
    right = [
        sum(predicted[number] == names[number] for number in others) for predicted in (before, answers(after, images))
    ]
    assert right[1] >= right[0] >= 0.95 * len(others)
    assert after.metadata.seen == (48, 24) and was.seen == (48, 24, 24)
    assert (was.calibration.images, after.metadata.calibration.images) == (36, 24)  # fitted again, and assessed again
    assert was.held_out_counts.total == (12, 12, 12) and after.metadata.held_out_counts.total == (12, 12)
    assert after.metadata.held_out_counts.estimated == was.held_out_counts.estimated is True
    assert after.metadata.adaptation == was.adaptation
    assert after.learner.memory.features.counts.tolist() == [24, 24]


def test_forgetting_keeps_the_temperature_if_too_few_held_out_images_remain(
    calibrated_model: ModelFolder, tmp_path: Path
) -> None:
    model = copied(calibrated_model, tmp_path / "model")
    before = load(model).metadata.calibration
    forget(model, [DAISY, FORMULA])  # of a single class nothing can be held out
    after = load(model).metadata
    assert before.temperature != 1 and before.images == 36
    assert (after.calibration.temperature, after.calibration.images) == (before.temperature, 0)
    assert after.held_out_counts.accuracy() is None


def test_preview_lists_what_forget_removes_and_changes_nothing(hybrid_model: ModelFolder) -> None:
    before = files_of(hybrid_model.path)
    gone = preview_forget(hybrid_model, [DAISY, FORMULA, DAISY])
    assert (gone.names, gone.features, gone.images, gone.versions) == ((DAISY, FORMULA), 12, 6, (1, 2))
    assert gone.bytes == 12 * 64 * 4 + 6 * 16 * 16 * 3
    assert files_of(hybrid_model.path) == before


def test_all_classes_but_one_can_be_forgotten(small_model: ModelFolder, model: ModelFolder) -> None:
    forget(model, [TULIP, FORMULA])
    images, _ = photos(small_model)
    assert set(answers(load(model), images[:3])) == {DAISY}
    assert verify(model).problems == ()
    before = files_of(model.path)
    with pytest.raises(UsageError, match=str(model.path)):
        forget(model, [DAISY])
    assert files_of(model.path) == before


@pytest.mark.parametrize("others", [(), (TULIP,)])
def test_forget_removes_a_class_that_only_unused_versions_know(others: tuple[str, ...], model: ModelFolder) -> None:
    searched = traces(load(model), FORMULA)
    rollback(model)
    before = load(model)
    assert FORMULA not in before.names and found(model.path, searched)["vectors"]
    gone = preview_forget(model, [FORMULA, *others])
    assert (gone.not_in_use, gone.features, gone.versions) == ((FORMULA,), 6 * len(others), (1, 2))
    done = forget(model, [FORMULA, *others])
    assert done.details["forgotten"] == [FORMULA, *others] and done.details["not_in_use"] == [FORMULA]
    assert not any(found(model.path, searched).values()) and model.versions() == [3]
    assert verify(model).problems == ()
    if not others:  # then the version in use does not change
        after = load(model)
        assert (after.names, after.metadata) == (before.names, before.metadata)
        for name, tensor in before.learner.state().items():
            assert torch.equal(after.learner.state()[name], tensor), name


def test_unknown_class_cannot_be_forgotten_even_if_a_version_is_damaged(model: ModelFolder) -> None:
    rollback(model)
    (model.path / "versions" / "000002" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="There is no class"):
        forget(model, [FORMULA])
    forget(model, [DAISY])
    assert load(model).names == (TULIP,) and model.versions() == [3]


def test_a_forgotten_class_can_be_learned_again(model: ModelFolder, tmp_path: Path) -> None:
    forget(model, [DAISY])
    learned = learn(model, draw(tmp_path / "again", (DAISY,), 6), LearnOptions(epochs=1))
    assert load(model).names == (TULIP, FORMULA, DAISY) and learned.version == 4
    assert [change.details == {} for change in model.history()] == [True, True, False, False]
    assert rollback(model).version == 3
    with pytest.raises(UsageError, match=r"3.*--to: 4"):
        rollback(model)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gänseblumchen"], f"There is no class 'gänseblumchen'. Did you mean '{DAISY}'?"),
        ([FORMULA, "zzz\n\x1b[31m"], r"There is no class 'zzz\n\x1b[31m'. There are: "),
        ([], "Name a class to forget"),
    ],
)
def test_unknown_class_is_refused_with_the_nearest_name(
    names: list[str], message: str, small_model: ModelFolder
) -> None:
    before = files_of(small_model.path)
    for act in (preview_forget, forget):
        with pytest.raises(UsageError) as raised:
            act(small_model, names)
        assert str(raised.value).startswith(message)
    assert files_of(small_model.path) == before


def test_class_is_found_by_a_decomposed_name(model: ModelFolder) -> None:
    assert forget(model, ["ga\u0308nseblu\u0308mchen"]).details["forgotten"] == [DAISY]


@pytest.mark.parametrize("edit", EDITS)
def test_edits_create_no_model(edit: str, tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "absent" / "model")
    with pytest.raises(DataError, match="absent"):
        EDITS[edit](folder)
    assert not (tmp_path / "absent").exists()


# Interruptions

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from engram.model import ModelFolder, forget

template, place, name = sys.argv[1:]
shutil.copytree(template, f"{place}/0")
forget(ModelFolder(Path(f"{place}/0")), [name])  # so that late imports are done before the forks
for step in range(1, 100):
    path = f"{place}/{step}"
    shutil.copytree(template, path)
    child = os.fork()
    if child == 0:
        steps = 0

        def hook(event, arguments):
            global steps
            removal = event in ("os.remove", "os.rmdir")
            if removal or (event in ("open", "os.rename", "os.mkdir") and str(arguments[0]).startswith(path)):
                steps += 1
                if steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        forget(ModelFolder(Path(path)), [name])
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if code != -signal.SIGKILL:
        break
"""


def test_forget_killed_at_any_step_is_undone_or_final_for_every_read(small_model: ModelFolder, tmp_path: Path) -> None:
    searched = traces(load(small_model), DAISY)
    command = [sys.executable, "-c", KILLED, str(small_model.path), str(tmp_path), DAISY]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    codes = done.stdout.split()
    assert codes[-1] == "0" and set(codes[:-1]) == {str(-signal.SIGKILL)}, done.stderr
    outcomes = []
    for step in range(1, len(codes)):
        folder = ModelFolder(tmp_path / str(step))
        forgotten = folder.current().classes == (TULIP, FORMULA)
        assert forgotten or folder.current().classes == NAMES
        assert folder.problems() == []
        if not outcomes or forgotten != outcomes[-1]:  # the others have the same tensors
            assert verify(folder).intact
        assert folder.versions() == ([3] if forgotten else [1, 2])
        if forgotten:
            with pytest.raises(UsageError):
                folder.load(2)
            assert not any(DAISY in manifest.classes for manifest in folder.manifests())
        with warnings.catch_warnings(action="ignore"):
            rollback(folder, folder.number_in_use())
        assert any(found(folder.path, searched).values()) != forgotten
        outcomes.append(forgotten)
    assert outcomes == sorted(outcomes) and outcomes.count(False) >= 8 and outcomes.count(True) >= 3


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["removed", "emptied"])
def test_forget_killed_before_removal_holds_with_a_damaged_pointer(
    damage: Callable[[Path], object], model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = traces(load(model), DAISY)
    with monkeypatch.context() as killed:
        killed.setattr(Writer, "_remove_unused", lambda self, essential: None)
        forget(model, [DAISY])
    assert any(found(model.path, searched).values())
    damage(model.path / "current.json")
    with pytest.raises(DataError, match=r"engram rollback .* --to 3"):
        load(model)
    for number in (1, 2):
        with pytest.raises(UsageError, match=rf"{number} .* 3\."):
            rollback(model, number)
    done = rollback(model, 3)
    assert done.details["from"] is None and done.classes == (TULIP, FORMULA)
    assert not any(found(model.path, searched).values())
    assert verify(model).problems == ()


def test_failed_removal_names_the_command_that_finishes_it(model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = traces(load(model), DAISY)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as refusing:
        refusing.setattr(storage, "remove", refuse)
        with pytest.raises(EngramError, match=r"Permission denied\. .* engram rollback .* --to 3"):
            forget(model, [DAISY])
        assert {"versions/000001", "versions/000002"} <= set(verify(model).leftovers)
    assert load(model).names == (TULIP, FORMULA)
    with pytest.warns(EngramWarning, match="versions/000001"):
        rollback(model, 3)
    assert verify(model).leftovers == verify(model).problems == ()
    assert not any(found(model.path, searched).values())


@pytest.mark.parametrize(
    ("edit", "step"),
    [
        (edit, step)
        for edit in EDITS
        for step in ("sync", "replace", "rename", "open to write")
        if (edit, step) != ("rollback", "rename")  # it renames nothing
    ],
)
def test_failed_edit_leaves_the_model_unchanged(
    edit: str, step: str, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(model.path)
    place, name, concerns = STEPS[step]
    failing = Failing(getattr(place, name), 1, errno.ENOSPC, concerns)
    with monkeypatch.context() as patched:
        patched.setattr(place, name, failing)
        with pytest.raises(EngramError, match=os.strerror(errno.ENOSPC)):
            EDITS[edit](model)
    assert failing.left <= 0 and files_of(model.path) == before
    assert verify(model).problems == ()


# Names


def test_rename_changes_only_the_name(small_model: ModelFolder, model: ModelFolder) -> None:
    done = rename(model, DAISY, "  daisy ")
    assert (done.version, done.classes, done.details) == (
        3,
        (TULIP, "daisy", FORMULA),
        {"from": DAISY, "to": "daisy"},
    )
    before, after = load(small_model), load(model)
    assert after.names == (TULIP, "daisy", FORMULA) and after.metadata == before.metadata
    state = after.learner.state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.learner.state().items())
    assert (model.history()[-1].action, model.history()[-1].details) == ("rename", {"from": DAISY, "to": "daisy"})
    assert model.versions() == [1, 2, 3] and model.current().parent == 2
    assert load(model, version=2).names == NAMES
    assert verify(model).problems == ()


def test_any_single_line_of_text_can_be_a_name(model: ModelFolder) -> None:
    marked_up = ("[red]x[/red]", "=1+1+1", "'; rm -rf ~", "a/b", "..")
    foreign = ("\u202eevil", "שלום", "می‌خواهم", "👨‍👩‍👧", "Gänseblümchen", "n" * 10_000)
    before = DAISY
    for name in (*marked_up, *foreign):
        rename(model, before, name)
        assert load(model).names[1] == name
        before = name


def test_names_are_stored_composed(model: ModelFolder) -> None:
    rename(model, TULIP, "e\u0301toile")
    assert load(model).names[0] == "\xe9toile"


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("", "cannot have an empty name"),
        (" \t ", "cannot have an empty name"),
        ("two\nlines", r"'two\\nlines' cannot be the name"),
        ("bell\x07", r"'bell\\x07' cannot be the name"),
        ("half \ud800", r"'half \\ud800' cannot be the name"),
        ("\u200f\u200d", "cannot be the name"),
        ("n" * 10_001, "has 10,001"),
        ("para\u2029graph", r"cannot be the name"),
        (DAISY, f"is called '{DAISY}' already"),
        (TULIP, r"There is a class '\[red\]tulip', and .*: engram merge .*/model 'gänseblümchen' '\[red\]tulip'"),
        ("[RED]Tulip", r"There is a class '\[red\]tulip', and '\[RED\]Tulip'"),
        (f" {FORMULA} ", "There is a class '=1\\+1'"),
    ],
)
def test_invalid_or_duplicate_name_is_refused(new: str, message: str, small_model: ModelFolder) -> None:
    before = files_of(small_model.path)
    with pytest.raises(UsageError, match=message):
        rename(small_model, DAISY, new)
    assert files_of(small_model.path) == before


# Joining


def test_merged_class_predicts_for_both(small_model: ModelFolder, model: ModelFolder) -> None:
    done = merge(model, DAISY, FORMULA)
    details = {"class": DAISY, "into": FORMULA, "features": 6, "images": 0}
    assert (done.version, done.classes, done.details) == (3, (TULIP, FORMULA), details)
    assert (model.history()[-1].action, model.history()[-1].details) == ("merge", details)
    after, before = load(model), load(small_model)
    assert after.metadata.seen == (48, 48)
    assert after.metadata.calibration.temperature == before.metadata.calibration.temperature
    images, names = photos(small_model)
    expected = [FORMULA if name == DAISY else name for name in names]
    assert np.mean([predicted == name for predicted, name in zip(answers(after, images), expected, strict=True)]) >= 0.9
    assert verify(model).problems == ()
    assert rollback(model).classes == NAMES
    assert answers(load(model), images) == answers(before, images)


def test_merge_combines_exemplars(hybrid_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(hybrid_model, tmp_path / "model")
    assert merge(folder, TULIP, DAISY).details["images"] == 3
    assert load(folder).names == (DAISY, FORMULA)
    assert verify(folder).problems == ()


def test_merge_into_itself_or_an_unknown_class_is_refused(small_model: ModelFolder) -> None:
    before = files_of(small_model.path)
    with pytest.raises(UsageError, match="itself"):
        merge(small_model, DAISY, DAISY)
    with pytest.raises(UsageError, match="'rose'"):
        merge(small_model, DAISY, "rose")
    assert files_of(small_model.path) == before


# Going back


def test_rollback_returns_to_the_parent_and_makes_no_version(model: ModelFolder) -> None:
    rename(model, DAISY, "daisy")
    rollback(model, 1)
    rename(model, TULIP, "tulip")  # version 4, made from 1
    history = model.history()
    done = rollback(model)
    assert (done.version, done.details["from"], done.classes) == (1, 4, (TULIP, DAISY))
    assert model.versions() == [1, 2, 3, 4] and model.history() == history
    with pytest.raises(UsageError, match=r"1.*--to: 2, 3, 4"):
        rollback(model)
    assert rollback(model, 4).classes == ("tulip", DAISY)


def test_impossible_rollback_lists_the_possible_ones(model: ModelFolder) -> None:
    before = files_of(model.path)
    for number in (0, -1, 3):
        with pytest.raises(UsageError, match=rf"{number} .* 1, 2\."):
            rollback(model, number)
    assert files_of(model.path) == before
    with model.writing() as writer:
        made = load(writer)
        writer.publish(made.learner.state(), action="learn", method="m", settings={}, classes=made.names, keep=1)
    with pytest.raises(UsageError, match=r"Version 3 was made from 2"):
        rollback(model)


def test_rollback_repairs_the_pointer_and_avoids_damaged_versions(model: ModelFolder) -> None:
    (model.path / "versions" / "000002" / "learner.safetensors").write_bytes(b"")
    assert rollback(model).version == 1
    (model.path / "current.json").unlink()
    with pytest.raises(DataError, match=r"current\.json.* engram rollback .* --to 1"):
        rollback(model)
    assert rollback(model, 1).details["from"] is None
    assert load(model).names == (TULIP, DAISY)
    assert inspect(model).version == 1
