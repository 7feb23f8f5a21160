"""`engram run` in several processes: one report, one folder, one exit code, and resuming with another number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import ENVIRONMENT, SECONDS, Command, engram
from processes import engram_together, launched, ranks, together
from shared_work import ran_twice

from engram.experiments import Result

# Enough steps to interrupt, at a learning rate so low that rounding does not lead to another network.
SLOW = ["--set", "batch_size=4", "--epochs", "30", "--set", "learning_rate=0.02"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of two classes of vectors."""
    draws = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 20)
    inputs = (3 * draws.normal(size=(4, 8))[labels] + draws.normal(size=(80, 8))).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "blobs.npz"
    np.savez(path, inputs=inputs, labels=labels)
    return path


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The slow run in one process, from beginning to end."""
    folder = tmp_path_factory.mktemp("whole")
    assert engram(*command(data, *SLOW, "--out", "run", "--quiet"), cwd=folder).returncode == 0
    return Result.load(folder / "run" / "result.json")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A folder for each of two processes: machines need not share a disk."""
    made = [tmp_path / "first", tmp_path / "second"]
    for folder in made:
        folder.mkdir()
    return made


def command(data: Path, *options: str) -> list[str]:
    small = ["--classes-per-task", "2", "--features-per-class", "8", "--epochs", "3"]
    small += ["--set", "adapter_steps=20", "--set", "learning_rate=0.2"]
    return ["run", "features", "--dataset", "arrays", "--data", str(data), *small, *options]


def count_events(out: Path, event: str = "epoch") -> int:
    path = out / "events.jsonl"
    return path.read_text().count(f'"event": "{event}"') if path.exists() else 0


def wait_until_mid_training(out: Path, command: Command | subprocess.Popen[str], epochs: int = 3) -> None:
    """Wait until the run has logged so many more epochs."""
    enough, limit = count_events(out) + epochs, time.monotonic() + 60
    while count_events(out) < enough:
        assert command.poll() is None and time.monotonic() < limit, "the run did not get that far"
        time.sleep(0.01)


def test_two_processes_write_the_same_as_one_and_only_rank_0_prints_and_writes(
    data: Path, folders: list[Path], tmp_path: Path
) -> None:
    options = command(data, "--seeds", "2", "--out", "run", "--trainings", "trained", "--json")
    ended = engram_together(*options, cwd=folders)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert ended[1].stdout == ended[1].stderr == ""
    assert not list(folders[1].iterdir())
    assert json.loads(ended[0].stdout)["seeds"] == [0, 1]
    assert json.loads(ended[0].stdout) == json.loads((folders[0] / "run" / "summary.json").read_text())
    assert engram(*options, cwd=tmp_path).returncode == 0
    found_names, alone_names = (
        {str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (folders[0], tmp_path)
    )
    alone_names = {name for name in alone_names if not name.startswith(("first", "second"))}
    by_weights = ("trained/features-", "trained/adapter-")  # two processes round the weights differently
    assert {name for name in found_names if not name.startswith(by_weights)} == {
        name for name in alone_names if not name.startswith(by_weights)
    }
    assert len(found_names) == len(alone_names)
    for seed in ("seed-0", "seed-1"):
        found, alone = (Result.load(place / "run" / seed / "result.json") for place in (folders[0], tmp_path))
        assert found.to_json().keys() == alone.to_json().keys()
        assert found.curve == pytest.approx(alone.curve, abs=0.03)
        assert found.omega == pytest.approx(alone.omega, abs=0.01)
        assert found.memory_bytes == alone.memory_bytes
        assert (found.environment.pop("processes"), alone.environment.pop("processes")) == ("2", "1")
        assert found.environment.keys() == alone.environment.keys()
        assert found.settings == alone.settings


def test_consecutive_runs_from_python_return_the_result_in_every_process(tmp_path: Path) -> None:
    first, second = together(ran_twice, tmp_path, enters=False)
    assert first == second
    assert {path.name for path in tmp_path.iterdir()} == {"0"}
    assert json.loads((tmp_path / "0" / "b" / "result.json").read_text()) == first[1]


TRAIN_AND_LIST_GLOO_THREADS = """
from pathlib import Path
import torch
from engram.network import parallel

with parallel.process_group("cpu"):
    network = torch.nn.Linear(2, 2)
    with parallel.distributed_step(network, lambda inputs, _: network(inputs).sum()) as step:
        step(torch.ones(1, 2), torch.zeros(1), 1.0).backward()
    del step
print([path.parent.name for path in Path("/proc/self/task").glob("*/comm") if "gloo" in path.read_text()])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="lists threads in /proc")
def test_no_thread_of_the_process_group_outlives_it() -> None:
    # Such a thread can abort the process at exit. In new interpreters: what torch imports late decides about it.
    with launched(2) as variables:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", TRAIN_AND_LIST_GLOO_THREADS], env=ENVIRONMENT | each, stdout=subprocess.PIPE
            )
            for each in variables
        ]
        printed = [each.communicate(timeout=120)[0] for each in started]
    assert printed == [b"[]\n", b"[]\n"]
    assert [each.returncode for each in started] == [0, 0]


@pytest.mark.parametrize(
    ("options", "exit_code", "fact"),
    [
        (["--set", "learning_rat=1"], 2, "'learning_rat'"),
        (["--out", "taken"], 2, "taken"),
        (["--network", "resnet32", "--out", "run"], 2, "resnet32"),
        (["--set", "learning_rate=1e30", "--out", "run"], 1, "finite"),
    ],
)
def test_an_error_is_printed_once_and_ends_all_processes_with_its_exit_code(
    data: Path, folders: list[Path], options: list[str], exit_code: int, fact: str
) -> None:
    (folders[0] / "taken").mkdir()
    (folders[0] / "taken" / "note.txt").write_text("mine")
    ended = engram_together(*command(data, *options), cwd=folders)
    assert [each.returncode for each in ended] == [exit_code, exit_code]
    stderr = "".join(each.stderr for each in ended)
    assert stderr.count("error:") == 1
    assert fact in stderr
    assert not list(folders[1].iterdir())


@pytest.mark.parametrize("arguments", [["suite", "table1"], ["learn", "model", "images"]])
def test_other_commands_that_write_refuse_torchrun(folders: list[Path], arguments: list[str]) -> None:
    ended = engram_together(*arguments, cwd=folders)
    assert [each.returncode for each in ended] == [2, 2]
    stderr = "".join(each.stderr for each in ended)
    assert stderr.count("error:") == 1
    assert f"`engram {arguments[0]}`" in stderr
    assert not any(list(place.iterdir()) for place in folders)


def test_a_locked_folder_is_refused_by_all_processes(data: Path, folders: list[Path]) -> None:
    slow = command(data, *SLOW, "--out", "run", "--quiet")
    busy = Command(*slow, cwd=folders[0])
    wait_until_mid_training(folders[0] / "run", busy)
    ended = engram_together(*slow, cwd=folders)
    busy.process.kill()
    assert [each.returncode for each in ended] == [1, 1]
    stderr = "".join(each.stderr for each in ended)
    assert stderr.count("error:") == stderr.count(" in run.") == 1


def test_processes_with_different_data_are_refused(data: Path, folders: list[Path]) -> None:
    arrays = dict(np.load(data))
    np.savez(folders[0] / "own.npz", **arrays)
    arrays["inputs"][3] += 1e-3
    np.savez(folders[1] / "own.npz", **arrays)
    ended = engram_together(*command(Path("own.npz"), "--out", "run"), cwd=folders)
    assert [each.returncode for each in ended] == [2, 2]
    stderr = "".join(each.stderr for each in ended)
    assert stderr.count("error:") == stderr.count("process 2 of 2") == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_all_and_one_process_can_resume(
    data: Path, folders: list[Path], victim: int, whole: Result
) -> None:
    options = command(data, *SLOW, "--out", "run", "--resume", "--quiet")
    with ranks(*options, cwd=folders) as started:
        wait_until_mid_training(folders[0] / "run", started[0])
        started[victim].send_signal(signal.SIGKILL)
        ended = started[1 - victim].wait()
    assert ended.returncode == 1
    assert f"error: Process {victim + 1} of 2, on " in ended.stderr
    assert "--resume" in ended.stderr
    assert not (folders[0] / "run" / "result.json").exists()
    before = count_events(folders[0] / "run")
    assert engram(*options, cwd=folders[0]).returncode == 0
    result = Result.load(folders[0] / "run" / "result.json")
    assert result.environment["processes"] == "1"
    assert count_events(folders[0] / "run") - before < 2 * 30  # not from the beginning
    assert result.curve == pytest.approx(whole.curve, abs=0.05)
    assert result.split == whole.split and result.settings == whole.settings


def test_two_processes_resume_a_run_of_one(data: Path, folders: list[Path]) -> None:
    options = command(data, *SLOW, "--out", "run", "--resume", "--quiet")
    alone = Command(*options, cwd=folders[0])
    wait_until_mid_training(folders[0] / "run", alone, epochs=33)  # in the second task
    alone.send_signal(signal.SIGKILL)
    alone.wait()
    before = count_events(folders[0] / "run")
    assert [each.returncode for each in engram_together(*options, cwd=folders)] == [0, 0]
    assert count_events(folders[0] / "run") - before < 30  # the first task is not learned again
    assert Result.load(folders[0] / "run" / "result.json").environment["processes"] == "1, then 2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_run_that_can_be_resumed(data: Path, folders: list[Path], number: int) -> None:
    options = command(data, *SLOW, "--out", "run")
    with ranks(*options, cwd=folders) as started:
        wait_until_mid_training(folders[0] / "run", started[0])
        for each in started:
            each.send_signal(number)
        ended = [each.wait() for each in started]
    assert [each.returncode for each in ended] == [130, 130]
    assert "".join(each.stderr for each in ended).count("Stopped.") == 1
    assert "Traceback" not in ended[0].stderr + ended[1].stderr
    assert count_events(folders[0] / "run", "stop") == 1
    assert engram(*options, "--resume", "--quiet", cwd=folders[0]).returncode == 0


@pytest.mark.slow
def test_a_hanging_process_ends_all(data: Path, folders: list[Path]) -> None:
    with ranks(*command(data, *SLOW, "--out", "run", "--quiet"), cwd=folders) as started:
        wait_until_mid_training(folders[0] / "run", started[0])
        started[1].send_signal(signal.SIGSTOP)
        ended = started[0].wait()
    assert ended.returncode == 1
    assert "error: Process 2 of 2, on " in ended.stderr


def process_of_rank(torchrun: subprocess.Popen[str], rank: int) -> int:
    """The id of the process that torchrun has started with this rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    return next(int(each) for each in children if f"\0RANK={rank}\0" in Path(f"/proc/{each}/environ").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="looks for torchrun's processes in /proc")
def test_under_torchrun_a_killed_process_ends_all_and_the_run_can_be_resumed(data: Path, tmp_path: Path) -> None:
    options = command(data, *SLOW, "--out", "run", "--resume", "--quiet")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "engram"]
    torchrun = subprocess.Popen(
        [*launcher, *options], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until_mid_training(tmp_path / "run", torchrun)
        os.kill(process_of_rank(torchrun, 1), signal.SIGKILL)
        stderr = torchrun.communicate(timeout=SECONDS)[1]
    finally:
        torchrun.kill()
    assert torchrun.returncode == 1
    assert stderr.count("error: Process 2 of 2, on ") == 1
    assert engram(*options, cwd=tmp_path).returncode == 0


@pytest.mark.slow  # the same on CIFAR-100: benchmarks/distributed.py
def test_accuracy_is_that_of_one_process_over_three_seeds(folders: list[Path], tmp_path: Path) -> None:
    options = ["run", "features", "--tasks", "2", "--epochs", "2", "--seeds", "3", "--out", "run", "--json", "--quiet"]
    first, _ = engram_together(*options, cwd=folders)
    found, alone = json.loads(first.stdout), json.loads(engram(*options, cwd=tmp_path).stdout)
    values, expected = (each["average_incremental_accuracy"]["values"] for each in (found, alone))
    assert values == pytest.approx(expected, abs=0.02)
