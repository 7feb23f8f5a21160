"""`engram inspect`, `verify`, `forget`, `rename`, `merge` and `rollback`: output, questions and refusals."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from commands import engram_here
from models_made import DAISY, FORMULA, NAMES, TULIP, copied
from rich.cells import cell_len

from engram import storage
from engram.model import ModelFolder, forget, load, rename, rollback
from engram.model.held_out import Accuracy

engram = partial(engram_here, columns=80)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def model(small_model: ModelFolder, tmp_path: Path) -> ModelFolder:
    return copied(small_model, tmp_path / "my model")


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


# inspect


def test_inspect_shows_classes_bytes_and_history_in_aligned_columns(small_model: ModelFolder) -> None:
    code, out, err = engram("inspect", small_model.path)
    assert (code, err) == (0, "")
    assert "features; network small, images of 16 pixels a side" in out
    assert "4.5 KB (4,608 bytes): features 4,608, images 0; no budget" in out
    assert re.search(r"^adaptation   ω [01]\.\d{3}, 0\.\d{3} without, on 24 held-out samples$", out, re.M)
    assert re.search(r"^classifier   linear SVM \(C 1\)$", out, re.M)
    assert re.search(r"^calibration  never calibrated$", out, re.M)
    assert "epochs 10 (70)" in out and "momentum" not in out
    lines = out.splitlines()
    header = lines.index("features  images  bytes  seen  class")
    assert lines[header + 1 : header + 5] == [
        "       6       0  1,536    48  [red]tulip",
        "       6       0  1,536    24  gänseblümchen",
        "       6       0  1,536    24  =1+1",
        "      18       0  4,608    96  total, 3 classes",
    ]
    assert re.fullmatch(r"1  [\d-]{10} [\d:]{8}  learn   stored   2 new \(48 samples\)", lines[-2])
    assert re.fullmatch(r"2  .*  learn   current  1 new \(24 samples\), 1 known \(24 sample.*", lines[-1])


def test_inspect_shows_accuracy_with_its_interval_and_the_calibration_measured(calibrated_model: ModelFolder) -> None:
    facts = load(calibrated_model).metadata
    low, high = Accuracy(sum(facts.held_out_counts.correct), 36).interval
    out = " ".join(engram("inspect", calibrated_model.path).stdout.split())
    share = sum(facts.held_out_counts.correct) / 36
    accuracy = f"accuracy {share:.3f} (95 % interval {low:.3f} to {high:.3f}) over all 3 classes"
    assert f"{accuracy}, on 36 held-out images. This is an estimate" in out
    measured = f"expected calibration error {facts.calibration.error_after:.3f} on 36 held-out images"
    assert f"calibration temperature {facts.calibration.temperature:.3g}, {measured}" in out
    found = json.loads(engram("inspect", calibrated_model.path, "--json").stdout)
    assert found["accuracy"] == sum(facts.held_out_counts.correct) / 36 and found["interval"] == [low, high]
    assert found["held_out_counts"] == {
        "correct": [*facts.held_out_counts.correct],
        "total": [12, 12, 12],
        "estimated": True,
    }
    assert found["classifier"] == "linear SVM (C 1)"


def test_inspect_says_that_accuracy_is_unknown_if_nothing_was_held_out(
    calibrated_model: ModelFolder, tmp_path: Path
) -> None:
    model = copied(calibrated_model, tmp_path / "model")
    forget(model, [DAISY, FORMULA])
    assert re.search(r"^accuracy     not known: ", engram("inspect", model.path).stdout, re.M)
    found = json.loads(engram("inspect", model.path, "--json").stdout)
    assert (found["accuracy"], found["interval"]) == (None, None)


def test_inspect_as_json_is_one_object_with_everything(hybrid_model: ModelFolder) -> None:
    code, out, err = engram("inspect", hybrid_model.path, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    kept = {"features": 6, "images": 3, "bytes": 6 * 64 * 4 + 3 * 16 * 16 * 3}
    seen = dict(zip(NAMES, (48, 24, 24), strict=True))
    assert found["classes"] == [{"name": name, **kept, "seen": seen[name]} for name in NAMES]
    assert found["bytes"]["memory"] == 3 * kept["bytes"]
    assert found["settings"]["momentum"] == 0.9 and found["changed"]["images_per_class"] == 3
    assert [each["in_use"] for each in found["history"]] == [False, True]


HOSTILE = (
    "[red]x[/red]",
    "=1+1+1",
    "\u202egpj.evil",
    "שלום עולם",
    "long " * 100,
    "日本語の名前" * 40,
    "x" * 300,
    ":smile: [link=file:///etc]",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_the_tables_or_is_taken_for_markup(name: str, model: ModelFolder) -> None:
    done = engram("rename", model.path, DAISY, name)
    assert done.returncode == 0, done.stderr
    out = engram("inspect", model.path).stdout
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert all(letter.isprintable() for line in lines for letter in line)
    escaped = name.strip().replace("\u202e", "\\u202e")
    header = next(number for number, line in enumerate(lines) if line.startswith("features  images"))
    total = next(number for number, line in enumerate(lines) if "total, 3 classes" in line)
    shown = "".join(line[31:] for line in lines[header + 2 : total - 1])
    assert shown.replace(" ", "") == escaped.replace(" ", "")
    assert len([line for line in lines if re.match(r"[123]  20", line)]) == 3  # one line a version
    assert json.loads(engram("inspect", model.path, "--json").stdout)["classes"][1]["name"] == name.strip()


# verify


def test_verify_lists_leftovers_and_newer_versions_with_a_command_for_each(model: ModelFolder) -> None:
    older = (model.path / "current.json").read_bytes()
    assert engram("rename", model.path, DAISY, "daisy").returncode == 0
    (model.path / "current.json").write_bytes(older)
    (model.path / f"{storage.ASIDE}half").write_text("half")
    code, out, _ = engram("verify", model.path)
    assert code == 0 and f"engram rollback '{model.path}' --to 3" in out  # the newer version
    assert f"{storage.ASIDE}half" in out and f"engram rollback '{model.path}' --to 2" in out
    done = engram("rollback", model.path, "--to", "2")
    assert done.returncode == 0 and f"{storage.ASIDE}half" in done.stderr
    assert (model.path / "versions" / "000003").is_dir()
    assert engram("rollback", model.path, "--to", "3").returncode == 0
    assert json.loads(engram("verify", model.path, "--json").stdout)["newer"] == []


def test_verify_says_intact_or_lists_the_problems(model: ModelFolder) -> None:
    code, out, err = engram("verify", model.path)
    assert (code, err) == (0, "")
    assert re.match(r"intact: 2 versions, current 2, 0\.\d\d MB\n", out)
    assert json.loads(engram("verify", model.path, "--json").stdout)["intact"] is True
    (model.path / "versions" / "000001" / "learner.safetensors").write_bytes(b"")
    (model.path / "odd\x1b[31m").write_text("")
    code, out, err = engram("verify", model.path)
    assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith("versions/000001/learner.safetensors was cut short")
    assert out.splitlines()[1] == r"odd\x1b[31m does not belong to the model. Remove it."
    code, out, _ = engram("verify", model.path, "--json")
    assert code == 1 and len(json.loads(out)["problems"]) == 2 and json.loads(out)["intact"] is False


# forget


def test_forget_is_refused_without_a_terminal(model: ModelFolder) -> None:
    before = tree(model.path)
    code, out, err = engram("forget", model.path, DAISY)
    assert (code, out) == (2, "")
    for part in (
        "6 stored features and 0 exemplars",
        "weights in head and classifier",
        "names",
        "details of the history",
        "(1, 2)",
        "cannot be undone",
        "not unlearned",
        "add --yes",
    ):
        assert part in err
    assert tree(model.path) == before


def test_forget_with_yes_does_not_ask(model: ModelFolder) -> None:
    code, out, err = engram("forget", model.path, DAISY, FORMULA, "--yes")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"forgotten: '{DAISY}', '{FORMULA}'; 3.0 KB less memory",
        f"{model.path}, version 3: 1 class",
    ]
    assert load(model).names == (TULIP,)


def test_forget_names_classes_that_only_earlier_versions_have(model: ModelFolder) -> None:
    rollback(model)
    output = f"Only in earlier versions, and removed with them: '{FORMULA}'."
    assert output in engram("forget", model.path, FORMULA)[2]
    code, out, err = engram("forget", model.path, FORMULA, "--yes")
    assert (code, err) == (0, "") and output in out
    assert load(model).names == (TULIP, DAISY) and model.versions() == [3]


def test_forget_as_json_is_one_object(model: ModelFolder) -> None:
    code, out, err = engram("forget", model.path, DAISY, "--yes", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "action": "forget",
        "version": 3,
        "classes": [TULIP, FORMULA],
        "forgotten": [DAISY],
        "not_in_use": [],
        "features": 6,
        "images": 0,
        "bytes": 1536,
        "removed_versions": [1, 2],
    }


def test_forget_that_was_interrupted_says_how_to_finish(model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "remove", interrupt)
        done = engram("forget", model.path, DAISY, "--yes")
    assert done.returncode == 130 and f"engram verify '{model.path}'" in done.stderr
    with monkeypatch.context() as patched:
        patched.setattr(storage, "remove", refuse)
        done = engram("forget", model.path, FORMULA, "--yes")
    assert done.returncode == 1 and "Permission denied" in done.stderr  # leftovers must be removed first
    assert engram("verify", model.path).returncode == 0
    assert (load(model).names, model.versions()) == ((TULIP, FORMULA), [3])


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), ("\x04", 1), ("yesterday\n", 1)]
)
def test_forget_asks_on_a_terminal_and_follows_the_answer(
    answer: str, code: int, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())  # \x04 is Ctrl-D: the end of the input
    with open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        done = engram("forget", model.path, DAISY)
    os.close(ours)
    assert (done.returncode, bool(done.stdout)) == (code, code == 0)
    assert "cannot be undone" in done.stderr and "Forget? [y/N]" in done.stderr
    assert ("Nothing was changed" in done.stderr) == bool(code)
    assert (DAISY in load(model).names) == bool(code)


# rename, merge, rollback


def test_rename_merge_and_rollback_print_the_version_in_use(model: ModelFolder) -> None:
    code, out, _ = engram("rename", model.path, DAISY, "daisy")
    assert code == 0
    assert out == f"'{DAISY}' is now 'daisy'\n{model.path}, version 3: 3 classes\n"
    code, out, _ = engram("merge", model.path, "daisy", TULIP)
    assert code == 0
    assert out.startswith(f"'daisy' is merged into '{TULIP}': 6 stored features and 0 exemplars\n")
    code, out, _ = engram("rollback", model.path)
    assert code == 0
    assert re.match(r"version 3 of \S+Z is current; it was 4\n.*my model, version 3: 3 classes\n", out)
    code, out, _ = engram("rollback", model.path, "--to", "1")
    assert code == 0 and load(model).names == (TULIP, DAISY)
    history = engram("inspect", model.path).stdout.splitlines()[-4:]
    assert [line.split()[4] for line in history] == ["current", "stored", "stored", "stored"]
    assert history[2].endswith(f"{DAISY} → daisy") and history[3].endswith(f"daisy into {TULIP}")


def test_rename_merge_and_rollback_as_json(model: ModelFolder) -> None:
    renamed, merged, back = (
        json.loads(engram(*arguments, "--json").stdout)
        for arguments in (
            ("rename", model.path, DAISY, "daisy"),
            ("merge", model.path, "daisy", TULIP),
            ("rollback", model.path),
        )
    )
    assert renamed == {
        "action": "rename",
        "version": 3,
        "classes": [TULIP, "daisy", FORMULA],
        "from": DAISY,
        "to": "daisy",
    }
    assert (merged["version"], merged["class"], merged["into"], merged["features"]) == (4, "daisy", TULIP, 6)
    assert (back["action"], back["version"], back["from"]) == ("rollback", 3, 4)


def test_rollback_repairs_current_json(model: ModelFolder) -> None:
    (model.path / "current.json").write_bytes(b"")
    output = engram("inspect", model.path)
    assert output.returncode == 1 and f"engram rollback '{model.path}' --to 2" in output.stderr
    code, out, _ = engram("rollback", model.path, "--to", "2")
    assert code == 0 and "current.json was damaged and is repaired" in out
    assert engram("verify", model.path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("forget", "MODEL", "ganseblumchen", "--yes"), 2, f"'{DAISY}'"),
        (("forget", "MODEL"), 2, "CLASS..."),
        (("forget", "MODEL", *NAMES, "--yes"), 2, "No class"),
        (("rename", "MODEL", DAISY, "a\nb"), 2, r"'a\nb' cannot be the name"),
        (("rename", "MODEL", DAISY, "[RED]TULIP"), 2, "'[red]tulip'"),
        (("rename", "MODEL", "\x1b[31m", "b"), 2, r"'\x1b[31m'"),
        (("merge", "MODEL", DAISY, DAISY), 2, "itself"),
        (("merge", "MODEL", DAISY, "=1+2"), 2, "'=1+1'"),
        (("rollback", "MODEL", "--to", "7"), 2, "version 7"),
        (("inspect", "absent"), 1, "engram learn absent FOLDER"),
        (("forget", "absent", DAISY), 1, "absent"),
        (("rename", "absent", "a", "b"), 1, "absent"),
        (("merge", "absent", "a", "b"), 1, "absent"),
        (("rollback", "absent"), 1, "absent"),
    ],
)
def test_impossible_edits_are_refused_in_one_sentence_and_change_nothing(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    small_model: ModelFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = tree(small_model.path)
    done = engram(*(str(small_model.path) if each == "MODEL" else each for each in arguments))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and "Traceback" not in done.stderr and "\x1b" not in done.stderr
    assert tree(small_model.path) == before and not (tmp_path / "absent").exists()


def test_verify_says_that_there_is_no_model(tmp_path: Path) -> None:
    assert engram("verify", tmp_path / "absent") == (1, f"There is no model in {tmp_path / 'absent'}.\n", "")


def test_a_model_that_another_process_changes_is_refused(model: ModelFolder) -> None:
    with model.writing():
        for arguments in (("forget", model.path, DAISY, "--yes"), ("rename", model.path, DAISY, "b")):
            done = engram(*arguments)
            assert done.returncode == 1 and "Another process is working in" in done.stderr
    assert load(model).names == NAMES
    rename(model, DAISY, "b")
