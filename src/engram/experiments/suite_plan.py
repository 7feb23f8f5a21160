"""The plan of a suite: its runs, each in a folder named after what it runs, and what they take."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engram import storage
from engram.data import Dataset, DecodeOptions, Stream, load
from engram.errors import UsageError, nearest, unknown
from engram.experiments.folder import RunFolder
from engram.experiments.results import SCHEMA, Result, SuiteFile, SuiteRow
from engram.experiments.running import Plan, class_counts, classes_per_task, identifying, preset
from engram.experiments.suites import SUITES, DataFacts, Variant
from engram.methods import BudgetError, Costs, Learner, make, measure_costs, setting_names
from engram.network.cache import MAX_BYTES
from engram.progress import SILENT, Progress

IMAGES_PER_CLASS = 20  # the paper's, where a preset has no number
COST_SETTINGS = ("network", "head", "batch_size", "tuned_weights", "adapter", "adapter_width", "adapter_depth")


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """What to run: a suite on a data set."""

    suite: str
    dataset: str
    data: Path | None = None
    decoding: DecodeOptions = field(default_factory=DecodeOptions)
    out: Path | None = None  # suites in one folder share runs and networks; None: see `folder`
    preset: str = "short"
    seeds: int = 1  # how many, from `seed` up
    seed: int = 0
    methods: tuple[str, ...] = ()  # only these; empty: all
    tasks: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # for every run whose method has them

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise unknown("suite", self.suite, SUITES, "engram suites")
        for method in self.methods:
            make(method)  # an unknown name is an error before any data is read

    @property
    def folder(self) -> Path:
        """The folder of all suites of a data set and preset."""
        return self.out or Path("runs") / f"{self.dataset}-{self.preset}"

    def load(self, progress: Progress = SILENT) -> Dataset:
        """The data set."""
        return load(self.dataset, self.data, progress, self.decoding)


@dataclass(frozen=True)
class Estimate:
    """What one run will take, task by task, and the bytes of its memory at the end."""

    training: tuple[float, ...]  # seconds
    images: tuple[int, ...]  # that are extracted, also to measure: runs of one training share equal ones
    extracting: tuple[float, ...]  # seconds
    adapting: tuple[float, ...]  # seconds
    memory_bytes: int
    network_bytes: int  # of one network; a run's checkpoint has one, and the suite's cache has one per training
    features_bytes: int  # of everything extracted


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite."""

    label: str
    plan: Plan = field(hash=False)
    folder: Path
    first_training: str  # runs with the same value train the same network on the first task
    training: str  # ... and on all tasks

    @property
    def done(self) -> bool:
        """Whether its result is there."""
        return (self.folder / "result.json").exists()

    def networks(self, tasks: int) -> list[tuple[str, int]]:
        """Keys of the networks of its first tasks; equal ones are trained once."""
        return [(self.training if task else self.first_training, task) for task in range(tasks)]


@dataclass(frozen=True)
class PlannedVariant:
    """A variant, its runs, and an estimate of what they take."""

    variant: Variant
    runs: Sequence[SuiteRun]
    estimate: Estimate  # of one run that shares nothing
    seconds: float  # for the tasks left in all its runs; what runs share counts for the first of them

    @property
    def done(self) -> int:
        """How many of its runs are done."""
        return sum(run.done for run in self.runs)

    def results(self) -> list[Result]:
        """The results of the runs that are done."""
        return [Result.load(run.folder / "result.json") for run in self.runs if run.done]


@dataclass(frozen=True)
class SuitePlan:
    """Everything that a suite runs on one data set."""

    options: SuiteOptions
    rows: Sequence[PlannedVariant]
    seconds_left: Mapping[Path, float]  # by run, an estimate
    disk_bytes: int  # an estimate of what the runs left will write, the suite's cache included

    @property
    def runs_left(self) -> list[SuiteRun]:
        """The runs that are not done, in the order to run them."""
        return [run for run in scheduled(run for row in self.rows for run in row.runs) if not run.done]

    @property
    def memory_bytes(self) -> int:
        """The most that a run which is left stores of old classes."""
        return max((row.estimate.memory_bytes for row in self.rows if row.done < len(row.runs)), default=0)

    @property
    def seconds(self) -> float:
        """An estimate for everything left, one run after another."""
        return sum(self.seconds_left.values())

    def start(self, command: str, *, resume: bool) -> None:
        """Write the suite's file, for reports and for resuming. An existing one needs `resume` and the same runs."""
        folder, suite = self.options.folder, SUITES[self.options.suite]
        path = folder / f"suite-{self.options.suite}.json"
        rows = [
            SuiteRow(each.label, each.series, each.value, [str(run.folder.relative_to(folder)) for run in row.runs])
            for row in self.rows
            for each in [row.variant]
        ]
        storage.make_folder(folder)
        if path.exists():
            if not resume:
                raise UsageError(f"{path} exists already. Continue the suite with --resume, or choose another --out.")
            before = {run for row in storage.read_json(path)["variants"] for run in row["runs"]}
            if before - {run for row in rows for run in row.runs}:
                raise UsageError(f"{path} has runs that this suite does not. Repeat its command, or add seeds to it.")
        written = SuiteFile(
            schema=SCHEMA,
            suite=self.options.suite,
            dataset=self.options.dataset,
            preset=self.options.preset,
            summary=suite.summary,
            finding=suite.finding,
            varies=suite.varies,
            command=command,
            variants=rows,
        )
        storage.write_json(path, asdict(written))


def plan_suite(options: SuiteOptions, dataset: Dataset) -> SuitePlan:
    """Plan a suite and estimate how long it takes, from a few training steps timed now."""
    costs: dict[tuple[object, ...], Costs] = {}  # of learners that differ in nothing that takes time
    members: list[tuple[Variant, list[SuiteRun], Estimate]] = []
    for variant in variants(options, dataset):
        runs = runs_of(variant, options, dataset)
        stream = _stream(runs[0].plan, dataset)
        learner = runs[0].plan.learner(dataset, stream)
        settings = learner.resolved_settings(dataset.train)
        trains = any(learner.trains(task, task.index) for task in stream)
        kind = (trains, *(settings.get(name) for name in COST_SETTINGS))
        if kind not in costs:
            costs[kind] = measure_costs(learner, dataset.train, len(dataset.class_names), trains=trains)
        members.append((variant, runs, estimate(learner, stream, costs[kind])))
    left, disk_bytes = _left({run: one for _, runs, one in members for run in runs})
    uncounted = dict(left)  # a run that two variants have in common counts for the first
    rows = [
        PlannedVariant(variant, runs, one, sum(uncounted.pop(run.folder, 0.0) for run in runs))
        for variant, runs, one in members
    ]
    return SuitePlan(options, rows, left, disk_bytes)


def estimate(learner: Learner, stream: Stream, costs: Costs) -> Estimate:
    """What learning a stream will take with these costs, nothing shared."""
    works, images = [], []
    for task in stream:
        before, after = class_counts(stream.tasks[: task.index]), class_counts(stream.tasks[: task.index + 1])
        decided = learner.decided(task, task.index)
        tunes = decided is None or decided.tunes  # a trial trains for about as long as what it may lead to
        exemplars = learner.stored_images(before) if task.index else 0
        works.append(learner.work(len(task.train) + exemplars, task.index, tunes=tunes))
        tested = sum(len(each.test) for each in stream.tasks[: task.index + 1])
        images.append(works[-1].extracted + tested + learner.stored_features(after))  # ω needs their images
    network = learner.initial_network(stream.tasks[0].train.select(torch.arange(1)))
    return Estimate(
        training=tuple(costs.training(work) for work in works),
        images=tuple(images),
        extracting=tuple(each * costs.extracted for each in images),
        adapting=tuple(work.adapter_steps * costs.adapter_step for work in works),
        memory_bytes=learner.memory_bytes(class_counts(stream.tasks), stream.tasks[0].train),
        network_bytes=sum(tensor.nbytes for tensor in network.state_dict().values()),
        features_bytes=4 * network.dimension * sum(images),
    )


def _left(estimates: Mapping[SuiteRun, Estimate]) -> tuple[dict[Path, float], int]:
    """Seconds for each run that is not done, and bytes on disk for all of them.

    What is shared counts for the first run that needs it.
    """
    found = {run.folder: one for run, one in estimates.items()}
    runs = {run: found[run.folder] for run in scheduled(estimates)}
    learned = {run: len(one.training) if run.done else RunFolder(run.folder).tasks_done for run, one in runs.items()}
    trained = {network for run in runs for network in run.networks(learned[run])}
    extracted = {(run.training, one.images) for run, one in runs.items() if run.done}
    left: dict[Path, float] = {}
    disk_bytes = features_bytes = 0
    for run, one in runs.items():
        if run.done:
            continue
        networks, extracts = run.networks(len(one.training)), (run.training, one.images) not in extracted
        left[run.folder] = sum(
            one.adapting[task] + (network not in trained) * one.training[task] + extracts * one.extracting[task]
            for task, network in enumerate(networks)
            if task >= learned[run]
        )
        disk_bytes += one.memory_bytes + one.network_bytes * (1 + len({*networks} - trained))
        features_bytes += one.features_bytes if extracts else 0
        trained.update(networks)
        extracted.add((run.training, one.images))
    return left, disk_bytes + min(features_bytes, MAX_BYTES)


def scheduled(runs: Iterable[SuiteRun]) -> list[SuiteRun]:
    """Each run once; the first run of every shared training before any second one, which then need not wait for it."""
    turns: dict[str, int] = {}
    order = []
    for run in {run.folder: run for run in runs}.values():
        turns[run.training] = turns.get(run.training, 0) + 1
        order.append((turns[run.training], run))
    return [run for _, run in sorted(order, key=lambda pair: pair[0])]


def data_facts(dataset: Dataset, preset_name: str, validation: float = 0.0) -> DataFacts:
    """What suites need to know about a data set; `validation` is the share that is held out."""
    counts = torch.bincount(dataset.train.labels)
    fewest = int(counts[counts > 0].min())
    fewest = max(1, fewest - max(1, round(validation * fewest))) if validation else fewest
    features, images, ours = (preset(preset_name, method, dataset) for method in ("features", "gamma-icarl", "engram"))
    return DataFacts(
        classes=len(dataset.train.classes()),
        per_class=fewest,
        sample_bytes=dataset.train.sample_bytes,
        classes_per_task=classes_per_task(dataset),
        features_per_class=min(fewest, features.get("features_per_class", 250)),
        images_per_class=min(fewest, images.get("images_per_class", IMAGES_PER_CLASS)),
        full=preset_name == "paper",
        rotates="rotation_labels" in ours,
    )


def variants(options: SuiteOptions, dataset: Dataset) -> list[Variant]:
    """The variants of the suite on this data set, for the chosen methods."""
    suite = SUITES[options.suite]
    found = list(suite.variants(data_facts(dataset, options.preset, suite.validation)))
    known = {variant.method for variant in found}
    for method in options.methods:
        if method not in known:
            raise UsageError(f"The suite '{options.suite}' has no method '{method}'. {nearest(method, known)}")
    wanted = [variant for variant in found if not options.methods or variant.method in options.methods]
    chosen = _affordable(wanted, options, dataset)
    if not chosen:
        raise UsageError(
            f"{dataset.name} has too few classes for the suite '{options.suite}': there is nothing to run."
        )
    names = set().union(*(_setting_names(variant, options) for variant in chosen))
    for name in options.settings:
        if name not in names:
            raise UsageError(f"No method of the suite '{options.suite}' has a setting '{name}'. {nearest(name, names)}")
    return chosen


def _setting_names(variant: Variant, options: SuiteOptions) -> set[str]:
    return {"objective", *setting_names(variant.method, options.settings.get("objective"))}


def _affordable(found: Sequence[Variant], options: SuiteOptions, dataset: Dataset) -> list[Variant]:
    """Without variants whose budget holds less than one of each class, or no more than a smaller one of the series."""
    most = int(torch.bincount(dataset.train.labels).max())
    limits = {"features_per_class": most, "images_per_class": most, "images_total": len(dataset.train)}
    last: dict[str, object] = {}
    affordable = []
    for variant in found:
        try:
            plan = _plan(variant, options, dataset)
            chosen = plan.chosen(dataset, _stream(plan, dataset)) if variant.budget is not None else {}
        except BudgetError:
            continue
        stored = {name: min(value, limits[name]) if name in limits else value for name, value in chosen.items()}
        if variant.budget is None or last.get(variant.series) != stored:
            affordable.append(variant)
        last[variant.series] = stored
    return affordable


def runs_of(variant: Variant, options: SuiteOptions, dataset: Dataset) -> list[SuiteRun]:
    """The runs of a variant, one per seed."""
    if chosen := options.settings.keys() & variant.settings.keys():
        raise UsageError(f"The suite '{options.suite}' chooses {' and '.join(sorted(chosen))} itself. Leave out --set.")
    plan = _plan(variant, options, dataset)
    plans = [plan.with_seed(seed) for seed in range(options.seed, options.seed + options.seeds)]
    return [_run(variant.label, each, options.folder, dataset) for each in plans]


def _plan(variant: Variant, options: SuiteOptions, dataset: Dataset) -> Plan:
    names = _setting_names(variant, options)
    asked = {name: value for name, value in options.settings.items() if name in names}
    plan = Plan(
        method=variant.method,
        preset=options.preset,
        settings={**asked, **variant.settings},
        classes_per_task=variant.classes_per_task,
        first_task=variant.first_task,
        tasks=options.tasks,
        validation=SUITES[options.suite].validation,
    )
    if variant.budget is None:
        return plan
    return replace(plan, budget=variant.budget * len(_stream(plan, dataset).classes))


def _stream(plan: Plan, dataset: Dataset) -> Stream:
    return _split(dataset, plan.classes_per_task, plan.tasks, plan.validation, plan.seed)


@functools.lru_cache(maxsize=8)  # it takes seconds on a large data set, and most runs of a suite have the same stream
def _split(dataset: Dataset, size: int | None, tasks: int | None, validation: float, seed: int) -> Stream:
    return Plan(classes_per_task=size, tasks=tasks, validation=validation, seed=seed).stream(dataset)


def _run(label: str, plan: Plan, folder: Path, dataset: Dataset) -> SuiteRun:
    tasks = _stream(plan, dataset)
    learner = plan.learner(dataset, tasks)
    stream = {
        "dataset": dataset.name,
        "data": dataset.identity,
        "classes_per_task": plan.classes_per_task or classes_per_task(dataset),
        "first_task": plan.first_task,
        "tasks": len(tasks),
        "validation": plan.validation,
    }

    def digest(*identity: object) -> str:
        return hashlib.sha256(json.dumps([*identity, stream], sort_keys=True).encode()).hexdigest()[:10]

    settings = {**identifying(learner, learner.resolved_settings(dataset.train)), "seed": None}
    method = None if learner.shares_training else plan.method
    trainings = (digest(learner.training_settings(task), method) for task in (0, 1))
    name = f"{plan.method}-{digest(plan.method, settings)}"
    return SuiteRun(label, plan, folder / "runs" / name / f"seed-{plan.seed}", *trainings)
