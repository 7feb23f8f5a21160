"""Result files as a table of runs: sections whose runs are comparable, and groups that differ only in the seed."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from engram.errors import DataError
from engram.experiments.results import BY_TASK, Result, SuiteFile, load_file
from engram.storage import ASIDE
from engram.text import printable

RESULT = "result.json"
BOUNDS = ("joint", "finetune")  # upper and lower bound: they do not compete
TRAINING = ("train", "fine-tune")  # phases
LARGEST_NUMBER = 2**63  # bytes or seconds
LONGEST_LABEL = 120
MOST_SETTINGS = 4  # that a label names before it chooses among them


def read_runs(places: Sequence[Path]) -> tuple[pd.DataFrame, dict[Path, SuiteFile], list[str]]:
    """One row per result in these files and folders, the suites by their files, and a note on each file skipped."""
    runs: dict[Path, dict[str, Any]] = {}
    suites: dict[Path, SuiteFile] = {}
    notes: list[str] = []
    for place in places:
        if not place.exists():
            raise DataError(f"There is no file or folder '{printable(place)}'. Name folders of runs, or result files.")
        for file in [place] if place.is_file() else [*place.rglob(RESULT), *place.rglob("suite*.json")]:
            if any(part.startswith(ASIDE) for part in file.parts):
                continue
            try:
                if file.name.startswith("suite"):
                    suites[file.resolve()] = load_file(SuiteFile, file, _checked)
                else:
                    runs[file.resolve()] = _row(file)
            except DataError as error:
                notes.append(printable(f"Skipped: {error}"))
    if not runs:
        where = ", ".join(f"'{printable(place)}'" for place in places)
        raise DataError(" ".join([f"No result was found in {where}. `engram run` makes them.", *notes]))
    return pd.DataFrame(runs[path] for path in sorted(runs)), suites, notes


def _checked(value: Any) -> Any:
    """The value with every text in it printable, so that no name reverses or rewrites the text around it."""
    if isinstance(value, int | float) and not abs(value) < LARGEST_NUMBER:
        raise ValueError("a number is infinite, not a number or too large")
    if isinstance(value, list):
        return [_checked(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): _checked(item) for name, item in value.items()}
    return printable(value) if isinstance(value, str) else value


def _row(file: Path) -> dict[str, Any]:
    """The fields of a result, and what is derived from them."""
    result = load_file(Result, file, _checked)
    if not result.is_consistent():
        raise DataError(f"{file} is inconsistent: its lists differ in length, or a number is out of range.")
    split = {name: value for name, value in result.split.items() if name != "source"}
    settings = {name: value for name, value in result.settings.items() if name not in ("seed", "device")}
    # Measuring is no part of a method, and networks may come from a run that has trained them before.
    seconds = {phase: spent for phase, spent in result.seconds.items() if phase != "measure"}
    return {
        **vars(result),
        **{name: getattr(result, name) or [None] * len(result.curve) for name in BY_TASK},
        "path": file.resolve(),
        "order": tuple(result.class_order),
        # Runs with the same stream are comparable. `split` holds a fingerprint of the data.
        "stream": json.dumps([result.dataset, result.classes_per_task, result.classes_seen, split], sort_keys=True),
        "settings": settings,
        "identity": json.dumps([result.method, settings], sort_keys=True),
        "is_bound": result.method in BOUNDS,
        "top1": result.average_incremental_accuracy,
        "top5": result.average_incremental_accuracy_top5,
        "last_top1": result.curve[-1],
        "last_top5": result.curve_top5[-1],
        "last_omega": result.omega[-1] if result.omega else math.nan,
        "last_gap": result.drift_gap[-1] if result.drift_gap else math.nan,
        "memory": result.memory_bytes / 2**20,
        "seconds_total": math.fsum(seconds.values()),
        "seconds_after": math.fsum(spent for phase, spent in seconds.items() if phase not in TRAINING),
        "shares_training": "train" not in result.seconds or bool(result.networks_reused),
    }


@dataclass(frozen=True)
class Section:
    """Runs on the same data, split and tasks, of one suite or of none. Nothing is compared across sections."""

    runs: pd.DataFrame  # a row per run with its `group`, `series` and `value`, in the order of display
    varies: str | None = None  # the swept setting: `value` is a value of it
    suite: SuiteFile | None = None
    title: str = ""
    name: str = ""  # the title in lower-case letters, digits and dashes: for anchors and files

    @property
    def first(self) -> Any:
        """A run: `dataset`, `split`, `classes_per_task` and `classes_seen` are the same in all."""
        return self.runs.iloc[0]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The accuracies to show, the leading one first: top-5 on ImageNet, as in the literature."""
        return ("top5", "top1") if self.first["dataset"].startswith("imagenet") else ("top1",)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """A row per group."""
        first = {name: (name, "first") for name in ("method", "series", "value", "is_bound", "settings")}
        by_group = self.runs.groupby("group", sort=False)
        return by_group.agg(**first, seeds=("seed", tuple), shares_training=("shares_training", "any"))

    @property
    def contenders(self) -> pd.DataFrame:
        """The groups that compete: all but the bounds, or all where there is nothing else."""
        return self.groups if self.groups["is_bound"].all() else self.groups[~self.groups["is_bound"]]

    @property
    def comparable(self) -> bool:
        """Whether there are several contenders, all with the same seeds, so that their means can be compared."""
        return len(self.contenders) > 1 and self.contenders["seeds"].nunique() == 1

    @property
    def front(self) -> list[str]:
        """The contenders that no other one with as little memory beats in leading accuracy, by memory."""
        score, memory = (self.spread(name)["mean"][self.contenders.index] for name in (self.metrics[0], "memory"))
        ranked = pd.DataFrame({"memory": memory, "score": -score}).sort_values(["memory", "score"], kind="stable")
        best = ranked["score"].cummin().shift(fill_value=math.inf)
        return list(ranked.index[ranked["score"] < best])

    def spread(self, column: str) -> pd.DataFrame:
        """Mean, standard deviation and 95 % interval of a number over each group's seeds."""
        return _interval(self.runs.groupby("group", sort=False)[column].agg(["mean", "std", "count"]))

    def spread_by_task(self, column: str) -> pd.DataFrame:
        """Mean and standard deviation over the seeds by group and task (from 0); NaN where a run lacks the number."""
        values = pd.DataFrame(list(self.runs[column]), index=self.runs["group"], dtype=float)
        by_task = values.rename_axis(columns="task").stack(future_stack=True).groupby(["group", "task"], sort=False)
        stats = by_task.agg(["mean", "std", "count", "size"])
        return stats[["mean", "std"]].where(stats["count"] == stats["size"])

    def differences(self, reference: str | None = None, column: str | None = None) -> pd.DataFrame:
        """A number of each group (leading accuracy) less that of a reference (the first contender).

        They are over the runs with the same seed and class order.
        """
        reference, column = reference or self.contenders.index[0], column or self.metrics[0]
        scores = self.runs.pivot(index=["seed", "order"], columns="group", values=column)[self.groups.index]
        paired = scores.drop(columns=reference).sub(scores[reference], axis="index")
        return _interval(paired.agg(["mean", "std", "count"]).T)


def _interval(stats: pd.DataFrame) -> pd.DataFrame:
    from scipy.special import stdtrit  # Student's quantile; scipy.stats takes a second to import

    count = stats["count"].where(stats["count"] > 1)
    half = stdtrit(count - 1, 0.975) * stats["std"] / count**0.5
    return stats[["mean", "std"]].assign(low=stats["mean"] - half, high=stats["mean"] + half)


def make_sections(runs: pd.DataFrame, suites: Mapping[Path, SuiteFile], notes: list[str]) -> list[Section]:
    """A section per suite and stream, then one per stream of the other runs. Adds to the notes."""
    sections: list[Section] = []
    rest = runs
    for file, suite in sorted(suites.items()):
        labels = distinct(variant.label for variant in suite.variants)
        rows = [
            ((file.parent / run / RESULT).resolve(), label, variant.series, variant.value)
            for label, variant in zip(labels, suite.variants, strict=True)
            for run in variant.runs
        ]
        members = pd.DataFrame(rows, columns=["path", "group", "series", "value"])
        if missing := len({*members["path"]} - {*runs["path"]}):
            notes.append(printable(f"The suite {suite.suite} in {file.parent} is incomplete: {missing} runs missing."))
        found = members.merge(runs, on="path")
        rest = rest[~rest["path"].isin(found["path"])]
        sections += [Section(part, suite.varies, suite) for _, part in found.groupby("stream", sort=False)]
    sections += [_group_by_settings(part) for _, part in rest.groupby("stream")]
    sections = [_one_run_per_seed(section, notes) for section in sections]
    titles = distinct(_title(section) for section in sections)
    names = distinct((re.sub("[^a-z0-9]+", "-", title.lower())[:60].strip("-") for title in titles), "{}-{}")
    return [replace(each, title=title, name=name) for each, title, name in zip(sections, titles, names, strict=True)]


def _group_by_settings(runs: pd.DataFrame) -> Section:
    """Groups of one method and settings, labelled with those that differ, in order of accuracy and bounds last."""
    labels: dict[str, str] = {}
    named: set[str] = set()
    for method, rivals in runs.drop_duplicates("identity").groupby("method"):
        settings = differing(rivals["settings"])
        names = _distinguishing(settings)
        named |= {*names}
        for identity, row in zip(rivals["identity"], settings[names].to_dict("records"), strict=True):
            said = [f"{name} = {value}" for name, value in row.items() if pd.notna(value) and value != "none"]
            labels[identity] = ", ".join([method, *said])
    labels = dict(zip(labels, distinct(labels.values()), strict=True))
    varies = named.pop() if len(named) == 1 else None
    values = pd.to_numeric(runs["settings"].map(lambda settings: settings.get(varies)), errors="coerce").astype(float)
    section = Section(runs.assign(group=runs["identity"].map(labels), series=runs["method"], value=values), varies)
    score = section.spread(section.metrics[0])["mean"]
    if section.contenders["seeds"].map(frozenset).nunique() > 1:
        score = 0.0 * score  # means over different seeds: in the order of the labels
    ranked = section.groups.assign(score=-score).sort_index().sort_values(["is_bound", "score"], kind="stable")
    return replace(section, runs=section.runs.set_index("group").loc[ranked.index].reset_index())


def differing(settings: Iterable[Mapping[str, Any]], differ: bool = True) -> pd.DataFrame:
    """Settings as text, a row each and a column for each one that differs (or is the same); NaN where one is absent."""
    rows = [{name: format_value(value) for name, value in each.items()} for each in settings]
    frame = pd.DataFrame(rows, dtype=object)
    return frame.loc[:, (frame.nunique(dropna=False) > 1) == differ]


def _distinguishing(settings: pd.DataFrame) -> list[str]:
    """All of the settings; if they are many, a few that tell the rows apart, words rather than numbers."""
    names = list(settings)
    numeric = {name: pd.to_numeric(settings[name], errors="coerce").notna().sum() for name in names}
    for name in sorted(names, key=numeric.__getitem__, reverse=True):
        others = [other for other in names if other != name]
        if settings.shape[1] > MOST_SETTINGS and others and not settings[others].duplicated().any():
            names = others
    return names


def format_value(value: Any) -> str:
    """A setting's value as a person would write it."""
    if isinstance(value, list):
        return ", ".join(format_value(item) for item in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_run_per_seed(section: Section, notes: list[str]) -> Section:
    curves = section.runs.assign(text=section.runs["curve"].map(str)).groupby(["group", "seed"])["text"].nunique()
    for label, seed in curves[curves > 1].index:
        notes.append(f"Seed {seed} of {label} was found twice, with different numbers; the first is used.")
    runs = section.runs.drop_duplicates(["group", "seed"]).sort_values("seed").set_index("group")
    varies = section.varies if runs["value"].nunique() > 1 else None
    return replace(section, runs=runs.loc[section.groups.index].reset_index(), varies=varies)


def _title(section: Section) -> str:
    """`digits: 5 tasks of 2 classes`."""
    split, dataset = section.first["split"], section.first["dataset"]
    sizes = [b - a for a, b in itertools.pairwise([0, *section.first["classes_seen"]])]
    alike = [(len([*run]), size) for size, run in itertools.groupby(sizes)]
    words = [f"{count} {'tasks' if count > 1 else 'task'} of {size}" for count, size in alike]
    title = f"{dataset}: {' and '.join(words)} classes"
    order = split.get("class_order", "seed")
    title += "" if order == "seed" else ", class order " + (order if isinstance(order, str) else "given")
    title += f", validation share {format_value(split['validation'])}" if split.get("validation") else ""
    title += f", data {str(split['data'])[:8]}" if "data" in split else ""
    return f"{section.suite.suite} on {title}" if section.suite else title


def distinct(labels: Iterable[str], numbered: str = "{} ({})") -> list[str]:
    """The labels, long ones shortened in the middle, with a number behind those that would be the same."""
    taken: list[str] = []
    for label in labels:
        third = LONGEST_LABEL // 3
        short = (label if len(label) <= LONGEST_LABEL else f"{label[: 2 * third]}…{label[-third:]}") or "unnamed"
        numbers = (numbered.format(short, number) for number in itertools.count(2))
        taken.append(next(each for each in itertools.chain([short], numbers) if each not in taken))
    return taken
