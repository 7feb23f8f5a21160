"""`engram evaluate`: output and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from commands import Watched, engram, engram_here, tree
from models_made import DAISY, FORMULA, NAMES, TULIP, copied
from rich.cells import cell_len

from engram.model import ModelFolder, evaluate, load, rename


@pytest.fixture
def place(small_model: ModelFolder, tmp_path: Path) -> Path:
    """A folder with a model, and `flowers` with 3 tulips, 2 daisies, and a tulip labelled as formula."""
    (tmp_path / "model").symlink_to(small_model.path)
    for name, source, numbers in ((TULIP, TULIP, (0, 1, 2)), (DAISY, DAISY, (0, 1)), (FORMULA, TULIP, (3,))):
        (tmp_path / "flowers" / name).mkdir(parents=True)
        for number in numbers:
            shutil.copy(small_model.path.parent / "1" / source / f"{number}.png", tmp_path / "flowers" / name)
    return tmp_path


def test_accuracy_classes_matrix_and_mistakes_are_printed(place: Path) -> None:
    before = tree(place / "model")
    done = engram("evaluate", "model", "flowers", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, *rest = done.stdout.splitlines()
    assert first == "accuracy 0.833 (95 % interval 0.418 to 0.989) on 6 images; mean over classes 0.667"
    assert re.fullmatch(r"expected calibration error 0\.\d{3} \(0\.\d{3} before calibration\)", second)
    assert rest == [
        "",
        "images  recall  precision  class",
        "     3   1.000      0.750  [red]tulip",
        "     2   1.000      1.000  gänseblümchen",
        "     1   0.000          –  =1+1",
        "",
        "true classes (rows) and predicted classes (columns, in the same order)",
        "3  ·  ·  [red]tulip",
        "·  2  ·  gänseblümchen",
        "1  ·  ·  =1+1",
        "",
        "most frequent mistakes",
        "1 × =1+1 classified as [red]tulip",
    ]
    assert tree(place / "model") == before


def test_json_is_one_object_that_equals_the_result_in_python(place: Path) -> None:
    done = engram_here("evaluate", "model", "flowers", "--json", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    output = json.loads(done.stdout)
    assert output["confusion"] == [[3, 0, 0], [0, 2, 0], [1, 0, 0]]
    assert [each["name"] for each in output["classes"]] == list(NAMES)
    expected = evaluate(load(ModelFolder(place / "model")), place / "flowers").to_json()
    assert {**output, "calibration_error": 0, "calibration_error_uncalibrated": 0} == {
        **expected,
        "calibration_error": 0,
        "calibration_error_uncalibrated": 0,
    }
    assert output["calibration_error"] == pytest.approx(expected["calibration_error"], abs=1e-6)


def test_a_class_without_images_has_no_numbers(place: Path) -> None:
    shutil.rmtree(place / "flowers" / FORMULA)
    done = engram_here("evaluate", "model", "flowers", cwd=place)
    assert "     –       –          –  =1+1\n" in done.stdout and "mistakes" not in done.stdout
    output = json.loads(engram_here("evaluate", "model", "flowers", "--json", cwd=place).stdout)
    assert output["classes"][2] == {"name": FORMULA, "images": 0, "accuracy": None, "precision": None}


def test_unknown_classes_are_reported_and_are_not_part_of_the_accuracy(place: Path) -> None:
    for name in ("rose", "Tulip", "\u202eevil"):
        shutil.copytree(place / "flowers" / TULIP, place / "flowers" / name)
    done = engram_here("evaluate", "model", "flowers", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    summary, unknown, *_ = done.stdout.split("\n\n")
    assert summary.startswith("accuracy 0.833 (95 % interval 0.418 to 0.989) on 6 images")
    assert unknown == (r"not counted: 9 images of 3 classes that the model does not know: Tulip, rose, \u202eevil")
    output = json.loads(engram_here("evaluate", "model", "flowers", "--json", cwd=place).stdout)
    assert output["accuracy"] == pytest.approx(5 / 6) and output["images"] == 6
    assert output["interval"] == pytest.approx([0.4178, 0.9886], abs=1e-4)
    assert output["unknown"] == [{"name": name, "images": 3} for name in ("Tulip", "rose", "\u202eevil")]


def test_the_first_of_many_unknown_classes_are_named(place: Path) -> None:
    for number in range(6):
        shutil.copytree(place / "flowers" / DAISY, place / "flowers" / f"new {number}")
    done = engram_here("evaluate", "model", "flowers", cwd=place)
    assert "12 images of 6 classes that the model does not know: new 0, new 1, new 2, new 3, new 4, …\n" in done.stdout


def test_an_earlier_version_can_be_evaluated(place: Path) -> None:
    shutil.rmtree(place / "flowers" / FORMULA)
    output = json.loads(engram_here("evaluate", "model", "flowers", "--version", "1", "--json", cwd=place).stdout)
    assert [each["name"] for each in output["classes"]] == [TULIP, DAISY]
    done = engram_here("evaluate", "model", "flowers", "--version", "9", cwd=place)
    assert done.returncode == 2 and "version 9" in done.stderr and "1, 2" in done.stderr


def test_skipped_files_are_listed_on_stderr_and_in_json(place: Path) -> None:
    (place / "flowers" / TULIP / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (place / "flowers" / TULIP / os.fsdecode(b"\xff.png")).touch()
    (place / "flowers" / "notes.txt").touch()
    done = engram("evaluate", "model", "flowers", "--quiet", "--json", cwd=place)
    assert done.returncode == 0
    output = json.loads(done.stdout)
    assert output["images"] == 6 and len(output["skipped"]) == 3 and done.stdout.isascii()
    assert [line.split(": It")[0] for line in done.stderr.splitlines()] == [
        "skipped: flowers/notes.txt",
        "skipped: flowers/[red]tulip/cut.png",
        r"skipped: flowers/[red]tulip/\udcff.png",
    ]
    assert engram("evaluate", "model", "flowers", cwd=place).stdout.startswith("accuracy 0.833 (")


def test_a_list_may_be_evaluated(place: Path) -> None:
    (place / "list.csv").write_text(f"flowers/{TULIP}/0.png,{TULIP}\nflowers/{TULIP}/1.png,{DAISY}\n")
    output = json.loads(engram_here("evaluate", "model", "list.csv", "--json", cwd=place).stdout)
    assert output["confusion"] == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (("model", "strange"), 1, "strange: Tulip, rose. It knows: [red]tulip, gänseblümchen, =1+1."),
        (("model", "absent"), 1, "absent"),
        (("model", "flowers", "--device", "abacus"), 2, "'abacus' is not one of"),
        (("model",), 2, "Missing argument 'FOLDER|LIST.csv'"),
        (("absent", "flowers"), 1, "engram learn absent FOLDER"),
        (("flowers", "flowers"), 1, "no model in flowers"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], code: int, fact: str, place: Path) -> None:
    for name in ("Tulip", "rose"):
        shutil.copytree(place / "flowers" / TULIP, place / "strange" / name)
    done = engram_here("evaluate", *arguments, cwd=place)
    assert (done.returncode, done.stdout) == (code, "")
    assert fact in done.stderr


def test_a_class_without_a_readable_image_is_an_error_that_names_it(place: Path) -> None:
    (place / "flowers" / FORMULA / "3.png").write_bytes(b"")
    done = engram_here("evaluate", "model", "flowers", cwd=place)
    assert (done.returncode, done.stdout) == (1, "")
    assert "class '=1+1'" in done.stderr and "flowers/=1+1/3.png: It is empty." in done.stderr


def test_a_damaged_model_is_reported_with_the_command_that_repairs_it(small_model: ModelFolder, place: Path) -> None:
    (place / "model").unlink()
    model = copied(small_model, place / "model")
    (model.path / "current.json").write_bytes(b"{}")
    done = engram_here("evaluate", "model", "flowers", cwd=place)
    assert (done.returncode, done.stdout) == (1, "")
    assert "current.json" in done.stderr
    assert done.stderr.endswith("engram rollback model --to 2\n")


HOSTILE = ("[red]x", "\u202egnp.evil", "日本語の名前" * 12)


def test_hostile_names_fit_a_narrow_terminal(small_model: ModelFolder, place: Path) -> None:
    (place / "model").unlink()
    model = copied(small_model, place / "model")
    for old, new in zip(NAMES, HOSTILE, strict=True):
        rename(model, old, new)
        (place / "flowers" / old).rename(place / "flowers" / new)
    done = engram_here("evaluate", "model", "flowers", cwd=place, columns=40)
    assert done.returncode == 0, done.stderr
    _, classes, matrix, mistakes = done.stdout.split("\n\n")
    assert max(map(cell_len, classes.splitlines() + matrix.splitlines()[1:])) <= 40
    assert matrix.splitlines()[1:3] == ["3  ·  ·  [red]x", r"·  2  ·  \u202egnp.evil"]
    for part in (classes, matrix):
        assert HOSTILE[2] in part.replace("\n", "").replace(" ", "")
    assert mistakes == f"most frequent mistakes\n1 × {HOSTILE[2]} classified as [red]x\n"


def test_a_matrix_that_does_not_fit_is_left_to_json(place: Path) -> None:
    done = engram_here("evaluate", "model", "flowers", cwd=place, columns=20)
    assert "matrix of 3 classes" in done.stdout and "--json" in done.stdout


def test_a_terminal_shows_bars_and_stdout_none_of_them(place: Path) -> None:
    watched = Watched("evaluate", "model", "flowers", cwd=place)
    assert watched.exit_code() == 0
    assert "evaluate" in watched.seen and "time left" in watched.seen and "accuracy" not in watched.seen
    assert watched.printed.startswith("accuracy 0.833") and "\x1b" not in watched.printed
