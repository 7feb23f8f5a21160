"""A run that is killed with SIGKILL at any moment, again and again, ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from engram.experiments import Result
from engram.storage import ASIDE

KILLS = 20
SLOW_ENOUGH = ["--epochs", "150", "--set", "batch_size=2", "--set", "adapter_steps=200", "--set", "rate=0.2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of two classes of vectors."""
    draws = np.random.default_rng(0)
    centres = 3 * draws.normal(size=(6, 8))
    labels = np.repeat(np.arange(6), 20)
    inputs = (centres[labels] + draws.normal(size=(len(labels), 8))).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "blobs.npz"
    np.savez(path, inputs=inputs, labels=labels)
    return path


def start(data: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "engram", "run", "features", "--dataset", "arrays", "--data", str(data)]
    options = ["--classes-per-task", "2", "--features-per-class", "8", "--out", str(out), "--resume", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *options, *SLOW_ENOUGH], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def contents(out: Path) -> dict[str, int]:
    """What is in the folder and when it was changed; what the running process removes meanwhile is left out."""
    found = {}
    for path in (each for each in out.glob("*") if each.name != "events.jsonl"):
        with suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found


def wait_until(process: subprocess.Popen[bytes], moment: str, out: Path, draws: random.Random) -> None:
    """Until the run has begun to work, and then until a save is under way or a random while has passed."""
    seen = contents(out)
    while process.poll() is None:
        now = contents(out)
        if moment == "mid-save" and any(name.startswith(ASIDE) for name in now):
            return
        if moment == "later" and now != seen:
            time.sleep(draws.uniform(0.0, 0.6))
            return
        time.sleep(0.0002)


def comparable(out: Path) -> tuple[dict[str, object], dict[str, bytes]]:
    result = Result.load(out / "result.json").to_json()
    del result["seconds"]
    timed = ("seconds.json", "result.json", "events.jsonl")
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in timed]
    return result, {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_twenty_kills_leave_no_trace(data: Path, tmp_path: Path) -> None:
    finish(start(data, tmp_path / "whole"))
    draws = random.Random(0)
    out = tmp_path / "killed"
    out.mkdir()
    mid_epoch = mid_save = kills = 0
    while kills < KILLS:
        process = start(data, out)
        wait_until(process, "mid-save" if kills % 3 == 2 else "later", out, draws)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        mid_save += bool(list(out.glob(f"{ASIDE}*")))
        mid_epoch += (out / "training.safetensors").exists()
    assert kills == KILLS, f"the run ended after {kills} kills: make it slower"
    assert mid_save >= 2 and mid_epoch >= 5, (mid_save, mid_epoch)
    finish(start(data, out))
    (result, files), (whole_result, whole_files) = comparable(out), comparable(tmp_path / "whole")
    assert result == whole_result
    assert sorted(files) == sorted(whole_files)
    assert [name for name in files if files[name] != whole_files[name]] == []
