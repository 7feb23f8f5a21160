"""`engram report`, used as a person uses it."""

import json
import shlex
from pathlib import Path

import pytest
from commands import engram, engram_here
from made_results import result, save

from engram.experiments.report import make_report
from engram.experiments.report.tables import commands


def test_a_report_is_written_and_its_path_printed(tmp_path: Path) -> None:
    save(tmp_path / "runs", result("features"), result("lwf"))
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "result.json").write_text('{"schema": 1}')
    done = engram("report", "runs", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "report: report.html\n"), done.stderr
    assert done.stderr.startswith("note: ") and "runs/bad/result.json" in done.stderr
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_missing_folders_are_created_for_figures_and_json(tmp_path: Path) -> None:
    save(tmp_path / "runs", result("features", curve=[0.9]), result("[red]x[/red] \x1b[31m", curve=[0.8]))
    done = engram("report", "runs", "-o", "a/b/c.html", "--figures", "d/e", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["report"] == "a/b/c.html" and (tmp_path / "a" / "b" / "c.html").exists()
    groups = output["sections"][0]["groups"]
    assert list(groups) == ["features", "[red]x[/red] \\x1b[31m"]
    assert groups["features"]["average accuracy"] == 0.9
    assert len(list((tmp_path / "d" / "e").glob("*.pdf"))) >= 2
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".aside")]


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (["nowhere"], 1, "'nowhere'"),
        (["empty"], 1, "'empty'"),
        (["runs", "-o", "empty"], 2, "'empty'"),
        (["runs", "-o", "runs/run-000/result.json"], 2, "'runs/run-000/result.json'"),
        (["runs", "-o", "/proc/nothing/report.html"], 1, "/proc/nothing"),
        (["runs", "-o", "/proc/report.html"], 1, "/proc"),
        (["runs", "--figures", "/proc/nothing"], 1, "/proc/nothing"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    arguments: list[str], code: int, fact: str, tmp_path: Path
) -> None:
    save(tmp_path / "runs", result(curve=[0.5], seconds={}))
    (tmp_path / "empty").mkdir()
    before = (tmp_path / "runs" / "run-000" / "result.json").read_bytes()
    done = engram_here("report", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert fact in done.stderr and len(done.stderr.splitlines()) == 1
    assert (tmp_path / "runs" / "run-000" / "result.json").read_bytes() == before


def test_a_report_needs_an_argument(tmp_path: Path) -> None:
    assert engram_here("report", cwd=tmp_path).returncode == 2


def test_the_command_of_a_report_makes_the_same_result_again(tmp_path: Path) -> None:
    first = engram("run", "finetune", "--tasks", "2", "--epochs", "1", "--out", "runs/first", "--quiet", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    section = make_report([tmp_path / "runs"]).parts[0].section
    (command,) = commands(section, section.groups.index[0])
    program, *arguments = shlex.split(command)
    assert program == "engram"
    again = engram(*arguments, "--out", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    one, other = (json.loads((tmp_path / place / "result.json").read_text()) for place in ("runs/first", "again"))
    assert one["settings"] == other["settings"] and one["curve"] == other["curve"] and one["split"] == other["split"]
