"""Running suites: no work is done twice, a failure fails one run, and several processes give the results of one."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command, warm
from conftest import blobs, patterns
from runs_made import AfterTask, results_in

from engram import storage
from engram.data import Dataset, load
from engram.errors import UsageError
from engram.experiments import Plan, Result
from engram.experiments.folder import RunFolder
from engram.experiments.suite_plan import SuiteOptions, SuitePlan, SuiteRun, estimate, plan_suite, runs_of
from engram.experiments.suites import Variant
from engram.experiments.workers import FAILED, Outcome, execute, run_in_processes, run_suite, start_process
from engram.methods import measure_costs
from engram.progress import Phase, Silent

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than:engram.errors.EngramWarning")

Finished = Callable[[SuiteOptions, Path], SuitePlan]

QUICK = {"epochs": 1, "adapter_steps": 10, "adapter_width": 32, "learning_rate": 0.2}
ALPHA = SuiteOptions(suite="alpha", dataset="arrays", tasks=2, settings=QUICK)
QUALITY = replace(ALPHA, suite="quality")  # features, and hybrid with two images of each class
SLOW = {**QUICK, "epochs": 40, "batch_size": 2}  # seconds, not milliseconds


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of vectors, in a file that other processes can read too."""
    dataset = blobs(classes=10, per_class=20, dimension=8)
    path = tmp_path_factory.mktemp("data") / "blobs.npz"
    parts = {"train": dataset.train, "test": dataset.test}
    arrays = {f"{name}_inputs": part.inputs.numpy() for name, part in parts.items()}
    labels = {f"{name}_labels": part.labels.numpy() for name, part in parts.items()}
    np.savez(path, **arrays, **labels)
    return path


@pytest.fixture(scope="module")
def data(file: Path) -> Dataset:
    return load("arrays", file)


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need not import everything first: forked, not spawned."""
    context = warm()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


def at(options: SuiteOptions, out: Path, file: Path) -> SuiteOptions:
    """The same suite on the data of a file, in a folder."""
    return replace(options, out=out, data=file)


def run_all(options: SuiteOptions, out: Path, file: Path, workers: int = 1) -> tuple[SuitePlan, list[Outcome]]:
    """Run a suite, or what is left of it."""
    dataset = load("arrays", file)
    plan = plan_suite(at(options, out, file), dataset)
    plan.start("engram suite", resume=True)
    return plan, run_suite(plan, dataset, workers=workers)


@pytest.fixture(scope="module")
def finished(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A function that gives a folder a copy of a finished suite, which is run only the first time."""
    whole: dict[str, Path] = {}

    def copy(options: SuiteOptions, out: Path) -> SuitePlan:
        if options.suite not in whole:
            whole[options.suite] = tmp_path_factory.mktemp(options.suite)
            run_all(options, whole[options.suite], file)
        shutil.copytree(whole[options.suite], out, dirs_exist_ok=True)
        return plan_suite(at(options, out, file), load("arrays", file))

    return copy


def in_processes(options: SuiteOptions, runs: list[SuiteRun]) -> list[Outcome]:
    """The outcomes of runs, each in a process of its own."""
    return list(run_in_processes(options, runs, 1))


def results_of(plan: SuitePlan) -> list[list[Result]]:
    return [row.results() for row in plan.rows]


def result_files(out: Path) -> dict[str, dict[str, Any]]:
    """The results of a suite by the folders of its runs, whichever process executed them."""
    return {str(Path(path).parent): values for path, values in results_in(out, "environment").items()}


def seconds_of(out: Path, run_folder: str) -> dict[str, float]:
    seconds: dict[str, float] = json.loads((out / run_folder / "result.json").read_text())["seconds"]
    return seconds


def networks(out: Path) -> int:
    return len(list((out / "trained").glob("network-*")))


def states(out: Path) -> dict[str, tuple[int, int]]:
    """Every file of runs and every network: which it is and when it was written."""
    files = [path for path in [*(out / "runs").rglob("*"), *(out / "trained").glob("network-*")] if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


# One process


def test_a_suite_writes_a_result_per_run_and_a_file_that_lists_them(file: Path, tmp_path: Path) -> None:
    plan, outcomes = run_all(replace(QUALITY, seeds=2), tmp_path, file)
    assert [(outcome.run.label, outcome.run.plan.seed, outcome.error) for outcome in outcomes] == [
        ("P = 0", 0, None),
        ("P = 0", 1, None),
        ("P = 2", 0, None),
        ("P = 2", 1, None),
    ]
    written = json.loads((tmp_path / "suite-quality.json").read_text())
    assert [row["label"] for row in written["variants"]] == ["P = 0", "P = 2"]
    assert sorted(run for row in written["variants"] for run in row["runs"]) == sorted(result_files(tmp_path))
    for variant, results in ((row.variant, row.results()) for row in plan.rows):
        assert [result.seed for result in results] == [0, 1]
        assert all(variant.settings.items() <= result.settings.items() for result in results)
        assert all(len(result.curve) == 2 and result.settings["epochs"] == 1 for result in results)
    assert plan.runs_left == []
    assert plan.disk_bytes == pytest.approx(
        sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")), rel=0.2
    )


def test_a_finished_suite_has_no_runs_left_and_rewrites_nothing(finished: Finished, file: Path, tmp_path: Path) -> None:
    finished(QUALITY, tmp_path)
    before, file_before = states(tmp_path), (tmp_path / "suite-quality.json").read_bytes()
    assert len(before) > 10
    plan, outcomes = run_all(QUALITY, tmp_path, file)
    assert outcomes == []
    assert (plan.runs_left, plan.seconds) == ([], 0)
    assert [row.done for row in plan.rows] == [1, 1]
    assert states(tmp_path) == before
    assert (tmp_path / "suite-quality.json").read_bytes() == file_before


def test_more_seeds_add_runs_and_leave_the_others_alone(finished: Finished, file: Path, tmp_path: Path) -> None:
    finished(QUALITY, tmp_path)
    before = states(tmp_path)
    plan, outcomes = run_all(replace(QUALITY, seeds=2), tmp_path, file)
    assert [outcome.run.plan.seed for outcome in outcomes] == [1, 1]
    assert before.items() <= states(tmp_path).items()
    assert [len(results) for results in results_of(plan)] == [2, 2]


def test_variants_that_differ_after_training_are_trained_once(finished: Finished, tmp_path: Path) -> None:
    plan = finished(ALPHA, tmp_path)
    assert [row.done for row in plan.rows] == [1] * 5 and networks(tmp_path) == 2  # one per task
    trained = ["train" in seconds_of(tmp_path, run.folder) for row in plan.rows for run in row.runs]
    assert trained == [True, False, False, False, False]
    assert len({tuple(results[0].omega or []) for results in results_of(plan)}) == 5


def test_another_suite_in_the_folder_reuses_networks(finished: Finished, file: Path, tmp_path: Path) -> None:
    finished(ALPHA, tmp_path)
    before = states(tmp_path)
    plan, outcomes = run_all(replace(ALPHA, suite="depth"), tmp_path, file)
    assert len(outcomes) == 4 and networks(tmp_path) == 2
    for run in (run for row in plan.rows for run in row.runs):
        assert not {"train", "extract", "measure"} & seconds_of(tmp_path, run.folder).keys()
    assert before.items() <= states(tmp_path).items()
    assert [len(results) for results in results_of(plan)] == [1] * 4


def test_another_suite_in_the_folder_reuses_runs(finished: Finished, file: Path, tmp_path: Path) -> None:
    finished(replace(ALPHA, suite="depth"), tmp_path)
    before = states(tmp_path)
    gamma = replace(ALPHA, suite="gamma", methods=("features",))
    plan = plan_suite(at(gamma, tmp_path, file), load("arrays", file))
    assert [row.done for row in plan.rows] == [0, 0, 1, 0, 0]  # γ = 0.05, the usual one, had its two hidden layers
    _, outcomes = run_all(gamma, tmp_path, file)
    assert [outcome.run.label for outcome in outcomes] == [f"features, γ = {gamma}" for gamma in (0, 0.01, 0.1, 1)]
    assert networks(tmp_path) == 2 + 4  # the first task is the same for every γ
    assert before.items() <= states(tmp_path).items()
    assert [len(results) for results in results_of(plan)] == [1] * 5


def test_a_run_alone_has_the_result_that_it_has_in_a_suite(finished: Finished, tmp_path: Path, data: Dataset) -> None:
    plan = finished(ALPHA, tmp_path)
    results, run = plan.rows[-1].results(), plan.rows[-1].runs[0]  # one that took over another's network
    alone = run.plan.run(data)
    assert results[0].networks_reused == 2
    assert replace(alone, seconds={}) == replace(results[0], seconds={}, networks_reused=0)


def test_a_suite_that_exists_is_refused_unless_it_is_resumed(file: Path, tmp_path: Path, data: Dataset) -> None:
    plan = plan_suite(at(QUALITY, tmp_path / "out", file), data)
    assert not (tmp_path / "out").exists()
    plan.start("the first", resume=False)
    path = tmp_path / "out" / "suite-quality.json"
    content = path.read_bytes()
    with pytest.raises(UsageError, match=re.escape(f"{path} ") + ".*--resume"):
        plan.start("the second", resume=False)
    assert path.read_bytes() == content
    plan.start("the first", resume=True)
    assert path.read_bytes() == content
    fewer = plan_suite(at(replace(QUALITY, methods=("hybrid",)), tmp_path / "out", file), data)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        fewer.start("the first", resume=True)
    assert path.read_bytes() == content
    other = plan_suite(at(ALPHA, tmp_path / "out", file), data)
    other.start("another suite", resume=False)


def test_the_default_folder_is_that_of_the_data_set_and_preset() -> None:
    assert ALPHA.folder == QUALITY.folder == Path("runs/arrays-short")
    assert replace(ALPHA, preset="paper").folder == Path("runs/arrays-paper")
    assert replace(ALPHA, dataset="digits").folder == Path("runs/digits-short")


class _Bars:
    """Adds up the steps of phases by their names."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.advanced: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        self.totals[name] = steps or 0
        self.advanced[name] = 0
        yield _Bar(self, name)


class _Bar(Phase):
    def __init__(self, bars: _Bars, name: str) -> None:
        self.bars, self.name = bars, name

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.bars.advanced[self.name] += steps


def test_the_progress_of_a_resumed_suite_reaches_its_total(finished: Finished, tmp_path: Path, data: Dataset) -> None:
    plan = finished(ALPHA, tmp_path)
    first, second = (tmp_path / row.runs[0].folder for row in plan.rows[:2])
    (first / "result.json").unlink()  # its tasks are all done, and will be reported again
    (second / "result.json").unlink()
    storage.remove(second / "checkpoint-002")
    left = plan_suite(plan.options, data)
    assert len(left.runs_left) == 2
    bars = _Bars()
    run_suite(left, data, progress=bars)
    assert bars.totals["suite"] == bars.advanced["suite"] > 0


def test_the_progress_of_a_suite_with_failed_runs_reaches_its_total(file: Path, tmp_path: Path, data: Dataset) -> None:
    plan = plan_suite(at(QUALITY, tmp_path, file), data)
    plan.start("engram suite", resume=False)
    (tmp_path / plan.rows[0].runs[0].folder / "events.jsonl").mkdir(parents=True)
    bars = _Bars()
    outcomes = run_suite(plan, data, progress=bars)
    assert [outcome.error is None for outcome in outcomes] == [False, True]
    assert bars.totals["suite"] == bars.advanced["suite"] > 0


def test_a_run_that_two_variants_have_in_common_is_counted_once(file: Path, tmp_path: Path, data: Dataset) -> None:
    options = SuiteOptions(suite="frontier", dataset="arrays", methods=("engram",), settings={"epochs": 1}, tasks=2)
    rows = plan_suite(at(options, tmp_path, file), data).rows
    folders = [row.runs[0].folder for row in rows]
    assert len(set(folders)) < len(folders), "no two variants are one run any more"
    counted = {}
    for row in rows:
        one, folder = row.estimate, row.runs[0].folder
        assert row.seconds == 0 if folder in counted else row.seconds >= sum(one.adapting)
        counted[folder] = row
    first = rows[0].estimate
    assert rows[0].seconds == pytest.approx(sum(map(sum, (first.training, first.extracting, first.adapting))))


# Failures


def test_a_worker_that_cannot_load_the_data_says_why(
    file: Path, tmp_path: Path, data: Dataset, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_suite(at(QUALITY, tmp_path / "out", file), data)
    (outcome,) = in_processes(replace(plan.options, data=tmp_path / "gone.npz"), plan.runs_left[:1])
    assert "gone.npz" in str(outcome.error)
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_run_is_marked_and_the_others_continue(finished: Finished, file: Path, tmp_path: Path) -> None:
    plan = finished(ALPHA, tmp_path)
    whole = result_files(tmp_path)
    damaged, last = plan.rows[1].runs[0], plan.rows[4].runs[0]
    for run in (damaged, last):
        (tmp_path / run.folder / "result.json").unlink()
    checkpoint = tmp_path / damaged.folder / "checkpoint-002" / "learner.safetensors"
    good = checkpoint.read_bytes()
    checkpoint.write_bytes(good[:100])

    plan, outcomes = run_all(ALPHA, tmp_path, file)
    (bad, error), well = outcomes
    assert (bad.folder, well.run.folder, well.error) == (damaged.folder, last.folder, None)
    assert error is not None and str(checkpoint) in error
    assert json.loads((tmp_path / damaged.folder / FAILED).read_text()) == {"label": "α = 1", "error": error}
    assert [run.folder for run in plan.runs_left] == [damaged.folder]
    assert [len(results) for results in results_of(plan)] == [1, 0, 1, 1, 1]
    assert list(tmp_path.glob(f"runs/*/*/{FAILED}")) == [tmp_path / damaged.folder / FAILED]

    checkpoint.write_bytes(good)
    _, outcomes = run_all(ALPHA, tmp_path, file)
    assert [(outcome.run.folder, outcome.error) for outcome in outcomes] == [(damaged.folder, None)]
    assert not list(tmp_path.glob(f"runs/*/*/{FAILED}"))
    assert result_files(tmp_path) == whole


def test_a_run_that_failed_in_its_first_task_can_be_tried_again(file: Path, tmp_path: Path) -> None:
    options = replace(ALPHA, settings={**QUICK, "learning_rate": 1e30, "batch_size": 8})
    plan, outcomes = run_all(options, tmp_path, file)
    assert len(outcomes) == 5
    for outcome in outcomes:
        assert outcome.error is not None and "task 1, epoch 1" in outcome.error
        assert json.loads((tmp_path / outcome.run.folder / FAILED).read_text())["error"] == outcome.error
    assert [results for results in results_of(plan)] == [[], [], [], [], []]
    _, again = run_all(options, tmp_path, file)
    assert [outcome.error for outcome in again] == [outcome.error for outcome in outcomes]
    assert not result_files(tmp_path) and networks(tmp_path) == 0


def test_a_damaged_network_is_trained_again(file: Path, tmp_path: Path) -> None:
    trained = replace(ALPHA, suite="gamma", methods=("gamma-lwf",), settings={"epochs": 1, "learning_rate": 0.2})
    run_all(trained, tmp_path, file)
    networks = {path: path.read_bytes() for path in (tmp_path / "trained").glob("network-*")}
    for path, content in networks.items():
        path.write_bytes(content[:50])
    _, outcomes = run_all(ALPHA, tmp_path, file)
    assert [outcome.error for outcome in outcomes] == [None] * 5
    assert sum(path.read_bytes() == content for path, content in networks.items()) == 2  # those that ALPHA shares


def test_an_unforeseen_error_is_marked_with_its_traceback(file: Path, tmp_path: Path, data: Dataset) -> None:
    plan = plan_suite(at(QUALITY, tmp_path, file), data)
    plan.start("engram suite", resume=False)
    (tmp_path / plan.rows[0].runs[0].folder / "events.jsonl").mkdir(parents=True)  # an unforeseen error
    (bad, error), (_, well) = run_suite(plan, data)
    failure = json.loads((tmp_path / bad.folder / FAILED).read_text())
    assert (bad.label, failure["label"], failure["error"]) == ("P = 0", "P = 0", error)
    assert error is not None and "IsADirectoryError" in error
    assert "Traceback" in failure["trace"] and "events.jsonl" in failure["trace"]
    assert well is None


def test_a_run_that_another_process_executes_is_not_marked_as_failed(file: Path, tmp_path: Path, data: Dataset) -> None:
    plan = plan_suite(at(QUALITY, tmp_path, file), data)
    plan.start("engram suite", resume=False)
    run, errors = plan.rows[0].runs[0], []

    class Again(Silent):
        @contextmanager
        def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
            errors.append(execute(plan.options, run, lambda: data))
            yield Phase()

    assert execute(plan.options, run, lambda: data, Again()) is None
    assert errors and all(str(run.folder) in str(error) for error in errors)
    assert run.done
    assert not (tmp_path / run.folder / FAILED).exists()


def test_a_suite_resumes_on_another_device(finished: Finished, file: Path, tmp_path: Path) -> None:
    plan = finished(QUALITY, tmp_path)
    (tmp_path / plan.rows[0].runs[0].folder / "result.json").unlink()
    options = replace(QUALITY, settings={**QUALITY.settings, "device": "cpu"})
    _, outcomes = run_all(options, tmp_path, file)
    assert [outcome.error for outcome in outcomes] == [None]


# Several processes


@pytest.mark.usefixtures("warm_workers")
def test_two_workers_give_the_results_of_one(finished: Finished, file: Path, tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())  # of other tests, such as joblib's idle workers
    finished(QUALITY, tmp_path / "one")
    _, outcomes = run_all(QUALITY, tmp_path / "two", file, workers=2)
    assert len({outcome.run.folder for outcome in outcomes}) == 2
    assert [outcome.error for outcome in outcomes] == [None] * 2
    assert result_files(tmp_path / "two") == result_files(tmp_path / "one")
    assert networks(tmp_path / "two") == 3  # the first task's is shared
    assert not set(multiprocessing.active_children()) - before


def test_ctrl_c_does_not_interrupt_a_worker_that_is_importing(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_suite(at(QUALITY, tmp_path, file), load("arrays", file))
    pipe, process = start_process(plan.options, plan.runs_left[0], 1)
    for _ in range(20):
        os.kill(process.pid or 0, signal.SIGINT)
        time.sleep(0.01)
    assert process.is_alive()
    process.join(60)
    assert process.exitcode == 0 and pipe.recv() is None and plan.rows[0].done
    assert "KeyboardInterrupt" not in capfd.readouterr().err


@pytest.mark.usefixtures("warm_workers")
def test_a_run_that_fails_in_a_worker_is_marked_and_the_others_continue(
    finished: Finished, file: Path, tmp_path: Path
) -> None:
    plan = finished(QUALITY, tmp_path)
    folders = [tmp_path / row.runs[0].folder for row in plan.rows]
    for folder in folders:
        (folder / "result.json").unlink()
    (folders[0] / "run.json").write_text("{")
    _, outcomes = run_all(QUALITY, tmp_path, file, workers=2)
    errors = {outcome.run.label: outcome.error for outcome in outcomes}
    assert errors["P = 2"] is None
    assert errors["P = 0"] is not None and "run.json" in errors["P = 0"]
    assert json.loads((folders[0] / FAILED).read_text())["error"] == errors["P = 0"]


def test_warnings_of_a_worker_are_printed_without_source_lines(
    file: Path, tmp_path: Path, data: Dataset, capfd: pytest.CaptureFixture[str]
) -> None:
    more = Variant(label="more than there are", method="features", settings={"features_per_class": 21}, series="")
    options = at(QUALITY, tmp_path, file)
    outcomes = in_processes(options, runs_of(more, options, data))
    assert [outcome.error for outcome in outcomes] == [None]
    stderr = capfd.readouterr().err
    assert "note: " in stderr and "warn_of_small_classes" not in stderr and "features.py" not in stderr


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to find out which process does what")
def test_a_killed_worker_fails_only_its_own_run_which_can_be_resumed(file: Path, tmp_path: Path) -> None:
    options, killed = replace(QUALITY, settings=SLOW), []

    def kill_the_one_that_trains() -> None:
        wait_for(lambda: list(tmp_path.glob("runs/*/*/training.safetensors")))
        (training,) = tmp_path.glob("runs/*/*/training.safetensors")
        for worker in multiprocessing.active_children():
            if str(training.with_name(".lock")) in open_files(worker.pid):
                os.kill(worker.pid or 0, signal.SIGKILL)
                killed.append(training.parent)

    killer = threading.Thread(target=kill_the_one_that_trains)
    killer.start()
    plan, outcomes = run_all(options, tmp_path, file, workers=2)
    killer.join()
    assert len(outcomes) == 2
    (failed,) = [outcome for outcome in outcomes if outcome.error is not None]
    assert failed.run.folder == killed[0]
    assert failed.error is not None and "SIGKILL" in failed.error and "--resume" in failed.error
    place = tmp_path / killed[0]
    assert json.loads((place / FAILED).read_text()) == {"label": failed.run.label, "error": failed.error}
    assert [run.folder for run in plan.runs_left] == killed

    _, outcomes = run_all(options, tmp_path, file)
    assert [(outcome.run.folder, outcome.error) for outcome in outcomes] == [(killed[0], None)]
    assert not (place / FAILED).exists()
    assert len(result_files(tmp_path)) == 2 and networks(tmp_path) == 3  # the first task's is shared


def open_files(process: int | None) -> set[str]:
    found = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(link))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def run_process(file: Path, trainings: Path, out: Path, *settings: str) -> Command:
    """A run that shares trainings, in a process of its own."""
    data = ["--dataset", "arrays", "--data", str(file), "--tasks", "2", "--trainings", str(trainings)]
    given = [part for setting in settings for part in ("--set", setting)]
    return Command("run", "features", *data, *given, "--out", str(out), "--quiet", cwd=trainings.parent)


def epochs_of(out: Path) -> list[tuple[int, int]]:
    """The (task, epoch) pairs that a run has logged."""
    path = out / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(event["task"], event["epoch"]) for event in events if event["event"] == "epoch"]


def test_of_two_processes_that_need_the_same_network_one_trains_it_and_the_other_waits(
    file: Path, tmp_path: Path
) -> None:
    common = [f"{name}={value}" for name, value in {**SLOW, "features_per_class": 8}.items()]
    one = run_process(file, tmp_path / "trained", tmp_path / "one", *common)
    other = None
    try:
        wait_for(lambda: epochs_of(tmp_path / "one"))
        one.send_signal(signal.SIGSTOP)  # in the middle of the first task's training
        assert epochs_of(tmp_path / "one")[-1][0] == 1
        other = run_process(file, tmp_path / "trained", tmp_path / "other", *common, "alpha=5")
        wait_for((tmp_path / "other" / "events.jsonl").exists)
        time.sleep(1)
        assert other.poll() is None
        assert epochs_of(tmp_path / "other") == []
        one.send_signal(signal.SIGCONT)
        assert (one.wait(120).returncode, other.wait(120).returncode) == (0, 0)
    finally:
        for process in (one, other):
            if process is not None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    trained = [*epochs_of(tmp_path / "one"), *epochs_of(tmp_path / "other")]
    assert sorted(trained) == [(task, epoch + 1) for task in (1, 2) for epoch in range(int(SLOW["epochs"]))]
    assert networks(tmp_path) == 2


# Estimates

STORED = {
    "features": {"features_per_class": 5},
    "hybrid": {"features_per_class": 5, "images_per_class": 3},
    "gamma-icarl": {"images_per_class": 3},
    "icarl": {"images_total": 13},  # three of each of four classes; one is left over
    "joint": {},
    "lwf": {},
}


@pytest.mark.parametrize("method", STORED)
def test_the_estimated_memory_is_exact(method: str) -> None:
    dataset = patterns() if method in ("hybrid", "gamma-icarl", "joint") else blobs(classes=4)
    settings = {**STORED[method], "epochs": 1} | ({"adapter_steps": 5} if method in ("features", "hybrid") else {})
    plan = Plan(method=method, settings=settings, classes_per_task=2)
    learner = plan.learner(dataset)
    costs = measure_costs(learner, dataset.train, len(dataset.class_names))
    predicted = estimate(learner, plan.stream(dataset), costs)
    result = plan.run(dataset)
    assert predicted.memory_bytes == result.memory_bytes
    assert (result.memory_bytes > 0) == (method != "lwf")
    assert len(predicted.training) == len(predicted.extracting) == len(predicted.adapting) == 2
    assert all(seconds > 0 for seconds in (*predicted.training, *predicted.extracting))
    assert (sum(predicted.adapting) > 0) == (method in ("features", "hybrid"))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("features", {"features_per_class": 250}), ("gamma-icarl", {"images_per_class": 30}), ("icarl", {})],
    ids=["features", "gamma-icarl", "icarl"],
)
def test_the_estimated_memory_counts_no_more_samples_than_classes_have(method: str, settings: dict[str, int]) -> None:
    whole = patterns()  # twelve of each class; of one, four are left
    dataset = replace(whole, train=whole.train.select(torch.arange(8, len(whole.train))))
    quick = {"epochs": 1} | ({"adapter_steps": 5} if method == "features" else {})
    plan = Plan(method=method, settings={**settings, **quick}, classes_per_task=2, validation=0.1)
    learner = plan.learner(dataset)
    costs = measure_costs(learner, dataset.train, len(dataset.class_names))
    predicted = estimate(learner, plan.stream(dataset), costs)
    assert predicted.memory_bytes == plan.run(dataset).memory_bytes


def test_shared_work_is_estimated_once_per_seed(file: Path, tmp_path: Path, data: Dataset) -> None:
    plan = plan_suite(at(replace(ALPHA, seeds=2), tmp_path, file), data)
    one = plan.rows[0].estimate
    shared, own = sum(one.training) + sum(one.extracting), sum(one.adapting)
    assert shared > 0 and own > 0
    assert [row.seconds for row in plan.rows] == pytest.approx([2 * (shared + own), *[2 * own] * 4])
    assert plan.seconds == pytest.approx(2 * shared + 10 * own)
    assert not list(tmp_path.iterdir())


def test_different_trainings_are_estimated_separately(file: Path, tmp_path: Path, data: Dataset) -> None:
    plan = plan_suite(at(replace(ALPHA, suite="gamma", settings={"epochs": 1}), tmp_path, file), data)
    for number, row in enumerate(plan.rows):
        one = row.estimate
        first = one.training[0] if number == 0 else 0  # no teacher yet: it is the same for every γ
        training = first + sum(one.training[1:]) if row.variant.method == "features" else 0
        assert row.seconds == pytest.approx(training + sum(one.extracting) + sum(one.adapting))


def test_networks_of_finished_runs_are_not_estimated_again(finished: Finished, tmp_path: Path, data: Dataset) -> None:
    plan = finished(ALPHA, tmp_path)
    (tmp_path / plan.rows[3].runs[0].folder / "result.json").unlink()
    left = plan_suite(plan.options, data)
    assert [row.done for row in left.rows] == [1, 1, 1, 0, 1]
    assert left.seconds == 0  # all of its tasks are learned: only its result is to be written again
    shutil.rmtree(tmp_path / plan.rows[3].runs[0].folder)
    left = plan_suite(plan.options, data)
    assert left.seconds == pytest.approx(sum(left.rows[3].estimate.adapting))


def test_finished_tasks_of_an_interrupted_run_are_not_estimated_again(
    file: Path, tmp_path: Path, data: Dataset
) -> None:
    options = replace(ALPHA, suite="gamma", settings={"epochs": 1})
    plan = plan_suite(at(options, tmp_path, file), data)
    run = plan.rows[0].runs[0]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.plan.run(data, run.folder, listeners=[AfterTask(interrupt)])
    assert (RunFolder(run.folder).tasks_done, run.done) == (1, False)
    left = plan_suite(plan.options, data)
    for before, row in zip(plan.rows, left.rows, strict=True):
        one, learned = row.estimate, row.runs[0] == run
        training = sum(one.training[1:]) if row.variant.method == "features" else 0
        rest = slice(1 if learned else 0, None)
        assert row.seconds == pytest.approx(training + sum(one.extracting[rest]) + sum(one.adapting[rest]))
        assert before.runs == row.runs
