"""`Plan`: an experiment by names and numbers, as a command line or a suite gives it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import nn

from engram import storage
from engram.data import DATASETS, Dataset, Stream, split
from engram.errors import UsageError, unknown
from engram.experiments.checkpoint import FOREIGN, TAKEN
from engram.experiments.events import Listener
from engram.experiments.results import SCHEMA, Result
from engram.experiments.running import AfterTask, run
from engram.methods import METHODS, Learner, fit_budget, make, override, setting_names
from engram.network import Cache, is_pretrained, parallel
from engram.progress import Progress
from engram.settings import with_none

PRESETS = ("paper", "short")
OWN = DATASETS["folder"]  # stands for every data set that is not in the registry

# A pretrained network has features of about a thousand numbers: an MLP of 16 d would have 470 million weights.
PRETRAINED = {"adapter_width": 1024}


class RunOptions(TypedDict, total=False):
    """Options of `engram.run` beside the learner, the stream and the folder."""

    resume: bool
    cache: Cache | None
    listeners: Sequence[Listener]
    progress: Progress
    after_task: AfterTask | None


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

    @overload
    def run(self, dataset: Dataset, out: Path | None = None, **options: Unpack[RunOptions]) -> Result: ...

    @overload
    def run(
        self, dataset: Dataset, out: Path | None = None, *, seeds: int, **options: Unpack[RunOptions]
    ) -> list[Result]: ...

    def run(
        self, dataset: Dataset, out: Path | None = None, *, seeds: int | None = None, **options: Unpack[RunOptions]
    ) -> Result | list[Result]:
        """Run the plan in the folder `out`; see `engram.run`.

        With `seeds`, run so many seeds from `seed` up, each in its folder `seed-N` of `out`, and write `summary.json`.
        """
        if seeds is None:
            stream = self.stream(dataset)
            return run(self.learner(dataset, stream), stream, out=out, **options)
        plans = [self.with_seed(seed) for seed in range(self.seed, self.seed + seeds)]
        if out is None:
            return [plan.run(dataset, **options) for plan in plans]
        folders = [out / f"seed-{plan.seed}" for plan in plans]
        parallel.on_main(lambda: _refuse_another(out, folders, options.get("resume", False)))
        results = [plan.run(dataset, folder, **options) for plan, folder in zip(plans, folders, strict=True)]
        parallel.on_main(lambda: storage.write_json(out / "summary.json", summarise(results)))
        return results

    def with_seed(self, seed: int) -> Plan:
        """The same plan with another seed."""
        return replace(self, seed=seed)


def preset(
    name: str, method: str, dataset: Dataset, objective: str | None = None, network: str | nn.Module | None = None
) -> dict[str, Any]:
    """The settings of this preset for a method on a data set, as flat names; only those that the method has.

    `network` is the one that was asked for, if any.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    entry, source = METHODS[method], DATASETS.get(dataset.name, OWN)
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
    usual, classes = DATASETS.get(dataset.name, OWN).classes_per_task, len(dataset.class_names)
    return usual if usual is not None and usual < classes else max(1, classes // 5)


def _refuse_another(out: Path, folders: Sequence[Path], resume: bool) -> None:
    """Refuse, before anything is run, a folder for several seeds that holds anything else."""
    found = [path.name for path in out.iterdir()] if out.is_dir() else []
    if foreign := [name for name in found if not re.fullmatch(r"seed-\d+|summary\.json|\..*", name)]:
        raise UsageError(FOREIGN.format(out, min(foreign)))
    for folder in folders:
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise UsageError(TAKEN.format(folder))
    summary = storage.read_json(out / "summary.json") if "summary.json" in found else {"seeds": []}
    if not isinstance(summary, dict) or not isinstance(summary.get("seeds"), list):
        raise UsageError(FOREIGN.format(out, "a summary.json that is not engram's"))
    if others := [seed for seed in summary["seeds"] if out / f"seed-{seed}" not in folders]:
        raise UsageError(
            f"{out / 'summary.json'} also has the seeds {', '.join(map(str, others))}. Include them, or choose another "
            "--out."
        )


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds of one plan."""
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
    return summary
