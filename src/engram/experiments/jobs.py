"""A suite as jobs: one run each, in a folder named by what is run, so that no work is done twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engram import storage
from engram.data import Dataset
from engram.errors import UsageError, nearest, unknown
from engram.experiments.identity import content_of_weights, identifying
from engram.experiments.plan import Plan
from engram.experiments.presets import classes_per_task, preset
from engram.experiments.suites import SUITES, Facts, Variant
from engram.methods import BudgetError, make, setting_names

SCHEMA = 1
LIKE_PAPER = 20  # images per class, where a preset does not say


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """What a person asks of a suite."""

    suite: str
    dataset: str
    preset: str = "short"
    seeds: int = 1  # so many, from
    seed: int = 0  # this one up
    methods: tuple[str, ...] = ()  # only these; all where empty
    tasks: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # for every run whose method has them


@dataclass(frozen=True)
class Job:
    """One run of a suite."""

    label: str
    plan: Plan
    folder: str  # within the suites' folder
    begins: str  # jobs with the same train the same network on their first task
    shares: str  # ... and on all


def facts(dataset: Dataset, preset_name: str, validation: float = 0.0) -> Facts:
    """What suites must know of a data set, a part of which may be held out."""
    counts = torch.bincount(dataset.train.labels)
    fewest = int(counts[counts > 0].min())
    fewest = max(1, fewest - max(1, round(validation * fewest))) if validation else fewest
    features, images = (preset(preset_name, method, dataset) for method in ("features", "gamma-icarl"))
    return Facts(
        classes=len(dataset.train.classes()),
        per_class=fewest,
        sample_bytes=dataset.train.sample_bytes,
        classes_per_task=classes_per_task(dataset),
        features_per_class=min(fewest, features.get("features_per_class", 250)),
        images_per_class=min(fewest, images.get("images_per_class", LIKE_PAPER)),
        whole=preset_name == "paper",
    )


def variants(order: SuiteOptions, dataset: Dataset) -> list[Variant]:
    """The variants of a suite on this data set; only those of the methods asked for."""
    found = list(SUITES[order.suite].variants(facts(dataset, order.preset, SUITES[order.suite].validation)))
    known = {variant.method for variant in found}
    for method in order.methods:
        if method not in known:
            raise UsageError(f"The suite '{order.suite}' has no method '{method}'. {nearest(method, known)}")
    wanted = [variant for variant in found if not order.methods or variant.method in order.methods]
    chosen = _affordable(wanted, order, dataset)
    if not chosen:
        raise UsageError(f"{dataset.name} has too few classes for the suite '{order.suite}': there is nothing to run.")
    names = set().union(*(_names(variant, order) for variant in chosen))
    for name in order.settings:
        if name not in names:
            raise UsageError(f"No method of the suite '{order.suite}' has a setting '{name}'. {nearest(name, names)}")
    return chosen


def _names(variant: Variant, order: SuiteOptions) -> set[str]:
    return {"objective", *setting_names(variant.method, order.settings.get("objective"))}


def _affordable(variants: Sequence[Variant], order: SuiteOptions, dataset: Dataset) -> list[Variant]:
    """Those whose budget, if any, holds something of every class, and more than the one before it in the series."""
    most = int(torch.bincount(dataset.train.labels).max())
    limits = {"features_per_class": most, "images_per_class": most, "images_total": len(dataset.train)}
    last: dict[str, object] = {}
    affordable = []
    for variant in variants:
        if variant.budget is None:
            affordable.append(variant)
            continue
        try:
            chosen = _plan(variant, order, dataset).chosen(dataset)
        except BudgetError:
            continue
        held = {name: min(value, limits[name]) if name in limits else value for name, value in chosen.items()}
        if last.get(variant.series) != held:
            affordable.append(variant)
        last[variant.series] = held
    return affordable


def jobs_of(variant: Variant, order: SuiteOptions, dataset: Dataset) -> list[Job]:
    """A variant's runs, one per seed."""
    if chosen := order.settings.keys() & variant.settings.keys():
        raise UsageError(f"The suite '{order.suite}' chooses {' and '.join(sorted(chosen))} itself. Leave out --set.")
    plan = _plan(variant, order, dataset)
    return [_job(variant.label, plan.with_seed(seed), dataset) for seed in range(order.seed, order.seed + order.seeds)]


def _plan(variant: Variant, order: SuiteOptions, dataset: Dataset) -> Plan:
    names = _names(variant, order)
    asked = {name: value for name, value in order.settings.items() if name in names}
    plan = Plan(
        method=variant.method,
        preset=order.preset,
        settings={**asked, **variant.settings},
        classes_per_task=variant.classes_per_task,
        tasks=order.tasks,
        validation=SUITES[order.suite].validation,
    )
    if variant.budget is None:
        return plan
    return replace(plan, budget=variant.budget * len(plan.stream(dataset).classes))


def _job(label: str, plan: Plan, dataset: Dataset) -> Job:
    tasks = plan.stream(dataset)
    learner = plan.learner(dataset, tasks)
    stream = {
        "dataset": dataset.name,
        "classes_per_task": plan.classes_per_task or classes_per_task(dataset),
        "tasks": len(tasks),
        "validation": plan.validation,
    }
    if dataset.identity is not None:
        stream["data"] = dataset.identity
    settings = {
        name: value for name, value in identifying(learner.settings()).items() if name not in ("seed", "device")
    }
    settings |= content_of_weights(learner)  # wherever the file lies
    own = None if learner.shares_training else plan.method
    begins, shares = (_digest([identifying(learner.training_settings(task)), own, stream]) for task in (0, 1))
    return Job(
        label,
        plan,
        f"runs/{plan.method}-{_digest([plan.method, settings, stream])}/seed-{plan.seed}",
        begins,
        shares,
    )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def leaders_first(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs, each only once; the first of those that share a training before any second."""
    unique = list({job.folder: job for job in jobs}.values())
    turn: dict[str, int] = {}
    turns = []
    for job in unique:
        turns.append(turn.setdefault(job.shares, 0))
        turn[job.shares] += 1
    return [job for _, job in sorted(zip(turns, unique, strict=True), key=lambda pair: pair[0])]


def write_suite(
    folder: Path, order: SuiteOptions, command: str, members: Sequence[tuple[Variant, Sequence[Job]]]
) -> Path:
    """Keep what a suite consists of, for reports and for going on with it."""
    suite = SUITES[order.suite]
    path = folder / f"suite-{order.suite}.json"
    rows = [
        {
            "label": variant.label,
            "series": variant.series,
            "value": variant.value,
            "runs": [job.folder for job in jobs],
        }
        for variant, jobs in members
    ]
    head = {"schema": SCHEMA, "suite": order.suite, "dataset": order.dataset, "preset": order.preset}
    text = {"summary": suite.summary, "finding": suite.finding, "varies": suite.varies, "command": command}
    storage.write_json(path, {**head, **text, "variants": rows})
    return path


def check(order: SuiteOptions) -> None:
    """Refuse what cannot be, before any data is read."""
    if order.suite not in SUITES:
        raise unknown("suite", order.suite, SUITES, "engram suites")
    for method in order.methods:
        make(method)
