"""`engram suite` and `engram suites`, used as a person uses them: real processes, real folders."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command, engram, engram_here, wait_for_the_end_of_all

NAMES = [
    *("table1", "memory", "points", "cosine", "alpha", "width", "depth", "gamma", "quality", "balance"),
    *("frontier", "exemplar-free", "exemplar-free-warm", "exemplars", "parts"),
]
DATA = ["--dataset", "arrays", "--data", "blobs.npz", "--tasks", "2"]
SETTINGS = ("epochs=1", "adapter_steps=10", "adapter_width=32", "learning_rate=0.2")
QUICK = [*DATA, *(word for setting in SETTINGS for word in ("--set", setting))]
STRANGE = "it's $HOME; `id` & more"  # a folder, to be quoted for the shell
SLOW = [*QUICK, *("--set", "epochs=40", "--set", "batch_size=2")]  # seconds, not milliseconds


def save_blobs(folder: Path) -> Path:
    """Write a file of ten classes of vectors to the folder."""
    draws = np.random.default_rng(0)
    centres, labels = 3 * draws.normal(size=(10, 8)), np.repeat(np.arange(10), 20)
    inputs = (centres[labels] + draws.normal(size=(len(labels), 8))).astype(np.float32)
    np.savez(folder / "blobs.npz", inputs=inputs, labels=labels)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return save_blobs(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished suite, in `here`, and the output of the command."""
    folder = save_blobs(tmp_path_factory.mktemp("finished"))
    return folder, engram("suite", "quality", *QUICK, "--out", "here", "--json", cwd=folder)


@pytest.fixture
def there(finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> Path:
    """A copy of the finished suite, to change."""
    folder, done = finished
    assert done.returncode == 0, done.stderr
    return shutil.copytree(folder, tmp_path, dirs_exist_ok=True)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("runs/*/*/result.json")):
        values = json.loads(path.read_text())
        del values["seconds"], values["networks_reused"], values["environment"]["threads"]
        found[str(path.relative_to(folder))] = values
    return found


# The list


def test_the_suites_are_listed_one_line_each(tmp_path: Path) -> None:
    lines = engram_here("suites", cwd=tmp_path).stdout.splitlines()
    rows = json.loads(engram_here("suites", "--json", cwd=tmp_path).stdout)["suites"]
    listed = [tuple(re.split(r" {2,}", line)) for line in lines]
    assert [name for name, _ in listed] == NAMES
    assert [(row["name"], row["summary"]) for row in rows] == listed
    assert all(len(line) <= 100 for line in lines)


# Plans


def test_a_plan_prints_runs_time_and_memory_and_runs_nothing(place: Path) -> None:
    done = engram("suite", "quality", *QUICK, "--seeds", "3", "--plan", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows, last = done.stdout.splitlines()
    assert head.split() == ["runs", "done", "time", "memory"]
    assert [re.split(r" {2,}", row)[:3] for row in rows] == [["P = 0", "3", "0"], ["P = 2", "3", "0"]]
    assert all(re.search(r" \d+ (s|minutes)  \d\d\.\d KB$", row) for row in rows)
    assert re.match(r"6 runs to do, about \d+ (s|min).*, a memory of at most \d+\.\d KB, about .* on disk", last)
    assert [path.name for path in place.iterdir()] == ["blobs.npz"]


def test_a_plan_as_json_has_the_same_in_bytes_and_seconds(place: Path) -> None:
    done = engram("suite", "quality", *QUICK, "--plan", "--json", "--out", "here", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert set(plan) == {"runs", "seconds", "disk_bytes"}
    listed = {row["label"]: (row["method"], row["runs"], row["done"], row["memory_bytes"]) for row in plan["runs"]}
    features, images = 4 * 16 * 64 * 4, 4 * 2 * 8 * 4  # of four classes, in bytes
    assert listed == {"P = 0": ("features", 1, 0, features), "P = 2": ("hybrid", 1, 0, features + images)}
    assert all(row["seconds"] >= 0 for row in plan["runs"])
    assert plan["seconds"] == pytest.approx(sum(row["seconds"] for row in plan["runs"]), abs=0.2)
    assert [path.name for path in place.iterdir()] == ["blobs.npz"]


def test_a_plan_counts_finished_runs(there: Path) -> None:
    before = sorted((str(path), path.stat().st_mtime_ns) for path in there.rglob("*"))
    plan = json.loads(engram("suite", "quality", *QUICK, "--out", "here", "--plan", "--json", cwd=there).stdout)
    assert [row["done"] for row in plan["runs"]] == [1, 1]
    assert plan["seconds"] == plan["disk_bytes"] == 0
    assert sorted((str(path), path.stat().st_mtime_ns) for path in there.rglob("*")) == before


# Runs


def test_a_suite_prints_a_line_per_variant_to_stdout_and_its_progress_to_stderr(place: Path) -> None:
    done = engram("suite", "quality", *QUICK, "--seeds", "2", "--out", "here", cwd=place)
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    assert [row[:7] for row in rows] == ["P = 0  ", "P = 2  "]
    assert all(re.search(r"  average \d\.\d{3} ± \d\.\d{3}, last \d\.\d{3}, \d\d\.\d KB$", row) for row in rows)
    assert last == "report: engram report here -o report.html"
    assert re.match(r"quality on arrays, in here: 4 runs to do, about \d+ (s|minutes).* KB, .* on disk$", done.stderr)
    assert len(results(place / "here")) == 4


def test_json_prints_one_object_with_what_was_found(place: Path) -> None:
    done = engram("suite", "alpha", *QUICK, "--out", "here", "--json", "--quiet", cwd=place)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == []
    assert [row["value"] for row in found["rows"]] == [0.1, 1, 10, 100, 1000]
    by_alpha = {values["settings"]["alpha"]: values for values in results(place / "here").values()}
    for row in found["rows"]:
        result = by_alpha[row["value"]]
        assert (row["label"], row["method"], row["seeds"]) == (f"α = {row['value']:g}", "features", [0])
        assert row["average_incremental_accuracy"] == [result["average_incremental_accuracy"]]
        assert row["last_accuracy"] == [result["curve"][-1]]
        assert row["memory_mb"] == result["memory_mb"]


def test_quiet_prints_only_the_result_and_the_default_folder_names_data_set_and_preset(
    place: Path,
) -> None:
    done = engram("suite", "quality", *QUICK, "--quiet", cwd=place)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 3)
    assert [str(path.relative_to(place)) for path in place.glob("runs/*")] == ["runs/arrays-short"]
    written = json.loads((place / "runs" / "arrays-short" / "suite-quality.json").read_text())
    assert written["command"] == shlex.join(["engram", "suite", "quality", *QUICK, "--quiet"])


def test_only_the_methods_that_are_asked_for_are_run(place: Path) -> None:
    quick = [*DATA, "--set", "epochs=1"]
    done = engram("suite", "table1", *quick, "--methods", "lwf,gamma-lwf", "--out", "here", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert [row["label"] for row in json.loads(done.stdout)["rows"]] == ["lwf", "gamma-lwf"]
    assert len(results(place / "here")) == 2


def test_two_jobs_give_and_print_the_results_of_one(
    finished: tuple[Path, subprocess.CompletedProcess[str]], place: Path
) -> None:
    folder, one = finished
    two = engram("suite", "quality", *QUICK, "--out", "two", "--json", "--jobs", "2", cwd=place)
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    assert json.loads(two.stdout) == json.loads(one.stdout)
    assert results(place / "two") == results(folder / "here")
    assert len(two.stderr.splitlines()) == len(one.stderr.splitlines()) == 1


# Resuming


def test_an_existing_suite_is_refused_without_resume_and_continued_with_it(there: Path) -> None:
    command = ["suite", "quality", *QUICK, "--out", "here"]
    before = {path: path.stat().st_mtime_ns for path in (there / "here").rglob("*") if path.is_file()}
    again = engram(*command, "--quiet", cwd=there)
    assert (again.returncode, again.stdout) == (2, "")
    assert "here/suite-quality.json" in again.stderr and "--resume" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (there / next(iter(results(there / "here"))).replace("runs", "here/runs", 1)).unlink()
    further = engram(*command, "--resume", cwd=there)
    assert further.returncode == 0
    assert ": 1 run to do, " in further.stderr
    assert len(results(there / "here")) == 2


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_says_how_to_resume_and_resuming_completes_the_suite(jobs: str, place: Path) -> None:
    command = ["suite", "quality", *SLOW, "--out", STRANGE, "--jobs", jobs]
    process = Command(*command, cwd=place, leads=True)
    while not list((place / STRANGE).glob("runs/*/*/training.safetensors")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of its processes
    stopped = process.wait(60)
    assert (stopped.returncode, stopped.stdout) == (130, "")
    (options,) = re.findall(r"the same command with (.*)$", stopped.stderr.rstrip())
    assert shlex.split(options) == ["--out", STRANGE, "--resume"]
    assert "Traceback" not in stopped.stderr
    wait_for_the_end_of_all(process.pid)
    assert not list((place / STRANGE).glob("runs/*/*/failed.json"))
    further = engram(*command, "--resume", "--json", cwd=place)
    assert further.returncode == 0, further.stderr
    assert [row["label"] for row in json.loads(further.stdout)["rows"]] == ["P = 0", "P = 2"]


def test_the_suggested_report_command_quotes_the_folder_for_the_shell(place: Path) -> None:
    done = engram("suite", "quality", *QUICK, "--out", STRANGE, "--quiet", cwd=place)
    assert done.returncode == 0, done.stderr
    hint = done.stdout.splitlines()[-1].removeprefix("report: ")
    assert shlex.split(hint) == ["engram", "report", STRANGE, "-o", "report.html"]
    written = json.loads((place / STRANGE / "suite-quality.json").read_text())
    assert shlex.split(written["command"]) == ["engram", "suite", "quality", *QUICK, "--out", STRANGE, "--quiet"]


# Failures and refusals


def test_a_suite_with_a_failed_run_prints_the_others_and_the_reason_and_exits_with_1(there: Path) -> None:
    command = ["suite", "quality", *QUICK, "--out", "here", "--json", "--quiet"]
    folders = {values["method"]: name for name, values in results(there / "here").items()}
    for name in folders.values():
        (there / "here" / name).unlink()
    (damaged,) = (there / "here" / folders["hybrid"]).parent.glob("checkpoint-*/learner.safetensors")
    damaged.write_bytes(b"short")
    done = engram(*command, "--resume", cwd=there)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [row["label"] for row in found["rows"]] == ["P = 0"]
    ((label, error),) = [(each["label"], each["error"]) for each in found["failed"]]
    assert label == "P = 2" and "learner.safetensors cannot be read as safetensors" in error
    assert done.stderr == f"failed: P = 2, seed 0: {error}\n"
    assert json.loads((damaged.parents[1] / "failed.json").read_text())["error"] == error


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (["alhpa"], 2, "'alhpa'.*'alpha'.*engram suites"),
        (["table1", "--methods", "lfw"], 2, "'lfw'.*'lwf'.*engram methods"),
        (["gamma", "--methods", "bic"], 2, "'gamma'.*'bic'.*features, gamma-lwf"),
        (["alpha", "--dataset", "digit"], 2, "'digit'.*'digits'"),
        (["depth", "--set", "alhpa=1"], 2, "'depth'.*'alhpa'.*'alpha'"),
        (["alpha", "--set", "learning_rate"], 2, "KEY=VALUE.*'learning_rate'"),
        (["alpha", "--set", "learning_rate=fast"], 2, "'learning_rate'.*'fast'"),
        (["alpha", "--tasks", "6"], 2, "5 tasks.* 6 "),
        (["alpha", "--dataset", "arrays", "--data", "missing.npz"], 1, "missing.npz"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(arguments: list[str], code: int, fact: str, tmp_path: Path) -> None:
    done = engram_here("suite", *arguments, "--quiet", "--out", "out", cwd=tmp_path)
    assert re.search(fact, done.stderr)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(place: Path) -> None:
    done = engram_here("suite", "quality", *QUICK, "--quiet", "--out", "/proc/nothing", cwd=place)
    assert (done.returncode, done.stdout) == (1, "") and "/proc/nothing" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["alpha", "--seeds", "0"], ["alpha", "--jobs", "0"], ["alpha", "--on", "x"]])
def test_wrong_usage_exits_with_2(arguments: list[str], tmp_path: Path) -> None:
    done = engram_here("suite", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Usage: engram suite" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
