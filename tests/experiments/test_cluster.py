"""A suite on a Ray cluster of two workers, one of which is killed."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engram.data import DecodeOptions, load
from engram.errors import EngramWarning
from engram.experiments import Plan, workers
from engram.experiments.suite_plan import SuiteOptions, SuiteRun, plan_suite
from engram.experiments.workers import FAILED, run_suite

pytest.importorskip("ray", reason="Ray is not installed (extra 'ray')")

SETTINGS = {"epochs": 40, "batch_size": 4, "adapter_steps": 50, "learning_rate": 0.2}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 30)
    inputs = (3 * draws.normal(size=(4, 8))[labels] + draws.normal(size=(len(labels), 8))).astype(np.float32)
    np.savez(tmp_path / "blobs.npz", inputs=inputs, labels=labels)
    return tmp_path / "blobs.npz"


def worker_processes() -> list[int]:
    """The processes of this machine that carry out a job for a Ray that this one has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::_execute_alone"):
                found += [int(entry.name)] if os.getpid() in ancestors(int(entry.name)) else []
        except OSError:
            continue
    return found


def ancestors(process: int) -> list[int]:
    """The parents of a process, up to the first."""
    found: list[int] = []
    while process > 1:
        process = int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
        found.append(process)
    return found


def results(folder: Path) -> dict[str, object]:
    found = {}
    for path in sorted(folder.rglob("result.json")):
        values = json.loads(path.read_text())
        found[str(path.relative_to(folder))] = {
            name: value for name, value in values.items() if name not in ("seconds", "environment", "networks_reused")
        }
    return found


@pytest.mark.parametrize(
    ("nodes", "taken"),
    [
        ([{"CPU": 2.0, "memory": 9e9}], (1, 0)),
        ([{"CPU": 64.0, "GPU": 8.0}], (8, 1)),
        ([{"CPU": 4.0, "GPU": 8.0}], (1, 1)),
        ([{"CPU": 64.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 32.0, "GPU": 4.0}], (4, 1)),
    ],
)
def test_a_run_on_ray_takes_one_gpu_and_its_share_of_the_cores(
    nodes: list[dict[str, float]], taken: tuple[int, int]
) -> None:
    assert tuple(workers.resources_per_run(nodes).values()) == taken


def test_workers_elsewhere_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    options = SuiteOptions(
        suite="table1", dataset="folder", data=Path("~/pictures"), decoding=DecodeOptions(class_list=Path("few.txt"))
    )
    plan = Plan(method="lwf", settings={"weights": "w.safetensors"})
    options, run = workers.absolute(options, SuiteRun("lwf", plan, Path("runs/lwf/seed-0"), "", ""))
    assert run.plan.settings["weights"] == str(tmp_path / "w.safetensors")
    assert run.folder == tmp_path / "runs" / "lwf" / "seed-0"
    assert options.folder == tmp_path / "runs" / "folder-short"
    assert options.data == tmp_path / "home" / "pictures"
    assert options.decoding.class_list == tmp_path / "few.txt"
    assert workers.absolute(options, replace(run, plan=Plan()))[1].plan == Plan()


def test_a_suite_on_ray_has_the_same_results_when_a_worker_is_killed(data: Path, tmp_path: Path) -> None:
    dataset = load("arrays", data)
    options = SuiteOptions(suite="balance", dataset="arrays", data=data, settings=SETTINGS)
    here = plan_suite(replace(options, out=tmp_path / "here"), dataset)
    assert [outcome.error for outcome in run_suite(here, dataset)] == [None, None]

    there = plan_suite(replace(options, out=tmp_path / "there"), dataset)
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            # Only once a run is under way, and before any has ended.
            if list((tmp_path / "there").rglob("training.safetensors")) and (found := worker_processes()):
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])
            time.sleep(0.02)

    killer = threading.Thread(target=kill_one)
    killer.start()
    outcomes = run_suite(there, dataset, workers=2, on="ray")
    killer.join()
    assert killed, "no worker was seen at work: make the runs longer"
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert not list((tmp_path / "there").rglob(FAILED))
    assert results(tmp_path / "there") == results(tmp_path / "here")


def test_a_cluster_on_another_machine_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # an address that nobody has
    monkeypatch.setattr("ray.init", lambda **_: None)
    with pytest.warns(EngramWarning, match=r"192\.0\.2\.1:6379 is not on this machine"):
        workers._connect(None)
