"""`Plan`: an experiment by names and numbers, as a command line or a suite gives it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engram.data import Dataset, Stream, split
from engram.errors import UsageError
from engram.experiments.checkpoint import TAKEN
from engram.experiments.events import Listener
from engram.experiments.presets import classes_per_task, preset
from engram.experiments.results import SCHEMA, Result
from engram.experiments.running import AfterTask, run
from engram.methods import Learner, fit_budget, make, override
from engram.network import Cache, parallel
from engram.progress import SILENT, Progress
from engram.settings import spoken
from engram.storage import make_folder, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which method learns which stream, with which settings."""

    method: str = "features"
    preset: str = "short"
    settings: Mapping[str, Any] = field(default_factory=dict)  # beyond the preset's
    classes_per_task: int | None = None  # None: the field's usual number for the data set
    first_task: int | None = None
    tasks: int | None = None  # None: all
    class_order: str | Sequence[int] = "seed"
    validation: float = 0.0
    budget: int | None = None  # bytes that may be kept for all classes: how much of what is chosen by it
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", spoken(self.settings))
        if "seed" in self.settings:
            raise UsageError("The seed is no setting of a method alone: the order of classes goes by it. Give --seed.")

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
        """The learner, new. Who has the stream already gives it: to cut a large data set takes a while."""
        return make(self.method, seed=self.seed, **override(self._settings(dataset), self.chosen(dataset, stream)))

    def chosen(self, dataset: Dataset, stream: Stream | None = None) -> dict[str, Any]:
        """How many images and features the budget allows, and by which codec; without one, nothing is chosen."""
        if self.budget is None:
            return {}
        learner, stream = make(self.method, **self._settings(dataset)), stream or self.stream(dataset)
        most = max(int(torch.bincount(task.train.labels).max()) for task in stream)
        return fit_budget(learner, self.settings, self.budget, len(stream.classes), stream.tasks[0].train, most)

    def _settings(self, dataset: Dataset) -> dict[str, Any]:
        asked = self.settings
        usual = preset(self.preset, self.method, dataset, asked.get("objective"), asked.get("network"))
        return override(usual, asked)

    def run(
        self,
        dataset: Dataset,
        out: Path | None = None,
        *,
        resume: bool = False,
        trainings: Cache | None = None,
        listeners: Sequence[Listener] = (),
        progress: Progress = SILENT,
        after_task: AfterTask | None = None,
    ) -> Result:
        """Carry it out, in the folder `out`; see `engram.run`."""
        stream = self.stream(dataset)
        return run(
            self.learner(dataset, stream),
            stream,
            out=out,
            resume=resume,
            trainings=trainings,
            listeners=listeners,
            progress=progress,
            after_task=after_task,
        )

    def with_seed(self, seed: int) -> Plan:
        """The same with another seed."""
        return replace(self, seed=seed)


def seed_folders(seeds: Sequence[int], folder: Path, *, resume: bool) -> dict[int, Path]:
    """The folder of each seed's run inside `folder`, which is refused, before anything is run, if it is another's."""
    places = {seed: folder / f"seed-{seed}" for seed in seeds}
    parallel.on_main(lambda: _refuse_another(folder, places, resume) if folder.is_dir() else None)
    return places


def _refuse_another(folder: Path, places: Mapping[int, Path], resume: bool) -> None:
    foreign = [each.name for each in folder.iterdir() if not re.fullmatch(r"seed-\d+|summary\.json|\..*", each.name)]
    if foreign:
        raise UsageError(f"{folder} holds something else ({min(foreign)}). Choose an empty or new folder.")
    for place in places.values():
        if not resume and place.is_dir() and any(place.iterdir()):
            raise UsageError(TAKEN.format(place))
    summary = folder / "summary.json"
    known = read_json(summary) if summary.exists() else {"seeds": []}
    if not isinstance(known, dict) or not isinstance(known.get("seeds"), list):
        raise UsageError(
            f"{folder} holds something else (a summary.json not of engram). Choose an empty or new folder."
        )
    if others := sorted(set(known["seeds"]) - set(places)):
        raise UsageError(
            f"{summary} is of seeds that are not asked for ({', '.join(map(str, others))}). Ask for them too, or "
            "choose another --out."
        )


def summarise(results: Sequence[Result], out: Path | None = None) -> dict[str, Any]:
    """Mean and standard deviation over the seeds of one plan; kept as `summary.json` in the folder `out`."""
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "method": results[0].method,
        "dataset": results[0].dataset,
        "seeds": [result.seed for result in results],
    }
    for name in ("average_incremental_accuracy", "average_incremental_accuracy_top5", "forgetting", "memory_mb"):
        values = [float(getattr(result, name)) for result in results]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {"mean": statistics.fmean(values), "deviation": deviation, "values": values}
    summary["curve"] = [statistics.fmean(points) for points in zip(*(each.curve for each in results), strict=True)]
    if out is not None:
        parallel.on_main(lambda: _write_summary(out, summary))
    return summary


def _write_summary(out: Path, summary: dict[str, Any]) -> None:
    make_folder(out)
    write_json(out / "summary.json", summary)
