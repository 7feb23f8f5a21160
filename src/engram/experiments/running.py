"""Running an experiment: a learner learns a stream, is measured after every task, and may be killed at any moment.

`Plan` names the experiment as a command line or a suite does; `run` takes a learner and a stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from engram import __version__, storage
from engram.data import DATASETS, Dataset, Stream, Task, split
from engram.errors import DataError, UsageError, unknown
from engram.experiments.folder import (
    FOREIGN,
    TAKEN,
    EventLog,
    FileEpochCheckpoints,
    Listener,
    RunFolder,
    RunProgress,
    RunState,
    environment,
    open_run,
)
from engram.experiments.measuring import Measurement, measure, origin_of
from engram.experiments.results import Result, result_of, summarise
from engram.methods import METHODS, Learner, fit_budget, make, override, setting_names
from engram.network import Cache, Network, choose_device, is_pretrained, parallel, threads_for
from engram.progress import SILENT, Progress
from engram.settings import unused, with_none
from engram.storage import machine_memory
from engram.text import printable

PRESETS = ("paper", "short")
UNREGISTERED = DATASETS["folder"]  # the defaults of data sets that are not in the registry
COPIES = 3  # of the stored images exist for a moment: themselves, and what is made of them to be saved
GIGABYTE = 2**30

# A pretrained network has features of about a thousand numbers: an MLP of 16 d would have 470 million weights.
PRETRAINED = {"adapter_width": 1024}


class RunArguments(TypedDict, total=False):
    """The arguments of `engram.run` beside the learner, the stream and the folder."""

    resume: bool
    cache: Cache | None
    listeners: Sequence[Listener]
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which method learns which stream, with which settings."""

    method: str = "features"
    preset: str = "short"
    settings: Mapping[str, Any] = field(default_factory=dict)  # these override the preset's
    classes_per_task: int | None = None  # None: the field's usual number for the data set
    first_task: int | None = None  # classes of the first task, if another number
    tasks: int | None = None  # None: all
    class_order: str | Sequence[int] = "seed"
    validation: float = 0.0
    budget: int | None = None  # bytes for everything stored, of all classes: chooses how much is stored
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", with_none(self.settings))
        if "seed" in self.settings:
            raise UsageError("The seed also determines the class order, so it is not a setting. Use --seed.")
        make(self.method, **self.settings)  # an unknown name is an error before any data is read

    def stream(self, dataset: Dataset) -> Stream:
        """The tasks."""
        stream = split(
            dataset,
            classes_per_task=self.classes_per_task if self.classes_per_task is not None else classes_per_task(dataset),
            first_task=self.first_task,
            class_order=self.class_order,
            seed=self.seed,
            validation=self.validation,
        )
        return stream if self.tasks is None else stream.first(self.tasks)

    def learner(self, dataset: Dataset, stream: Stream | None = None) -> Learner:
        """A new learner. Pass the stream if you have it: splitting a large data set takes a while."""
        return make(self.method, seed=self.seed, **override(self._settings(dataset), self.chosen(dataset, stream)))

    def chosen(self, dataset: Dataset, stream: Stream | None = None) -> dict[str, Any]:
        """The numbers of images and features, and the codec, that the budget allows; empty without a budget."""
        if self.budget is None:
            return {}
        learner, stream = make(self.method, **self._settings(dataset)), stream or self.stream(dataset)
        most = max(int(torch.bincount(task.train.labels).max()) for task in stream)
        return fit_budget(learner, self.settings, self.budget, len(stream.classes), stream.tasks[0].train, most)

    def _settings(self, dataset: Dataset) -> dict[str, Any]:
        asked = self.settings
        defaults = preset(self.preset, self.method, dataset, asked.get("objective"), asked.get("network"))
        return override(defaults, asked)

    def run(self, dataset: Dataset, out: Path | None = None, **options: Unpack[RunArguments]) -> Result:
        """Run the plan in the folder `out`; see `engram.run`."""
        stream = self.stream(dataset)
        return run(self.learner(dataset, stream), stream, out=out, **options)

    def run_seeds(self, seeds: int, dataset: Dataset, out: Path, **options: Unpack[RunArguments]) -> list[Result]:
        """Run this many seeds from `seed` up, each in a folder `out/seed-N`, and write `summary.json`."""
        plans = {out / f"seed-{seed}": self.with_seed(seed) for seed in range(self.seed, self.seed + seeds)}
        parallel.on_main(lambda: _refuse_another(out, plans, options.get("resume", False)))
        results = [plan.run(dataset, folder, **options) for folder, plan in plans.items()]
        parallel.on_main(lambda: storage.write_json(out / "summary.json", summarise(results)))
        return results

    def with_seed(self, seed: int) -> Plan:
        """The same plan with another seed."""
        return replace(self, seed=seed)


def preset(
    name: str, method: str, dataset: Dataset, objective: str | None = None, network: str | nn.Module | None = None
) -> dict[str, Any]:
    """The settings of this preset for a method on a data set, as flat names; only those that the method has.

    `network` is the one that the user chose, if any.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    entry, source = METHODS[method], DATASETS.get(dataset.name, UNREGISTERED)
    known = setting_names(method, objective)
    if "images" not in entry.keeps:
        known -= {"images_per_class"}  # the method stores images only where the user asks for them
    if "images_total" not in entry.settings:
        known -= {"images_total"}
    settings = {"expected_classes": len(dataset.class_names), **source.settings, **source.methods.get(method, {})}
    if source.crop is not None:
        settings["crop"] = int(source.crop * min(dataset.train.shape[:2]))
    if network is not None and is_pretrained(network):
        settings |= PRETRAINED
    by_objective = source.paper if name == "paper" else source.short
    settings |= {**by_objective.get("all", {}), **by_objective.get(objective or entry.objective, {})}
    return {setting: value for setting, value in settings.items() if setting in known}


def classes_per_task(dataset: Dataset) -> int:
    """The usual number for this data set; a fifth of the classes of others, or of a few chosen ones."""
    usual, classes = DATASETS.get(dataset.name, UNREGISTERED).classes_per_task, len(dataset.class_names)
    return usual if usual is not None and usual < classes else max(1, classes // 5)


def _refuse_another(out: Path, folders: Collection[Path], resume: bool) -> None:
    """Refuse a folder for several seeds that holds other files, other seeds, or runs that are not to be resumed."""
    found = [path.name for path in out.iterdir()] if out.is_dir() else []
    if foreign := [name for name in found if not re.fullmatch(r"seed-\d+|summary\.json|\..*", name)]:
        raise UsageError(FOREIGN.format(out, min(foreign)))
    if taken := [folder for folder in folders if not resume and folder.is_dir() and any(folder.iterdir())]:
        raise UsageError(TAKEN.format(taken[0]))
    summary = storage.read_json(out / "summary.json") if "summary.json" in found else {"seeds": []}
    if not isinstance(summary, dict) or not isinstance(summary.get("seeds"), list):
        raise UsageError(FOREIGN.format(out, "a summary.json that is not engram's"))
    if others := [seed for seed in summary["seeds"] if out / f"seed-{seed}" not in folders]:
        listed = ", ".join(map(str, others))
        raise UsageError(f"{out / 'summary.json'} also has the seeds {listed}. Include them, or choose another --out.")


def run(
    learner: Learner,
    stream: Stream,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    cache: Cache | None = None,
    listeners: Sequence[Listener] = (),
    progress: Progress = SILENT,
) -> Result:
    """Teach a new learner the stream task by task, and measure it after every task.

    With `out`, the run is saved in that folder; after a kill, `resume` continues it to exactly the same result. With
    `cache`, runs that differ only after training share their networks and features. `listeners` receive the events that
    `events.jsonl` in the folder records. Under torchrun every process calls this function and gets the same
    result; only rank 0 writes and reports progress and events.
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
            progress, listeners = SILENT, ()
        log = [EventLog(folder.path / "events.jsonl")] if folder is not None else []
        events = RunProgress(progress, [*log, *listeners])
        learner.cache = cache if learner.is_cacheable else None
        stack.enter_context(threads_for(stream.tasks[0].train.shape, learner.network))
        place = None if folder is None else str(folder.path)
        stack.enter_context(events.run(method=learner.name, dataset=stream.name, seed=learner.seed, folder=place))
        state = _learn(learner, stream, tasks, folder, events)
        return Result(
            **parallel.broadcast(lambda: _finish(folder, result_of(learner, stream, settings, state)).to_json())
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
    """Refuse a learner that is not new, and a stream that cannot be learned or measured."""
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


def class_counts(tasks: Sequence[Task]) -> Tensor:
    """How many training samples each class has in all of these tasks, (K,)."""
    labels = torch.cat([torch.empty(0, dtype=torch.int64), *(task.train.labels for task in tasks)])
    counts: Tensor = labels.unique(return_counts=True)[1]
    return counts


def _learn(
    learner: Learner, stream: Stream, fingerprints: list[str], folder: RunFolder | None, events: RunProgress
) -> RunState:
    """Learn the tasks that are left, each saved as soon as it is measured."""
    state = _restore(learner, folder)
    events.seconds = state.seconds
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
        settings = json.dumps(learner.training_settings(task.index), sort_keys=True)
        path = cache.path("network", (settings, *fingerprints))
        with cache.locked(path):
            if (tensors := cache.load(path)) is not None:
                state.networks_reused += 1
                return learner.restored_network(tensors, task.train.shape)
            network = learner.train(task, progress, checkpoints)
            cache.save(path, network.state_dict())
    if checkpoints is not None and checkpoints.seconds_before:
        state.seconds["train"] += checkpoints.seconds_before
    return network
