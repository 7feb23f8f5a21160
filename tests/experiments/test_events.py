"""The events of a run: a line per event in its folder, and scalars for TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from commands import engram
from learners_made import quick
from runs_made import AfterTask, comparable, final_bytes

from engram.data import Stream
from engram.errors import EngramError, TrainingError
from engram.experiments import Measurement, Result, TensorBoard, run
from engram.experiments.folder import RunProgress
from engram.network import Cache
from engram.progress import SILENT, Phase


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events of a run's log; each line must be a strict JSON object with an event and a time."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    times = [datetime.strptime(event.pop("time"), "%Y-%m-%dT%H:%M:%S%z") for event in events]
    assert times == sorted(times)
    assert all(abs(moment.timestamp() - time.time()) < 120 for moment in times)
    return events


class Recorder:
    """A listener that records all events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        self.events.append({"event": event, **values})


@dataclass(frozen=True)
class Logged:
    """A finished run of three tasks."""

    folder: Path
    result: Result


@pytest.fixture(scope="module")
def logged(vectors: Stream, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    folder = tmp_path_factory.mktemp("run")
    return Logged(folder, run(quick(), vectors, out=folder))


# The log


def test_a_run_logs_begin_epochs_phases_tasks_and_end_in_this_order(logged: Logged) -> None:
    events = events_of(logged.folder)
    found = [(event["event"], event.get("task"), event.get("phase"), event.get("epoch")) for event in events]
    expected: list[tuple[object, ...]] = [("begin", None, None, None)]
    for task in (1, 2, 3):
        expected += [("epoch", task, "train", epoch) for epoch in (1, 2)]
        after = ["train", "extract", *(["extract", "adapt"] if task > 1 else []), "herd", "classify"]
        expected += [("phase", task, name, None) for name in [*after, "measure", "measure"]]
        expected += [("task", task, None, None)]
    assert found == [*expected, ("end", None, None, None)]


def test_the_begin_event_names_method_data_seed_and_folder(logged: Logged) -> None:
    named = {"method": "features", "dataset": "blobs", "seed": 0, "folder": str(logged.folder)}
    assert events_of(logged.folder)[0] == {"event": "begin", **named}


def test_an_epoch_event_has_the_loss_and_the_final_learning_rate(vectors: Stream, tmp_path: Path) -> None:
    learner = quick(epochs=5, schedule="one-cycle")
    run(learner, vectors.first(2), out=tmp_path)
    epochs = [event for event in events_of(tmp_path) if event["event"] == "epoch"]
    assert set(epochs[0]) == {"event", "task", "phase", "epoch", "loss", "learning_rate"}
    per_epoch = learner.training.batches_per_epoch(vectors.tasks[0].train)
    rates = [learner.training.learning_rate_at((epoch + 1) * per_epoch - 1, 5 * per_epoch) for epoch in range(5)]
    assert [event["learning_rate"] for event in epochs] == pytest.approx(2 * rates)
    assert all(event["loss"] > 0 for event in epochs)
    assert epochs[4]["loss"] < epochs[0]["loss"]  # it learns


def test_the_loss_of_an_epoch_is_the_mean_over_its_batches(vectors: Stream, tmp_path: Path) -> None:
    """At a learning rate near 0 the network does not change, so the size of the batches makes no difference."""
    still = {"learning_rate": 1e-30, "momentum": 0.0, "weight_decay": 0.0, "epochs": 1}
    losses = {}
    for size in (12, 48):
        run(quick("gamma-lwf", batch_size=size, **still), vectors.first(1), out=tmp_path / str(size))
        (losses[size],) = [event["loss"] for event in events_of(tmp_path / str(size)) if event["event"] == "epoch"]
    assert losses[12] == pytest.approx(losses[48], rel=1e-5)


def test_a_phase_has_its_seconds(logged: Logged) -> None:
    spent: dict[str, list[float]] = {}
    for event in events_of(logged.folder):
        if event["event"] == "phase":
            spent.setdefault(event["phase"], []).append(event["seconds"])
    assert set(spent) == set(logged.result.seconds)
    for name, seconds in spent.items():
        assert all(each >= 0 for each in seconds)
        assert sum(seconds) <= logged.result.seconds[name] + 0.0005 * len(seconds)  # each is rounded to a millisecond
    assert sum(spent["train"]) > 0


def test_a_task_event_has_the_measurement(logged: Logged) -> None:
    result, tasks = logged.result, [event for event in events_of(logged.folder) if event["event"] == "task"]
    assert [event["accuracy"] for event in tasks] == result.curve
    assert [event["accuracy_top5"] for event in tasks] == result.curve_top5
    assert [event["omega"] for event in tasks] == result.omega
    assert [event["by_task"] for event in tasks] == result.accuracy_matrix
    assert [event["classes"] for event in tasks] == [2, 4, 6]
    assert tasks[-1]["memory_bytes"] == result.memory_bytes
    assert all(set(event) == {"event", "task", *(field.name for field in fields(Measurement))} for event in tasks)


def test_a_network_that_another_run_has_trained_has_no_epochs(vectors: Stream, tmp_path: Path) -> None:
    for name, epochs in (("first", 2), ("second", 0)):
        run(quick(), vectors.first(1), out=tmp_path / name, cache=Cache(tmp_path / "trained"))
        events = [event["event"] for event in events_of(tmp_path / name)]
        assert events.count("epoch") == epochs
        assert events.count("task") == 1


class _Interrupt(Exception):
    pass


def stop(task: int, measured: object) -> None:
    if task == 2:
        raise _Interrupt


def test_a_resumed_run_appends_to_the_log(vectors: Stream, tmp_path: Path) -> None:
    with pytest.raises(_Interrupt):
        run(quick(), vectors, out=tmp_path, listeners=[AfterTask(stop)])
    before = (tmp_path / "events.jsonl").read_bytes()
    events = events_of(tmp_path)
    assert events[-1] == {"event": "stop", "why": "_Interrupt"}
    assert [event["task"] for event in events if event["event"] == "task"] == [1, 2]
    run(quick(), vectors, out=tmp_path, resume=True)
    assert (tmp_path / "events.jsonl").read_bytes().startswith(before)
    added = events_of(tmp_path)[len(events) :]
    assert added[0]["event"] == "begin" and added[-1] == {"event": "end"}
    assert {event["task"] for event in added if "task" in event} == {3}


def test_a_failed_run_logs_why_it_stopped(vectors: Stream, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as failed:
        run(quick(learning_rate=1e30), vectors, out=tmp_path)
    events = events_of(tmp_path)
    assert [event["event"] for event in events] == ["begin", "stop"]
    assert events[-1]["why"] == str(failed.value)
    assert "not finite at task 1, epoch 1, batch 2" in events[-1]["why"]
    run(quick(), vectors.first(1), out=tmp_path)  # the folder is free for another, and the log goes on
    assert [event["event"] for event in events_of(tmp_path)][:3] == ["begin", "stop", "begin"]


def test_ctrl_c_is_logged(vectors: Stream, tmp_path: Path) -> None:
    def interrupt(*task: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(quick(), vectors, out=tmp_path, listeners=[AfterTask(interrupt)])
    assert events_of(tmp_path)[-1] == {"event": "stop", "why": "KeyboardInterrupt"}


def test_a_refused_run_logs_nothing(logged: Logged, vectors: Stream) -> None:
    before = (logged.folder / "events.jsonl").read_bytes()
    with pytest.raises(EngramError, match=r"rate: 0\.2, now 0\.1"):
        run(quick(learning_rate=0.1), vectors, out=logged.folder, resume=True)
    assert (logged.folder / "events.jsonl").read_bytes() == before


# Phases


class Recording(Phase):
    """A progress, and its phase, that record calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        self.calls.append((name, steps))
        yield self
        self.calls.append("left")

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.calls.append((steps, note))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_seconds_add_up_by_phase_and_onto_those_of_before(clock: list[float]) -> None:
    watch = RunProgress(SILENT, [])
    watch.seconds = {"train": 10.0}
    for seconds in (1.5, 2.0):
        with watch.phase("train"):
            clock[0] += seconds
    with watch.phase("herd"):
        clock[0] += 0.25
    assert watch.seconds == {"train": 13.5, "herd": 0.25}


def test_a_phase_left_by_an_error_is_counted_too(clock: list[float]) -> None:
    watch = RunProgress(SILENT, [])
    with pytest.raises(ValueError, match="stop"), watch.phase("train"):
        clock[0] += 3
        raise ValueError("stop")
    assert watch.seconds == {"train": 3.0}


def test_phases_and_steps_are_passed_on() -> None:
    inner = Recording()
    with RunProgress(inner, []).phase("train", 4) as phase:
        phase.advance(3, "loss 1")
        phase.advance()
    assert inner.calls == [("train", 4), (3, "loss 1"), (1, ""), "left"]


# Listeners


def test_listeners_receive_the_events_of_the_log_with_and_without_a_folder(vectors: Stream, tmp_path: Path) -> None:
    recorder, alone = Recorder(), Recorder()
    run(quick(), vectors.first(2), out=tmp_path, listeners=[recorder])
    run(quick(), vectors.first(2), listeners=[alone])
    assert recorder.events == events_of(tmp_path)
    untimed = [[{**event, "seconds": 0, "folder": None} for event in each.events] for each in (recorder, alone)]
    assert untimed[0] == untimed[1]


def test_listeners_do_not_change_the_result(vectors: Stream, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    quiet = run(quick(), vectors, out=tmp_path / "quiet")
    listeners = [Recorder(), Recorder(), TensorBoard(tmp_path / "tensorboard")]
    heard = run(quick(), vectors, out=tmp_path / "heard", listeners=listeners)
    assert comparable(heard) == comparable(quiet)
    assert final_bytes(tmp_path / "heard") == final_bytes(tmp_path / "quiet")


# TensorBoard


def test_tensorboard_gets_scalars_that_it_can_read(vectors: Stream, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(quick(), vectors, out=tmp_path / "run", listeners=[TensorBoard(tmp_path / "scalars")])
    found = EventAccumulator(str(tmp_path / "scalars")).Reload()
    tags = set(found.Tags()["scalars"])

    def scalars(tag: str) -> tuple[list[int], list[float]]:
        points = found.Scalars(tag)
        return [point.step for point in points], [point.value for point in points]

    assert scalars("accuracy") == ([1, 2, 3], pytest.approx(result.curve))
    assert scalars("omega") == ([1, 2, 3], pytest.approx(result.omega))
    assert scalars("omega_previous") == ([2, 3], pytest.approx((result.omega_previous or [])[1:]))
    assert scalars("memory_bytes")[1][-1] == result.memory_bytes
    logged = [event for event in events_of(tmp_path / "run") if event["event"] == "epoch"]
    for task in (1, 2, 3):
        epochs = [event for event in logged if event["task"] == task]
        for name in ("loss", "learning_rate"):
            expected = [1, 2], pytest.approx([event[name] for event in epochs])
            assert scalars(f"task {task}/train/{name}") == expected
        assert f"task {task}/train/seconds" in tags
    assert "by_task" not in tags


def test_a_tracked_run_writes_tensorboard_scalars_to_its_folder_and_can_be_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = ["run", "finetune", "--epochs", "1", "--out", "here", "--track", "--quiet"]
    done = engram(*command, "--tasks", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    further = engram(*command, "--tasks", "2", "--resume", cwd=tmp_path)
    assert (further.returncode, further.stderr) == (0, "")
    found = EventAccumulator(str(tmp_path / "here" / "tensorboard")).Reload()
    curve = json.loads((tmp_path / "here" / "result.json").read_text())["curve"]
    assert [point.value for point in found.Scalars("accuracy")] == pytest.approx(curve)


def test_track_does_not_write_to_the_folder_of_another_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    quick = ["run", "finetune", "--epochs", "1", "--tasks", "1", "--out", "here", "--quiet"]
    assert engram(*quick, cwd=tmp_path).returncode == 0
    again = engram(*quick, "--track", cwd=tmp_path)
    assert again.returncode == 2 and "already holds a run" in again.stderr
    assert not (tmp_path / "here" / "tensorboard").exists()


def test_without_tensorboard_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EngramError, match=r"pip install .*\[track\]"):
        TensorBoard(tmp_path / "scalars")
    assert not (tmp_path / "scalars").exists()
