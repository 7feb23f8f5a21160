"""`engram run` as several processes: one voice, one folder, one end, and going on with another number of them."""

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
from commands import ENVIRONMENT, Command, engram
from processes import engram_together, launched, ranks, together
from shared_work import ran_twice

from engram.experiments import Result

# Enough steps to be interrupted in, at a rate at which so many do not make of rounding another network.
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


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """A folder for each of two processes: machines need not share a disk."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    return folders


def command(data: Path, *options: str) -> list[str]:
    small = ["--classes-per-task", "2", "--features-per-class", "8", "--epochs", "3", "--set", "adapter_steps=20"]
    return [
        "run",
        "features",
        "--dataset",
        "arrays",
        "--data",
        str(data),
        *small,
        "--set",
        "learning_rate=0.2",
        *options,
    ]


def told(out: Path, event: str = "epoch") -> int:
    path = out / "events.jsonl"
    return path.read_text().count(f'"event": "{event}"') if path.exists() else 0


def wait_until_mid_training(out: Path, command: Command | subprocess.Popen[str], epochs: int = 3) -> None:
    """Until so many more epochs of the run have been told of."""
    enough, limit = told(out) + epochs, time.monotonic() + 60
    while told(out) < enough:
        assert command.poll() is None and time.monotonic() < limit, "the run did not get that far"
        time.sleep(0.01)


def test_two_processes_write_the_same_as_one_and_only_rank_0_prints_and_writes(
    data: Path, places: list[Path], tmp_path: Path
) -> None:
    options = command(data, "--seeds", "2", "--out", "run", "--trainings", "trained", "--json")
    ended = engram_together(*options, cwd=places)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert ended[1].stdout == ended[1].stderr == ""
    assert not list(places[1].iterdir())
    assert json.loads(ended[0].stdout)["seeds"] == [0, 1]
    assert json.loads(ended[0].stdout) == json.loads((places[0] / "run" / "summary.json").read_text())
    assert engram(*options, cwd=tmp_path).returncode == 0
    here, alone_there = ({str(path.relative_to(place)) for path in place.rglob("*")} for place in (places[0], tmp_path))
    alone_there = {name for name in alone_there if not name.startswith(("first", "second"))}
    by_weights = ("trained/features-", "trained/adapter-")  # two processes round the weights differently
    assert {name for name in here if not name.startswith(by_weights)} == {
        name for name in alone_there if not name.startswith(by_weights)
    }
    assert len(here) == len(alone_there)
    for seed in ("seed-0", "seed-1"):
        found, alone = (Result.load(place / "run" / seed / "result.json") for place in (places[0], tmp_path))
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
    ("options", "exit_code", "words"),
    [
        (["--set", "learning_rat=1"], 2, "has no setting 'learning_rat'"),
        (["--out", "taken"], 2, "taken holds something else (note.txt)"),
        (["--network", "resnet32", "--out", "run"], 2, "resnet32"),
        (["--set", "learning_rate=1e30", "--out", "run"], 1, "is not finite"),
    ],
)
def test_an_error_is_printed_once_and_ends_all_processes_with_its_exit_code(
    data: Path, places: list[Path], options: list[str], exit_code: int, words: str
) -> None:
    (places[0] / "taken").mkdir()
    (places[0] / "taken" / "note.txt").write_text("mine")
    ended = engram_together(*command(data, *options), cwd=places)
    assert [each.returncode for each in ended] == [exit_code, exit_code]
    said = "".join(each.stderr for each in ended)
    assert said.count("error:") == 1
    assert words in said
    assert not list(places[1].iterdir())


@pytest.mark.parametrize("arguments", [["suite", "table1"], ["learn", "model", "pictures"]])
def test_other_commands_that_write_work_in_one_process(places: list[Path], arguments: list[str]) -> None:
    ended = engram_together(*arguments, cwd=places)
    assert [each.returncode for each in ended] == [2, 2]
    said = "".join(each.stderr for each in ended)
    assert said.count("error:") == 1
    assert f"`engram {arguments[0]}` works in one process. Leave out torchrun" in said
    assert not any(list(place.iterdir()) for place in places)


def test_a_locked_folder_is_refused_by_all_processes(data: Path, places: list[Path]) -> None:
    slow = command(data, *SLOW, "--out", "run", "--quiet")
    busy = Command(*slow, cwd=places[0])
    wait_until_mid_training(places[0] / "run", busy)
    ended = engram_together(*slow, cwd=places)
    busy.process.kill()
    assert [each.returncode for each in ended] == [1, 1]
    assert "".join(each.stderr for each in ended).count("Another process is working in run.") == 1


def test_processes_with_different_data_are_refused(data: Path, places: list[Path]) -> None:
    arrays = dict(np.load(data))
    np.savez(places[0] / "own.npz", **arrays)
    arrays["inputs"][3] += 1e-3
    np.savez(places[1] / "own.npz", **arrays)
    ended = engram_together(*command(Path("own.npz"), "--out", "run"), cwd=places)
    assert [each.returncode for each in ended] == [2, 2]
    assert "do not agree on the data or the settings" in "".join(each.stderr for each in ended)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_all_and_one_process_can_resume(data: Path, places: list[Path], victim: int) -> None:
    options = command(data, *SLOW, "--out", "run", "--resume", "--quiet")
    with ranks(*options, cwd=places) as started:
        wait_until_mid_training(places[0] / "run", started[0])
        started[victim].send_signal(signal.SIGKILL)
        start = time.monotonic()
        ended = started[1 - victim].wait(30)
    assert time.monotonic() - start < 30
    assert ended.returncode == 1
    assert f"error: Process {victim + 1} of 2, on " in ended.stderr
    assert "--resume" in ended.stderr
    assert not (places[0] / "run" / "result.json").exists()
    before = told(places[0] / "run")
    assert engram(*options, cwd=places[0]).returncode == 0
    result = Result.load(places[0] / "run" / "result.json")
    assert result.environment["processes"] == "1"
    assert told(places[0] / "run") - before < 2 * 30  # not all over again
    assert engram(*command(data, *SLOW, "--out", "whole", "--quiet"), cwd=places[0]).returncode == 0
    whole = Result.load(places[0] / "whole" / "result.json")
    assert result.curve == pytest.approx(whole.curve, abs=0.05)
    assert result.split == whole.split and result.settings == whole.settings


def test_two_processes_resume_what_one_began(data: Path, places: list[Path]) -> None:
    options = command(data, *SLOW, "--out", "run", "--resume", "--quiet")
    alone = Command(*options, cwd=places[0])
    wait_until_mid_training(places[0] / "run", alone, epochs=33)  # in the second task
    alone.send_signal(signal.SIGKILL)
    alone.wait()
    before = told(places[0] / "run")
    assert [each.returncode for each in engram_together(*options, cwd=places)] == [0, 0]
    assert told(places[0] / "run") - before < 30  # the first task is not learned again
    assert Result.load(places[0] / "run" / "result.json").environment["processes"] == "1, then 2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_run_that_can_be_resumed(data: Path, places: list[Path], number: int) -> None:
    options = command(data, *SLOW, "--out", "run")
    with ranks(*options, cwd=places) as started:
        wait_until_mid_training(places[0] / "run", started[0])
        for each in started:
            each.send_signal(number)
        ended = [each.wait(30) for each in started]
    assert [each.returncode for each in ended] == [130, 130]
    assert "".join(each.stderr for each in ended).count("Stopped.") == 1
    assert "Traceback" not in ended[0].stderr + ended[1].stderr
    assert told(places[0] / "run", "stop") == 1
    assert engram(*options, "--resume", "--quiet", cwd=places[0]).returncode == 0


@pytest.mark.slow
def test_a_hanging_process_ends_all(data: Path, places: list[Path]) -> None:
    with ranks(*command(data, *SLOW, "--out", "run", "--quiet"), cwd=places) as started:
        wait_until_mid_training(places[0] / "run", started[0])
        started[1].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        ended = started[0].wait(30)
    assert time.monotonic() - start < 30
    assert ended.returncode == 1
    assert "error: Process 2 of 2, on " in ended.stderr


def of_rank(torchrun: subprocess.Popen[str], rank: int) -> int:
    """The process that torchrun has started as this one."""
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
        os.kill(of_rank(torchrun, 1), signal.SIGKILL)
        start = time.monotonic()
        said = torchrun.communicate(timeout=60)[1]
    finally:
        torchrun.kill()
    assert time.monotonic() - start < 30
    assert torchrun.returncode == 1
    assert said.count("error: Process 2 of 2, on ") == 1
    assert engram(*options, cwd=tmp_path).returncode == 0


@pytest.mark.slow  # the same on CIFAR-100: benchmarks/distributed.py
def test_accuracy_is_that_of_one_process_over_three_seeds(places: list[Path], tmp_path: Path) -> None:
    options = ["run", "features", "--tasks", "2", "--epochs", "2", "--seeds", "3", "--out", "run", "--json", "--quiet"]
    first, _ = engram_together(*options, cwd=places)
    found, alone = json.loads(first.stdout), json.loads(engram(*options, cwd=tmp_path).stdout)
    values, expected = (each["average_incremental_accuracy"]["values"] for each in (found, alone))
    assert values == pytest.approx(expected, abs=0.02)
