"""Running an experiment: a learner learns a stream, is measured after every task, and can be killed at any moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram import __version__, storage
from engram.data import Stream, Task
from engram.errors import DataError, EngramError, UsageError
from engram.experiments.checkpoint import Checkpoint, RunFolder
from engram.experiments.estimate import check_memory
from engram.experiments.events import EventLog, Listener, Reporting
from engram.experiments.identity import content_of_weights, identifying
from engram.experiments.measuring import Measurement, measure
from engram.experiments.metrics import average_incremental_accuracy, forgetting, origin_of
from engram.experiments.results import Result, environment, joined, megabytes
from engram.methods import Learner
from engram.network import Cache, EpochCheckpoints, Network, choose_device, parallel, threads_for
from engram.progress import SILENT, Progress, Stopwatch

# (task, what was measured, seconds by phase so far; none of a task that was done before the run was resumed)
AfterTask = Callable[[int, Measurement, dict[str, float]], None]


def run(
    learner: Learner,
    stream: Stream,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    trainings: Cache | None = None,
    listeners: Sequence[Listener] = (),
    progress: Progress = SILENT,
    after_task: AfterTask | None = None,
) -> Result:
    """Let a learner that has learned nothing yet learn the stream, and measure it after every task.

    With `out`, the run is kept in that folder; after a kill, `resume` goes on from there to exactly the same end. With
    `trainings`, networks and their features are shared with other runs that differ only in what comes after training.
    `listeners` are told of events beside `events.jsonl` in the folder. Under torchrun all processes call it alike and
    get the same result; the first alone writes, reports progress and calls `after_task`.
    """
    with parallel.process_group(learner.device), ExitStack() as held:
        if learner.tasks_:
            raise UsageError("run() wants a learner that has learned nothing yet. Make a new one.")
        learner.check(len(stream.classes))
        _check_tests(stream)
        check_memory(learner, stream)
        fingerprints = stream.fingerprints()
        request = _request(learner, stream, fingerprints)
        parallel.check_same([__version__, request], "the data or the settings")
        # Of several processes the first alone has the folder, and tells how it goes.
        folder = parallel.on_main(lambda: held.enter_context(_opened(out, request, resume)))
        log = [EventLog(folder.path / "events.jsonl")] if folder is not None else []
        told = [*log, *listeners] if parallel.is_main() else []
        reporting = Reporting(progress if parallel.is_main() else SILENT, told)
        learner.cache = trainings if learner.is_cacheable else None
        held.enter_context(threads_for(stream.tasks[0].train.shape, learner.network))
        with _told(reporting, request):
            measurements, seconds, taken, made_with = _learn(
                learner, stream, fingerprints, folder, reporting, after_task
            )
            found = parallel.on_main(lambda: folder.result() if folder is not None else None)
            made = found or _result(
                learner, stream, measurements, seconds, taken, made_with
            )  # a finished run stays as it is
            result = Result(**parallel.broadcast(made.to_json))
            if folder is not None and found is None:
                folder.finish(result)
    return result


def _check_tests(stream: Stream) -> None:
    """Refuse, before anything is learned, a task that no accuracy could be measured on."""
    for task in stream:
        if not len(task.test):
            names = [stream.class_names[label] for label in task.classes]
            named = ", ".join([*names[:3], *(["…"] if names[3:] else [])])
            raise DataError(
                f"Task {task.index + 1} ({named}) has no test samples, so nothing could be measured on it. Give its "
                "classes more samples, or leave them out."
            )


@contextmanager
def _told(reporting: Reporting, request: dict[str, Any]) -> Iterator[None]:
    """Tell of a run's beginning and of how it ended; of a kill there is no telling."""
    reporting.say("begin", method=request["method"], dataset=request["dataset"])
    try:
        yield
    except BaseException as error:
        reporting.say("stop", why=str(error) if isinstance(error, EngramError) else type(error).__name__)
        raise
    reporting.say("end")


@contextmanager
def _opened(out: Path | str | None, request: dict[str, Any], resume: bool) -> Iterator[RunFolder | None]:
    if out is None:
        yield None
        return
    path = Path(out)
    storage.make_folder(path)
    with storage.locked(path):
        folder = RunFolder(path)
        folder.open(request, resume=resume)
        try:
            yield folder
        except Exception:
            folder.withdraw()
            raise


def _request(learner: Learner, stream: Stream, fingerprints: list[str]) -> dict[str, Any]:
    """What makes a run this run and no other."""
    request = {"method": learner.name, "dataset": stream.name, "settings": learner.settings(), "tasks": fingerprints}
    return request | content_of_weights(learner)


def _learn(
    learner: Learner,
    stream: Stream,
    fingerprints: list[str],
    folder: RunFolder | None,
    progress: Reporting,
    after_task: AfterTask | None,
) -> tuple[list[Measurement], dict[str, float], int, Mapping[str, str]]:
    origins, measurements, seconds, networks_taken, before = _recall(learner, folder)
    made_with = joined(before, environment(str(choose_device(learner.device))))
    watch = Stopwatch(progress, seconds)
    after_task = after_task if parallel.is_main() else None
    if after_task is not None:
        for done, measured in enumerate(measurements):
            after_task(done, measured, {})
    with progress.phase("run", len(stream)) as whole:
        whole.advance(learner.tasks_)
        for task in stream.tasks[learner.tasks_ :]:
            progress.task = task.index + 1
            checkpoints = folder.checkpoints(task.index) if folder is not None else None
            network, was_taken = _trained(learner, task, fingerprints[: task.index + 1], checkpoints, watch)
            if checkpoints is not None and checkpoints.seconds_before:
                watch.seconds["train"] += checkpoints.seconds_before
            networks_taken += was_taken
            kept = learner.absorb(task, network, watch)
            origins = origin_of(kept.features, task.index, origins)
            measurements.append(measure(learner, stream, task.index, origins, watch))
            if folder is not None:
                values = [asdict(each) for each in measurements]
                spent = (watch.seconds, networks_taken, made_with)
                folder.save(Checkpoint(learner.tasks_, learner.state(), origins, values, *spent))
            progress.say("task", task=task.index + 1, **asdict(measurements[-1]))
            whole.advance()
            if after_task is not None:
                after_task(task.index, measurements[-1], watch.seconds)
    return measurements, watch.seconds, networks_taken, made_with


def _recall(
    learner: Learner, folder: RunFolder | None
) -> tuple[Tensor, list[Measurement], dict[str, float], int, Mapping[str, str]]:
    """Bring the learner to the folder's last checkpoint, and give the rest of it."""
    found = parallel.broadcast(lambda: folder.load() if folder is not None else None)
    if found is None:
        return torch.empty(0, 2, dtype=torch.int64), [], {}, 0, {}
    checkpoint = Checkpoint(*found)
    learner.restore(checkpoint.learner)
    measured = [Measurement(**values) for values in checkpoint.measurements]
    return checkpoint.origins, measured, checkpoint.seconds, checkpoint.networks_taken, checkpoint.environment


def _trained(
    learner: Learner,
    task: Task,
    known: list[str],
    checkpoints: EpochCheckpoints | None,
    progress: Progress,
) -> tuple[Network, bool]:
    """The network trained on the task: now, or before, by a run that shares it; and whether it was before."""
    cache = learner.cache
    if cache is None or not learner.trains(task, task.index):
        return learner.train(task, progress, checkpoints), False
    path = network_path(cache, learner, known)
    with cache.locked(path):
        tensors = cache.load(path)
        if tensors is not None:
            return learner.restored_network(tensors, task.train.shape), True
        network = learner.train(task, progress, checkpoints)
        cache.save(path, network.state_dict())
    return network, False


def network_path(cache: Cache, learner: Learner, tasks: list[str]) -> Path:
    """The cached network of this learner, trained up to the last of these tasks (their fingerprints)."""
    settings = identifying(learner.training_settings(len(tasks) - 1))
    return cache.path("network", (json.dumps(settings, sort_keys=True), *tasks))


def _result(
    learner: Learner,
    stream: Stream,
    measured: list[Measurement],
    seconds: dict[str, float],
    networks_taken: int,
    made_with: Mapping[str, str],
) -> Result:
    curve = [each.accuracy for each in measured]
    top5 = [each.accuracy_top5 for each in measured]
    matrix = [each.by_task for each in measured]
    heads = [each.head_accuracy for each in measured if each.head_accuracy is not None]
    ceilings = [each.ceiling for each in measured if each.ceiling is not None]
    stored = bool(ceilings)
    return Result(
        method=learner.name,
        dataset=stream.name,
        seed=learner.seed,
        classes_per_task=stream.classes_per_task,
        class_order=[stream.class_names[label] for label in stream.classes],
        classes_seen=[each.classes for each in measured],
        settings=learner.settings(),
        curve=curve,
        average_incremental_accuracy=average_incremental_accuracy(curve),
        curve_top5=top5,
        average_incremental_accuracy_top5=average_incremental_accuracy(top5),
        head_curve=heads or None,
        accuracy_matrix=matrix,
        forgetting=forgetting(matrix),
        omega=[each.omega for each in measured] if stored else None,
        omega_previous=[each.omega_previous for each in measured] if stored else None,
        omega_first=[each.omega_first for each in measured] if stored else None,
        ceiling_curve=ceilings or None,
        drift_gap=[ceiling - reached for ceiling, reached in zip(ceilings, curve, strict=True)] if stored else None,
        memory_bytes=learner.memory.nbytes,
        memory_mb=megabytes(learner.memory.nbytes),
        seconds=seconds,
        environment=dict(made_with),
        split=dict(stream.split),
        networks_taken=networks_taken,
    )
