"""`engram predict`: output, arguments and refusals."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from commands import ENVIRONMENT, Watched, engram, engram_here, tree
from models_made import DAISY, FORMULA, NAMES, SIDE, TULIP, copied

from engram.cli.predict import parse_reject
from engram.data.images import decode
from engram.model import ModelFolder, load, rename


@pytest.fixture
def place(calibrated_model: ModelFolder, tmp_path: Path) -> Path:
    """A folder with a calibrated model, and a.png, b.png and c.png of its three classes, in this order."""
    (tmp_path / "model").symlink_to(calibrated_model.path)
    for letter, name, folder in zip("abc", NAMES, "112", strict=True):
        (tmp_path / f"{letter}.png").write_bytes((calibrated_model.path.parent / folder / name / "0.png").read_bytes())
    return tmp_path


@pytest.fixture
def uncalibrated(small_model: ModelFolder, place: Path) -> Path:
    """The same with a model whose probabilities were never calibrated."""
    assert not load(small_model).is_calibrated
    (place / "model").unlink()
    (place / "model").symlink_to(small_model.path)
    return place


def probabilities(place: Path, *names: str) -> torch.Tensor:
    return load(ModelFolder(place / "model")).probabilities(
        torch.stack([decode(place / name, size=SIDE) for name in names])
    )


# Formats


def test_each_image_is_one_line_on_stdout(place: Path) -> None:
    before = tree(place / "model")
    done = engram_here("predict", "model", "b.png", "a.png", "--top", "1", cwd=place)
    expected = probabilities(place, "b.png", "a.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"b.png: {DAISY} {expected[0, 1]:.3f}\na.png: {TULIP} {expected[1, 0]:.3f}\n"
    assert tree(place / "model") == before
    all_of_them = engram_here("predict", "model", "c.png", cwd=place).stdout
    assert re.fullmatch(r"c\.png: =1\+1 0\.\d{3}, \S+ 0\.\d{3}, \S+ 0\.\d{3}\n", all_of_them)


def test_json_is_one_object(place: Path) -> None:
    done = engram_here("predict", "model", "a.png", "c.png", "--json", "--top", "2", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    output = json.loads(done.stdout)
    assert set(output) == {"predictions", "skipped", "calibrated"}
    assert output["skipped"] == [] and output["calibrated"] is True
    expected = probabilities(place, "a.png", "c.png").sort(dim=1, descending=True)
    for row, (path, prediction) in enumerate(zip(("a.png", "c.png"), output["predictions"], strict=True)):
        assert set(prediction) == {"path", "top"} and prediction["path"] == path
        assert [each["class"] for each in prediction["top"]] == [NAMES[n] for n in expected.indices[row, :2].tolist()]
        assert [each["probability"] for each in prediction["top"]] == pytest.approx(
            expected.values[row, :2].tolist(), abs=1e-6
        )


def test_no_cell_of_the_csv_is_a_formula(place: Path) -> None:
    for name in ('=cmd|"x"!A1.png', "ö, ü.png", "-c.png"):
        (place / name).write_bytes((place / "c.png").read_bytes())
    names = ["c.png", "./-c.png", '=cmd|"x"!A1.png', "ö, ü.png"]
    done = engram("predict", "model", *names, "--csv", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = csv.reader(io.StringIO(done.stdout))
    assert header == ["path", "class_1", "p_1", "class_2", "p_2", "class_3", "p_3"]
    assert [row[0] for row in rows] == ["c.png", "'-c.png", '\'=cmd|"x"!A1.png', "ö, ü.png"]
    assert {row[1] for row in rows} == {f"'{FORMULA}"}
    assert all(sum(map(float, row[2::2])) == pytest.approx(1, abs=1e-5) for row in rows)
    cells = [cell for row in [header, *rows] for cell in row]
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_a_probability_below_the_threshold_is_none_of_these(form: str, place: Path) -> None:
    best = probabilities(place, "a.png", "b.png").max(dim=1).values.tolist()
    assert best[0] != best[1]
    between = str(sum(best) / 2)
    expected = [value < float(between) for value in best]
    asked = () if form == "text" else (f"--{form}",)
    done = engram_here("predict", "model", "a.png", "b.png", "--reject", between, *asked, cwd=place)
    assert done.returncode == 0
    if form == "json":
        assert [each["rejected"] for each in json.loads(done.stdout)["predictions"]] == expected
    elif form == "csv":
        header, *rows = csv.reader(io.StringIO(done.stdout))
        assert header[1] == "rejected" and [row[1] for row in rows] == [str(each).lower() for each in expected]
    else:
        lines = done.stdout.splitlines()
        assert [re.match(r"[ab]\.png: none of these \(.*\)$", line) is not None for line in lines] == expected


def test_an_uncalibrated_model_ranks_classes_without_probabilities(uncalibrated: Path) -> None:
    expected = probabilities(uncalibrated, "a.png", "c.png").sort(dim=1, descending=True)
    ordered = [[NAMES[column] for column in row] for row in expected.indices.tolist()]
    done = engram_here("predict", "model", "a.png", "c.png", cwd=uncalibrated)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"a.png: {', '.join(ordered[0])}\nc.png: {', '.join(ordered[1])}\n"
    output = json.loads(engram_here("predict", "model", "a.png", "c.png", "--json", cwd=uncalibrated).stdout)
    assert output["calibrated"] is False
    assert [[each["class"] for each in prediction["top"]] for prediction in output["predictions"]] == ordered


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_an_uncalibrated_model_cannot_reject(form: str, uncalibrated: Path) -> None:
    asked = () if form == "text" else (f"--{form}",)
    done = engram_here("predict", "model", "a.png", "--reject", "0.5", *asked, cwd=uncalibrated)
    assert (done.returncode, done.stdout) == (2, "") and "never calibrated" in done.stderr
    done = engram_here("predict", "model", "a.png", "--reject", "2", *asked, cwd=uncalibrated)
    assert (done.returncode, done.stdout) == (2, "") and "found 2.0." in done.stderr


# Arguments


def test_a_dash_is_replaced_by_the_paths_on_stdin(place: Path) -> None:
    listed = b"\xef\xbb\xbfb.png\r\n\n   \r\nc.png"
    done = engram("predict", "model", "a.png", "-", "a.png", "--top", "1", cwd=place, stdin=listed)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["a.png", "b.png", "c.png", "a.png"]


def test_only_a_newline_separates_paths_on_stdin(place: Path) -> None:
    names = ["form\x0cfeed.png", "separator\u2028.png", "next\x85.png", " spaces .png", "tab\t.png"]
    raw = [*map(os.fsencode, names), b"\xff.png"]
    for name in raw:
        (place / os.fsdecode(name)).write_bytes((place / "a.png").read_bytes())
    done = engram("predict", "model", "-", "--json", cwd=place, stdin=b"\n".join(raw))
    output = json.loads(done.stdout)
    assert (done.returncode, output["skipped"]) == (0, [])
    assert [os.fsencode(each["path"]) for each in output["predictions"]] == raw


def test_a_path_with_a_newline_can_be_an_argument_but_not_on_stdin(place: Path) -> None:
    (place / "new\nline.png").write_bytes((place / "a.png").read_bytes())
    done = engram("predict", "model", "-", cwd=place, stdin=b"new\nline.png\n")
    assert done.returncode == 1
    assert done.stderr == ("skipped: new: There is no such file.\nskipped: line.png: There is no such file.\n")
    done = engram("predict", "model", "new\nline.png", "--top", "1", cwd=place)
    assert done.returncode == 0 and done.stdout.startswith(rf"new\nline.png: {TULIP} ")


def test_a_file_may_be_called_dash(place: Path) -> None:
    (place / "-").write_bytes((place / "a.png").read_bytes())
    done = engram("predict", "model", "./-", "--top", "1", cwd=place)
    assert done.returncode == 0 and done.stdout.startswith(f"-: {TULIP} ")


def test_folders_are_searched_and_skipped_files_are_listed(place: Path) -> None:
    (place / "deep" / "er").mkdir(parents=True)
    (place / "deep" / "er" / "2.png").write_bytes((place / "a.png").read_bytes())
    (place / "deep" / "1.PNG").write_bytes((place / "b.png").read_bytes())
    (place / "deep" / "notes.txt").touch()
    (place / "deep" / "er" / "up").symlink_to("..")
    done = engram_here("predict", "model", "deep", "--top", "1", cwd=place)
    assert done.returncode == 0  # files that were not named may be skipped
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["deep/1.PNG", "deep/er/2.png"]
    skipped = sorted(line.split(":")[1].strip() for line in done.stderr.splitlines())
    assert skipped == ["deep/er/up", "deep/notes.txt"]


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_unreadable_files_are_listed_the_others_are_classified_and_the_exit_code_is_1(form: str, place: Path) -> None:
    (place / "cut.png").write_bytes((place / "a.png").read_bytes()[:60])
    asked = () if form == "text" else (f"--{form}",)
    done = engram_here("predict", "model", "a.png", "cut.png", "absent.png", "b.png", "--quiet", *asked, cwd=place)
    assert done.returncode == 1
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["cut.png", "absent.png"]
    if form == "json":
        output = json.loads(done.stdout)
        assert [each["path"] for each in output["predictions"]] == ["a.png", "b.png"]
        assert [each["path"] for each in output["skipped"]] == ["cut.png", "absent.png"]
        assert output["skipped"][1]["reason"] == "There is no such file."
    else:
        lines = done.stdout.splitlines()[1 if form == "csv" else 0 :]
        assert [line[:5] for line in lines] == ["a.png", "b.png"]


def test_file_names_that_are_not_utf_8_are_printed_in_every_format(place: Path) -> None:
    raw = b"\xff\x1b[31m :smile:.png"
    name = os.fsdecode(raw)
    (place / name).write_bytes((place / "a.png").read_bytes())
    text, table, output = (engram("predict", "model", name, *form, cwd=place) for form in ((), ("--csv",), ("--json",)))
    assert [text.returncode, table.returncode, output.returncode] == [0, 0, 0]
    assert text.stdout.startswith(rf"\udcff\x1b[31m :smile:.png: {TULIP} ")
    assert list(csv.reader(io.StringIO(table.stdout)))[1][0] == r"\udcff\x1b[31m :smile:.png"
    assert os.fsencode(json.loads(output.stdout)["predictions"][0]["path"]) == raw and output.stdout.isascii()


HOSTILE = ("[red]x", "@SUM(A1)", "\u202egnp.evil", "😀 :smile:", "x" * 200, 'שלום, "a"')


def test_hostile_class_names_are_printed_in_every_format(calibrated_model: ModelFolder, place: Path) -> None:
    (place / "model").unlink()
    model = copied(calibrated_model, place / "model")
    for name in HOSTILE[:3]:
        rename(model, load(model).names[HOSTILE.index(name)], name)
    for names in (HOSTILE[:3], HOSTILE[3:]):
        for column, name in enumerate(names):
            if load(model).names[column] != name:
                rename(model, load(model).names[column], name)
        text, table, output = (
            engram_here("predict", "model", "a.png", *form, cwd=place, columns=40)
            for form in ((), ("--csv",), ("--json",))
        )
        assert text.stdout.count("\n") == 1  # only a terminal wraps lines
        shown = [name.replace("\u202e", r"\u202e") for name in names]
        assert all(f" {name} 0." in text.stdout for name in shown)
        cells = list(csv.reader(io.StringIO(table.stdout)))[1][1::2]
        assert {cell.removeprefix("'") for cell in cells} == set(shown)
        assert not any(cell.startswith("@") for cell in cells)
        assert {each["class"] for each in json.loads(output.stdout)["predictions"][0]["top"]} == set(names)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (("model", "a.png", "--json", "--csv"), 2, "--csv"),
        (("model", "a.png", "--reject", "2", "--csv"), 2, "found 2.0."),
        (("model", "a.png", "--reject", "nan"), 2, "found nan."),
        (("model", "a.png", "--reject", "half"), 2, "Invalid value for '--reject'"),
        (("model", "a.png", "--top", "0"), 2, "Invalid value for '--top'"),
        (("model",), 2, "Missing argument 'IMAGE|FOLDER|-...'"),
        (("model", "empty"), 1, "no image in empty"),
        (("model", "-"), 1, "no image in -"),
        (("absent", "a.png"), 1, "engram learn absent FOLDER"),
        (("my model", "a.png"), 1, "engram learn 'my model' FOLDER"),
        (("a.png", "a.png"), 1, "no model in a.png"),
        (("empty", "a.png"), 1, "no model in empty"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], code: int, fact: str, place: Path) -> None:
    (place / "empty").mkdir()
    before = tree(place)
    done = engram("predict", *arguments, cwd=place)
    assert (done.returncode, done.stdout) == (code, "")
    assert fact in done.stderr
    assert tree(place) == before


def test_an_earlier_version_can_predict(place: Path) -> None:
    output = json.loads(engram_here("predict", "model", "a.png", "--version", "1", "--json", cwd=place).stdout)
    assert len(output["predictions"][0]["top"]) == 2
    assert (
        len(json.loads(engram_here("predict", "model", "a.png", "--json", cwd=place).stdout)["predictions"][0]["top"])
        > 2
    )


def test_a_damaged_model_is_reported_with_the_command_that_repairs_it(small_model: ModelFolder, place: Path) -> None:
    (place / "model").unlink()
    model = copied(small_model, place / "model")
    (model.path / "versions" / "000002" / "learner.safetensors").write_bytes(b"")
    done = engram_here("predict", "model", "a.png", cwd=place)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("engram rollback model --to 1\n")


# Terminals and pipes


def test_stdout_in_a_file_has_no_bars(place: Path) -> None:
    for asked, lines in (((), 3), (("--csv",), 4), (("--json",), 1)):
        watched = Watched("predict", "model", "a.png", "b.png", "c.png", *asked, cwd=place)
        assert watched.exit_code() == 0
        assert watched.printed.count("\n") == lines and "\x1b" not in watched.printed
        assert "predict" in watched.seen and TULIP not in watched.seen


def test_on_a_terminal_predictions_are_printed_above_the_bar(place: Path) -> None:
    watched = Watched("predict", "model", "a.png", "b.png", "--top", "1", cwd=place, stdout_too=True)
    assert watched.exit_code() == 0, watched.seen
    erased = re.escape("\r\x1b[2K")
    for path, name in (("a.png", TULIP), ("b.png", DAISY)):
        assert re.search(rf"{erased}{re.escape(f'{path}: {name} ')}0\.\d{{3}}\r\n", watched.seen), watched.seen


def test_ctrl_c_ends_the_wait_for_stdin(place: Path) -> None:
    os.mkfifo(place / "pipe")
    held = os.open(place / "pipe", os.O_RDWR)
    watched = Watched("predict", "model", "-", "--json", cwd=place, stdin=place / "pipe")
    os.write(held, b"a.png\n")
    while (
        watched.process.exitcode is None and select.select([held], [], [], 0)[0]
    ):  # until the command has read it and waits for more
        time.sleep(0.02)
    watched.send_signal(signal.SIGINT)
    assert watched.exit_code() == 130 and watched.printed == ""
    os.close(held)


def test_a_closed_pipe_ends_the_command_silently(place: Path) -> None:
    command = [sys.executable, "-m", "engram", "predict", "model", *["a.png"] * 300, "--csv"]
    with subprocess.Popen(command, cwd=place, env=ENVIRONMENT, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"path,class_1")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(120) == 1


def test_characters_outside_the_encoding_of_stdout_are_escaped(place: Path) -> None:
    (place / "日本.png").write_bytes((place / "b.png").read_bytes())
    done = engram("predict", "model", "日本.png", "--top", "1", cwd=place, encoding="latin-1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(rf"\u65e5\u672c.png: {DAISY} 0.")


def test_a_path_that_is_too_long_is_an_error_without_a_traceback(place: Path) -> None:
    done = engram_here("predict", "model", "n" * 300, "a.png", cwd=place)
    assert done.returncode == 1
    assert done.stdout.startswith("a.png: ") and "Traceback" not in done.stderr
    long = "n" * 300
    for arguments in (("verify", f"{long}/m"), ("report", long, "-o", "x.html"), ("export", "model", f"{long}.npz")):
        done = engram_here(*arguments, cwd=place)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ") or "no model" in done.stdout


def test_a_closed_stdout_causes_no_traceback(place: Path) -> None:
    command = [sys.executable, "-m", "engram", "predict", "model", "a.png"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], cwd=place, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert "Traceback" not in done.stderr


def test_a_closed_stdin_is_an_empty_list(place: Path) -> None:
    command = [sys.executable, "-m", "engram", "predict", "model", "-"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], cwd=place, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 1 and "no image in -" in done.stderr


@pytest.mark.parametrize(
    "text, expected", [("auto", "auto"), ("5%", "5%"), (" 0.5%", "0.5%"), ("0.9", 0.9), ("1", 1.0)]
)
def test_a_threshold_is_a_probability_a_rate_or_auto(text: str, expected: float | str) -> None:
    assert parse_reject(text) == expected


@pytest.mark.parametrize("text", ["half", "%", "-5%", "100%", "5 %", "", "1e9%"])
def test_any_other_threshold_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_reject(text)
