"""A suite that is killed with SIGKILL at any moment, again and again, ends as one that ran through."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from commands import Command, engram, wait_for_the_end_of_all
from runs_made import final_bytes, results_in

from engram import storage

KILLS = 5
DATA = ["--dataset", "arrays", "--data", "blobs.npz", "--tasks", "2"]
SETTINGS = ("epochs=40", "batch_size=2", "adapter_steps=50", "adapter_width=32", "learning_rate=0.2")
SLOW_ENOUGH = [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders, each with the same file of ten classes of vectors."""
    draws = np.random.default_rng(0)
    centres, labels = 3 * draws.normal(size=(10, 8)), np.repeat(np.arange(10), 20)
    inputs = (centres[labels] + draws.normal(size=(len(labels), 8))).astype(np.float32)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "blobs.npz", inputs=inputs, labels=labels)
    return tmp_path / "whole", tmp_path / "killed"


COMMAND = ["suite", "quality", *DATA, *SLOW_ENOUGH, "--out", "out", "--resume", "--quiet"]


def logged_bytes(out: Path) -> int:
    """The bytes of the event logs of all runs."""
    return sum(path.stat().st_size for path in out.glob("runs/*/*/events.jsonl"))


def trainings(out: Path) -> list[Path]:
    """The checkpoints of trainings under way."""
    return list(out.glob("runs/*/*/training.safetensors"))


def wait_until_it_works(process: Command, out: Path) -> None:
    before = logged_bytes(out)
    while process.poll() is None and logged_bytes(out) == before:
        time.sleep(0.005)


def test_a_suite_killed_five_times_ends_with_the_same_bytes(places: tuple[Path, Path]) -> None:
    whole, killed = places
    through = engram(*COMMAND, cwd=whole)
    assert (through.returncode, through.stderr) == (0, "")
    draws, out = random.Random(0), killed / "out"
    mid_training = kills = 0
    while kills < KILLS:
        process = Command(*COMMAND, cwd=killed)
        wait_until_it_works(process, out)
        while kills % 2 and process.poll() is None and not trainings(out):
            time.sleep(0.005)
        time.sleep(draws.uniform(0.0, 0.2))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        mid_training += bool(trainings(out))
    assert kills == KILLS, f"the suite ended after {kills} kills: make it slower"
    assert mid_training >= 2
    end = engram(*COMMAND, cwd=killed)
    assert (end.returncode, end.stderr) == (0, "")
    results, files, whole_files = results_in(out), final_bytes(out), final_bytes(whole / "out")
    assert len(results) == 2 and "suite-quality.json" in files
    assert results == results_in(whole / "out")
    assert sorted(files) == sorted(whole_files)
    assert [name for name in files if files[name] != whole_files[name]] == []


def test_the_workers_of_a_killed_suite_exit_and_release_its_runs(
    places: tuple[Path, Path],
) -> None:
    _, place = places
    process = Command(*COMMAND, "--jobs", "2", "--set", "epochs=100000", cwd=place, leads=True)  # hours of work
    try:
        wait_until_it_works(process, place / "out")
        process.send_signal(signal.SIGKILL)  # the first process alone: its workers get no signal
        process.wait()
        wait_for_the_end_of_all(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    runs = list(place.glob("out/runs/*/*"))
    assert runs
    for run in runs:
        with storage.locked(run):
            assert not (run / "failed.json").exists()
