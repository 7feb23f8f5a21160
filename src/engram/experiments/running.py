"""Running an experiment: a learner learns a stream, is measured after every task, and may be killed at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram import __version__, storage
from engram.data import Stream, Task
from engram.errors import DataError, UsageError
from engram.experiments.checkpoint import FileEpochCheckpoints, RunFolder, RunState, environment, open_run
from engram.experiments.events import EventLog, Listener, RunProgress
from engram.experiments.measuring import Measurement, average_incremental_accuracy, forgetting, measure, origin_of
from engram.experiments.results import Result
from engram.features import MEGABYTE
from engram.methods import Learner
from engram.network import Cache, Network, choose_device, parallel, threads_for
from engram.progress import SILENT, Progress
from engram.settings import unused
from engram.text import printable

# (task, measurement, seconds by phase so far; empty for a task that was done before the run was resumed)
AfterTask = Callable[[int, Measurement, dict[str, float]], None]

COPIES = 3  # of the stored images exist for a moment: themselves, and what is made of them to be saved
GIGABYTE = 2**30


def run(
    learner: Learner,
    stream: Stream,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    cache: Cache | None = None,
    listeners: Sequence[Listener] = (),
    progress: Progress = SILENT,
    after_task: AfterTask | None = None,
) -> Result:
    """Teach a new learner the stream task by task, and measure it after every task.

    With `out`, the run is saved in that folder; after a kill, `resume` continues it to exactly the same result. With
    `cache`, runs that differ only after training share their networks and features. `listeners` receive the events that
    `events.jsonl` in the folder records. Under torchrun every process calls this function and gets the same
    result; only rank 0 writes, reports progress and calls `after_task`.
    """
    with parallel.process_group(learner.device), ExitStack() as stack:
        _check(learner, stream)
        settings = learner.resolved_settings(stream.tasks[0].train)
        tasks = stream.fingerprints()
        own = identifying(learner, settings)
        identity = {"method": learner.name, "dataset": stream.name, "settings": own, "tasks": tasks}
        parallel.check_same([__version__, identity], "the data or the settings")
        folder = parallel.on_main(
            lambda: None if out is None else stack.enter_context(open_run(Path(out), identity, resume=resume))
        )
        if not parallel.is_main():
            progress, listeners, after_task = SILENT, (), None
        log = [EventLog(folder.path / "events.jsonl")] if folder is not None else []
        events = RunProgress(progress, [*log, *listeners])
        learner.cache = cache if learner.is_cacheable else None
        stack.enter_context(threads_for(stream.tasks[0].train.shape, learner.network))
        place = None if folder is None else str(folder.path)
        stack.enter_context(events.run(method=learner.name, dataset=stream.name, seed=learner.seed, folder=place))
        state = _learn(learner, stream, tasks, folder, events, after_task)
        return Result(
            **parallel.broadcast(lambda: _finish(folder, _result(learner, stream, settings, state)).to_json())
        )


def _finish(folder: RunFolder | None, result: Result) -> Result:
    """Write the result; that of a run that was complete before stays as it is."""
    if folder is not None and folder.result.exists():
        return Result.load(folder.result)
    if folder is not None:
        folder.tidy()
        result.save(folder.result)
    return result


def identifying(learner: Learner, settings: dict[str, Any]) -> dict[str, Any]:
    """The resolved settings that identify a run: those with an effect, and the content of a file instead of its path.

    A new classifier, codec or adapter therefore leaves the identity of runs that do not use it as it was.
    """
    ignored = {"device", *unused(learner)}
    own = {name: value for name, value in settings.items() if name not in ignored}
    if own["weights"] is not None:
        try:
            own["weights"] = storage.checksum(Path(own["weights"]))
        except OSError as error:
            raise DataError(f"The weights {printable(own['weights'])} cannot be read: {error.strerror}.") from error
    return own


def _check(learner: Learner, stream: Stream) -> None:
    """Refuse, before anything is learned, what cannot be learned or measured."""
    if learner.tasks_:
        raise UsageError("run() needs a learner that has not learned anything yet. Make a new one.")
    learner.check(len(stream.classes))
    for task in stream:
        if not len(task.test):
            names = [stream.class_names[label] for label in task.classes]
            listed = ", ".join([*names[:3], *(["…"] if names[3:] else [])])
            raise DataError(
                f"Task {task.index + 1} ({listed}) has no test samples, so accuracy cannot be measured on it. Give its "
                "classes more samples, or leave them out."
            )
    _check_memory(learner, stream)


def _check_memory(learner: Learner, stream: Stream) -> None:
    """Refuse a codec that does not suit the network, and more images than this machine has memory for."""
    counts, samples = class_counts(stream.tasks), stream.tasks[0].train
    learner.memory_bytes(counts, samples)
    images, memory = learner.stored_images(counts), machine_memory()
    if COPIES * images * samples.sample_bytes > memory:
        raise UsageError(
            f"The method '{learner.name}' would store {images:,} images of {samples.sample_bytes:,} bytes, and "
            f"{COPIES} copies of them while they are saved; this machine has {memory / GIGABYTE:,.1f} GB of memory. "
            "Store fewer, make them smaller with --image-size, or take fewer --tasks."
        )


def machine_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def class_counts(tasks: Sequence[Task]) -> Tensor:
    """How many training samples each class has in all of these tasks, (K,)."""
    if not tasks:
        return torch.empty(0, dtype=torch.int64)
    _, counts = torch.cat([task.train.labels for task in tasks]).unique(return_counts=True)
    return counts  # type: ignore[no-any-return]


def _learn(
    learner: Learner,
    stream: Stream,
    fingerprints: list[str],
    folder: RunFolder | None,
    events: RunProgress,
    after_task: AfterTask | None,
) -> RunState:
    """Learn the tasks that are left, each saved as soon as it is measured."""
    state = _restore(learner, folder)
    events.seconds = state.seconds
    after_task = after_task or (lambda *_: None)
    for done, measurement in enumerate(state.measurements):
        after_task(done, measurement, {})
    with events.inner.phase("run", len(stream)) as phase:
        phase.advance(learner.tasks_)
        for task in stream.tasks[learner.tasks_ :]:
            events.task = task.index + 1
            network = _train(learner, task, fingerprints[: task.index + 1], folder, state, events)
            sources = learner.absorb(task, network, events)
            state.origins = origin_of(sources.features, task.index, state.origins)
            measurement = measure(learner, stream, task.index, state.origins, events)
            state.measurements.append(measurement)
            if folder is not None:
                folder.save(learner, state)
            events.log("task", task=task.index + 1, **asdict(measurement))
            phase.advance()
            after_task(task.index, measurement, state.seconds)
    return state


def _restore(learner: Learner, folder: RunFolder | None) -> RunState:
    """Bring the learner to the last checkpoint of the folder, if there is one."""
    saved = parallel.broadcast(lambda: None if folder is None else folder.load())
    state = RunState()
    if saved is not None:
        learner.restore(saved.pop("learner"))
        measurements = [Measurement(**each) for each in saved.pop("measurements")]
        state = RunState(measurements=measurements, **saved)
    state.environment = environment(str(choose_device(learner.device)), state.environment)
    return state


def _train(
    learner: Learner,
    task: Task,
    fingerprints: list[str],
    folder: RunFolder | None,
    state: RunState,
    progress: Progress,
) -> Network:
    """The network trained on the task: now, or earlier by a run that shares it."""
    checkpoints = None if folder is None else FileEpochCheckpoints(folder.training, task.index)
    cache = learner.cache
    if cache is None or not learner.trains(task, task.index):
        network = learner.train(task, progress, checkpoints)
    else:
        path = network_path(cache, learner, fingerprints)
        with cache.locked(path):
            if (tensors := cache.load(path)) is not None:
                state.networks_reused += 1
                return learner.restored_network(tensors, task.train.shape)
            network = learner.train(task, progress, checkpoints)
            cache.save(path, network.state_dict())
    if checkpoints is not None and checkpoints.seconds_before:
        state.seconds["train"] += checkpoints.seconds_before
    return network


def network_path(cache: Cache, learner: Learner, tasks: list[str]) -> Path:
    """The cached network of this learner, trained up to the last of these tasks (their fingerprints)."""
    settings = learner.training_settings(len(tasks) - 1)
    return cache.path("network", (json.dumps(settings, sort_keys=True), *tasks))


def _result(learner: Learner, stream: Stream, settings: dict[str, Any], state: RunState) -> Result:
    def column(name: str) -> list[Any]:
        return [getattr(each, name) for each in state.measurements]

    curve, top5, matrix = column("accuracy"), column("accuracy_top5"), column("by_task")
    stored = state.measurements[-1].omega is not None  # features
    ceilings = column("ceiling") if state.measurements[-1].ceiling is not None else None  # features or statistics
    return Result(
        method=learner.name,
        dataset=stream.name,
        seed=learner.seed,
        classes_per_task=stream.classes_per_task,
        class_order=[stream.class_names[label] for label in stream.classes],
        classes_seen=column("classes"),
        settings=settings,
        curve=curve,
        average_incremental_accuracy=average_incremental_accuracy(curve),
        curve_top5=top5,
        average_incremental_accuracy_top5=average_incremental_accuracy(top5),
        head_curve=column("head_accuracy") if state.measurements[-1].head_accuracy is not None else None,
        accuracy_matrix=matrix,
        forgetting=forgetting(matrix),
        omega=column("omega") if stored else None,
        omega_previous=column("omega_previous") if stored else None,
        omega_first=column("omega_first") if stored else None,
        ceiling_curve=ceilings,
        drift_gap=[ceiling - reached for ceiling, reached in zip(ceilings, curve, strict=True)] if ceilings else None,
        memory_bytes=learner.memory.nbytes,
        memory_mb=learner.memory.nbytes / MEGABYTE,
        seconds=state.seconds,
        environment=state.environment,
        split=dict(stream.split),
        networks_reused=state.networks_reused,
    )
