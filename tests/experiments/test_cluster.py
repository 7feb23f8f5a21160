"""A suite on a Ray cluster of two workers: which addresses it listens on, and what happens if a worker is killed."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from runs_made import results_in

from engram.data import DecodeOptions, load
from engram.errors import EngramWarning, UsageError
from engram.experiments import Plan, workers
from engram.experiments.suite_plan import SuiteOptions, SuiteRun, plan_suite
from engram.experiments.workers import FAILED, Outcome, run_suite

if find_spec("ray") is None:
    pytest.skip("Ray is not installed (extra 'ray')", allow_module_level=True)
workers.import_ray()  # before any other import of Ray, which would listen on all addresses

SETTINGS = {"epochs": 40, "batch_size": 4, "adapter_steps": 50, "adapter_width": 32, "learning_rate": 0.2}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, as /proc/net/tcp and tcp6 write it


def started_processes() -> dict[int, str]:
    """The processes that this one and its children have started, with their command lines."""
    parents, found = {}, {os.getpid(): ""}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    while new := [process for process, parent in parents.items() if parent in found and process not in found]:
        for process in new:
            try:
                found[process] = (Path("/proc") / str(process) / "cmdline").read_text()
            except OSError:
                found[process] = ""
    return found


def listening_sockets() -> dict[str, set[str]]:
    """The addresses that gcs_server, raylet, a worker, this process and the others listen on, by process."""
    owners = {}
    for process, command in started_processes().items():
        name = command.split("\0")[0].rpartition("/")[2] or "driver"
        try:
            for file in (Path("/proc") / str(process) / "fd").iterdir():
                owners[os.readlink(file)] = name
        except OSError:
            continue
    found: dict[str, set[str]] = {}
    for line in "".join(Path(f"/proc/net/{kind}").read_text() for kind in ("tcp", "tcp6")).splitlines():
        words = line.split()
        if words[3] == "0A" and (name := owners.get(f"socket:[{words[9]}]")):  # 0A: listening
            found.setdefault(name, set()).add(words[1].partition(":")[0])
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
        suite="table1", dataset="folder", data=Path("~/images"), decoding=DecodeOptions(class_list=Path("few.txt"))
    )
    plan = Plan(method="lwf", settings={"weights": "w.safetensors"})
    options, run = workers.absolute(options, SuiteRun("lwf", plan, Path("runs/lwf/seed-0"), "", ""))
    assert run.plan.settings["weights"] == str(tmp_path / "w.safetensors")
    assert run.folder == tmp_path / "runs" / "lwf" / "seed-0"
    assert options.folder == tmp_path / "runs" / "folder-short"
    assert options.data == tmp_path / "home" / "images"
    assert options.decoding.class_list == tmp_path / "few.txt"
    assert workers.absolute(options, replace(run, plan=Plan()))[1].plan == Plan()


@dataclass
class RayRun:
    """A suite of two runs on a local Ray cluster, one worker of which was killed during training."""

    folder: Path
    outcomes: list[Outcome]
    killed: list[int]
    sockets: dict[str, set[str]]
    environments: list[dict[str, str]]  # of gcs_server and raylet


@pytest.fixture(scope="module")
def ray_run(tmp_path_factory: pytest.TempPathFactory) -> RayRun:
    folder = tmp_path_factory.mktemp("ray")
    draws = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 30)
    inputs = (3 * draws.normal(size=(4, 8))[labels] + draws.normal(size=(len(labels), 8))).astype(np.float32)
    np.savez(folder / "blobs.npz", inputs=inputs, labels=labels)
    dataset = load("arrays", folder / "blobs.npz")
    options = SuiteOptions(suite="balance", dataset="arrays", data=folder / "blobs.npz", settings=SETTINGS)
    here = plan_suite(replace(options, out=folder / "here"), dataset)
    assert [outcome.error for outcome in run_suite(here, dataset)] == [None, None]
    there = plan_suite(replace(options, out=folder / "there"), dataset)
    found = RayRun(folder, [], [], {}, [])

    def look_and_kill() -> None:
        deadline = time.monotonic() + 120
        while not found.killed and time.monotonic() < deadline:
            processes = started_processes()
            busy = [process for process, command in processes.items() if command.startswith("ray::_execute_alone")]
            # Only once a run is under way, and before any has ended.
            if busy and list((folder / "there").rglob("training.safetensors")):
                found.sockets = listening_sockets()
                for process, command in processes.items():
                    if command.split("\0")[0].endswith(("gcs_server", "raylet")):
                        lines = (Path("/proc") / str(process) / "environ").read_text().split("\0")
                        found.environments.append(dict(line.split("=", 1) for line in lines if "=" in line))
                os.kill(busy[0], signal.SIGKILL)
                found.killed.append(busy[0])
            time.sleep(0.02)

    watcher = threading.Thread(target=look_and_kill)
    watcher.start()
    found.outcomes = run_suite(there, dataset, workers=2, on="ray")
    watcher.join()
    return found


def test_a_suite_on_ray_has_the_same_results_when_a_worker_is_killed(ray_run: RayRun) -> None:
    assert ray_run.killed, "no worker was seen at work: make the runs longer"
    assert [outcome.error for outcome in ray_run.outcomes] == [None, None]
    assert not list((ray_run.folder / "there").rglob(FAILED))
    here, there = (results_in(ray_run.folder / name, "environment") for name in ("here", "there"))
    assert here == there


def test_a_local_ray_listens_on_the_loopback_address_alone(ray_run: RayRun) -> None:
    assert {"gcs_server", "raylet", "driver", "ray::_execute_alone"} <= ray_run.sockets.keys()
    assert set().union(*ray_run.sockets.values()) <= LOOPBACK, ray_run.sockets


def test_a_local_ray_asks_for_a_token_that_is_in_no_file(ray_run: RayRun) -> None:
    assert len(ray_run.environments) == 2
    for environment in ray_run.environments:
        assert environment["RAY_AUTH_MODE"] == "token"
        assert len(environment["RAY_AUTH_TOKEN"]) == 64


@pytest.mark.parametrize(("address", "mode"), [(None, "disabled"), ("127.0.0.1:6379", None), ("192.0.2.1:6379", "")])
def test_ray_without_token_authentication_is_refused(
    address: str | None, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RAY_ADDRESS", address), ("RAY_AUTH_MODE", mode)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="RAY_AUTH_MODE"):
        workers.import_ray()


def test_a_cluster_on_another_machine_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # reserved for documentation
    monkeypatch.setattr("ray.init", lambda **_: None)
    with pytest.warns(EngramWarning, match=r"192\.0\.2\.1:6379"):
        workers._connect(None)
