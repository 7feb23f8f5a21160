"""A run that is killed with SIGKILL at any moment, again and again, ends as if nothing had happened."""

import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from commands import Command, engram
from runs_made import final_bytes, results_in

from engram.storage import ASIDE

KILLS = 20
ADAPTER = ["--set", "adapter_steps=50", "--set", "adapter_width=32"]
SLOW_ENOUGH = ["--epochs", "40", "--set", "batch_size=4", "--set", "learning_rate=0.2", *ADAPTER]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of two classes of images: the state of a convolutional network has more parts than that of an MLP."""
    draws = np.random.default_rng(0)
    patterns = draws.integers(0, 256, (6, 8, 8, 1))
    labels = np.repeat(np.arange(6), 20)
    inputs = np.clip(patterns[labels] + draws.normal(0, 60, (len(labels), 8, 8, 1)), 0, 255).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "patterns.npz"
    np.savez(path, inputs=inputs, labels=labels)
    return path


def command(data: Path, out: Path) -> list[str]:
    options = ["--classes-per-task", "2", "--features-per-class", "8", "--out", str(out), "--resume", "--quiet"]
    return ["run", "features", "--dataset", "arrays", "--data", str(data), *options, *SLOW_ENOUGH]


def event_count(out: Path) -> int:
    """The number of events that the run has logged so far: epochs, tasks and others."""
    path = out / "events.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def moment_of(kill: int) -> str:
    """The ends of two tasks, a third of the rest while something is saved, and all others anywhere."""
    return "task done" if kill in (8, 16) else "mid-save" if kill % 3 == 2 else "anywhere"


def wait_until(process: Command, moment: str, out: Path, draws: random.Random) -> None:
    """Until the task is done, a save is under way, or the run has worked for a random while."""
    done, enough = checkpoints(out), event_count(out) + draws.randrange(1, 8)
    while process.poll() is None:
        if moment == "task done" and checkpoints(out) - done:
            return
        if moment == "mid-save" and list(out.glob(f"{ASIDE}*")):
            return
        if moment == "anywhere" and event_count(out) >= enough:
            time.sleep(draws.uniform(0.0, 0.02))
            return
        time.sleep(0.002 if moment == "anywhere" else 0.0005)  # a save takes milliseconds


def checkpoints(out: Path) -> set[str]:
    return {path.name for path in out.glob("checkpoint-*")}


def test_a_run_killed_twenty_times_ends_with_the_same_bytes(data: Path, tmp_path: Path) -> None:
    whole = engram(*command(data, tmp_path / "whole"), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    draws = random.Random(0)
    out = tmp_path / "killed"
    out.mkdir()
    mid_epoch = mid_save = kills = 0
    reached = set()  # the last checkpoint at each kill
    while kills < KILLS:
        process = Command(*command(data, out), cwd=tmp_path)
        wait_until(process, moment_of(kills), out, draws)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        mid_save += bool(list(out.glob(f"{ASIDE}*")))
        mid_epoch += (out / "training.safetensors").exists()
        reached.add(max(checkpoints(out), default="none"))
    assert kills == KILLS, f"the run ended after {kills} kills: make it slower. {process.wait()}"
    assert mid_save >= 2 and mid_epoch >= 5, (mid_save, mid_epoch)
    assert reached == {"none", "checkpoint-001", "checkpoint-002"}
    end = engram(*command(data, out), cwd=tmp_path)
    assert end.returncode == 0, end.stderr
    assert results_in(out) == results_in(tmp_path / "whole")
    files, whole_files = final_bytes(out), final_bytes(tmp_path / "whole")
    assert sorted(files) == sorted(whole_files)
    assert [name for name in files if files[name] != whole_files[name]] == []
