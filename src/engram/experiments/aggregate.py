"""Results put together: groups over seeds, their means and deviations, and differences between groups seed by seed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engram.experiments.identity import LATER, identifying, spoken_objective
from engram.experiments.results import Result

BOUNDS = ("joint", "finetune")  # they say what is possible and what is trivial; no one competes with them
LONGEST_LABEL = 120
MOST_SETTINGS = 4  # that a label names before it chooses among them


class Spread(NamedTuple):
    """A mean, and the sample standard deviation where there is more than one value."""

    mean: float
    deviation: float | None


def summary(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation of some values; the deviation of a single one is None."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


class StreamKind(NamedTuple):
    """What results must share to stand in one table: the stream but for the class order, which may go by the seed."""

    dataset: str
    classes_per_task: int | None
    classes_seen: tuple[int, ...]
    split: str  # as JSON with sorted keys; {} where it was not recorded


def stream_kind(result: Result) -> StreamKind:
    """The kind of stream that a result was measured on."""
    split = {name: value for name, value in result.split.items() if name != "source"}  # the data tell, not the words
    written = json.dumps(split, sort_keys=True, ensure_ascii=False)
    return StreamKind(result.dataset, result.classes_per_task, tuple(result.classes_seen), written)


@dataclass(frozen=True)
class Group:
    """Results that differ only in the seed, one per seed, in the order of the seeds."""

    label: str
    series: str  # what shares a colour and a line: the method, unless a suite says otherwise
    value: float | None  # on the axis of what a suite varies
    results: tuple[Result, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds there are."""
        return tuple(result.seed for result in self.results)

    @property
    def method(self) -> str:
        """The method, which all its results share."""
        return self.results[0].method

    @property
    def is_bound(self) -> bool:
        """Whether it shows what is possible or trivial, and does not compete."""
        return self.method in BOUNDS

    @property
    def trained(self) -> bool:
        """Whether its seconds count all training; runs that took shared networks have spent none on those."""
        return all("train" in result.seconds and not result.networks_taken for result in self.results)


# What is said of a result in one number.
NUMBERS: Mapping[str, Any] = {
    "average": lambda result: result.average_incremental_accuracy,
    "last": lambda result: result.curve[-1],
    "top5": lambda result: result.average_incremental_accuracy_top5,
    "forgetting": lambda result: result.forgetting,
    "memory": lambda result: float(result.memory_bytes),
    # Measuring is no part of a method, and takes longest where vectors are stored.
    "seconds": lambda result: math.fsum(spent for phase, spent in result.seconds.items() if phase != "measure"),
    "omega": lambda result: result.omega[-1] if result.omega else None,
    "gap": lambda result: result.drift_gap[-1] if result.drift_gap else None,
    "ceiling": lambda result: result.ceiling_curve[-1] if result.ceiling_curve else None,
}


def measured(group: Group, name: str, seeds: Iterable[int] | None = None) -> Spread | None:
    """The mean of one of NUMBERS over the group's seeds, or over `seeds` of them; None where a result lacks it."""
    among = set(group.seeds if seeds is None else seeds)
    values = [NUMBERS[name](result) for result in group.results if result.seed in among]
    return summary(values) if values and all(value is not None for value in values) else None


def curve(group: Group, name: str = "curve") -> list[Spread | None]:
    """A list of the results along the tasks, such as `curve` or `drift_gap`, over the seeds; None where absent."""
    lists = [getattr(result, name) for result in group.results]
    if any(each is None for each in lists):
        return [None] * len(group.results[0].curve)
    columns = zip(*lists, strict=True)
    return [None if any(value is None for value in column) else summary(column) for column in columns]


def mean_matrix(group: Group) -> list[list[float]]:
    """The accuracy matrix, a mean over the seeds: [t][i], on task i's classes after task t."""
    rows = zip(*(result.accuracy_matrix for result in group.results), strict=True)
    return [[statistics.fmean(cells) for cells in zip(*row, strict=True)] for row in rows]


def phases(group: Group) -> dict[str, float]:
    """Mean seconds by phase; a phase that a run did not have counts as none."""
    names = dict.fromkeys(name for result in group.results for name in result.seconds)
    return {name: statistics.fmean(result.seconds.get(name, 0.0) for result in group.results) for name in names}


@dataclass(frozen=True)
class Difference:
    """How much more accurate one group is than another, seed by seed, with the 95 % interval of Student's t."""

    mean: float
    low: float
    high: float
    seeds: tuple[int, ...]
    wins: int  # seeds on which the first is ahead

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def common_seeds(*groups: Group) -> tuple[int, ...]:
    """The seeds that all groups have; none where, on one of these, their streams differ."""
    by_seed = [{result.seed: result for result in group.results} for group in groups]
    seeds = sorted(set.intersection(*(set(results) for results in by_seed)))
    for seed in seeds:
        first, *others = (results[seed] for results in by_seed)
        if any(_stream(other) != _stream(first) for other in others):
            return ()
    return tuple(seeds)


def _stream(result: Result) -> tuple[StreamKind, list[str]]:
    return stream_kind(result), result.class_order


def paired(a: Group, b: Group, among: Iterable[int] | None = None) -> Difference | None:
    """The difference of average incremental accuracy, a less b, over the seeds both have; None with fewer than two.

    Or only over those `among` them that are asked for.
    """
    from scipy.special import stdtrit  # Student's quantile; scipy.stats has it too, and takes a second to import

    asked = None if among is None else set(among)
    seeds = tuple(seed for seed in common_seeds(a, b) if asked is None or seed in asked)
    if len(seeds) < 2:
        return None
    scores = [{each.seed: each.average_incremental_accuracy for each in group.results} for group in (a, b)]
    differences = [scores[0][seed] - scores[1][seed] for seed in seeds]
    mean, deviation = summary(differences)
    assert deviation is not None
    half = float(stdtrit(len(seeds) - 1, 0.975)) * deviation / math.sqrt(len(seeds))
    return Difference(mean, mean - half, mean + half, seeds, sum(each > 0 for each in differences))


def group_by_settings(results: Iterable[Result], notes: list[str]) -> list[Group]:
    """Groups of results on one kind of stream that agree in everything but the seed, named after what tells them apart.

    What a person should know, such as a seed that was found twice with different numbers, is added to `notes`.
    """
    together: dict[str, list[Result]] = {}
    for result in results:
        together.setdefault(_identity(result), []).append(result)
    firsts = [members[0] for members in together.values()]
    naming = {
        method: _telling([each for each in firsts if each.method == method])
        for method in dict.fromkeys(first.method for first in firsts)
    }
    labels = distinct([_label(first, naming[first.method]) for first in firsts])
    return [
        Group(label, members[0].method, None, one_per_seed(label, members, notes))
        for label, members in zip(labels, together.values(), strict=True)
    ]


def _identity(result: Result) -> str:
    return json.dumps([result.method, without_seed(result.settings)], sort_keys=True, ensure_ascii=False)


def without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a run this one, whatever its seed and wherever it ran."""
    return {name: value for name, value in identifying(settings).items() if name not in ("seed", "device")}


def one_per_seed(label: str, results: Iterable[Result], notes: list[str]) -> tuple[Result, ...]:
    """The first result of each seed, in the order of the seeds; one that disagrees with it is noted."""
    first: dict[int, Result] = {}
    for result in results:
        kept = first.setdefault(result.seed, result)
        if kept.curve != result.curve:
            notes.append(f"Seed {result.seed} of {label} was found twice, with different numbers; the first is used.")
    return tuple(first[seed] for seed in sorted(first))


def _label(result: Result, names: Sequence[str]) -> str:
    """The method, and these of its settings. That one is None goes unsaid."""
    settings = {**LATER, **result.settings}
    if "objective" in settings:
        settings["objective"] = spoken_objective(settings["objective"])
    parts = [
        f"{name} = {shown(settings[name])}" if name in settings else f"{name} not recorded"
        for name in names
        if settings.get(name, ...) is not None
    ]
    return ", ".join([result.method, *parts])


def _telling(rivals: Sequence[Result]) -> list[str]:
    """The settings in which these differ; if they are many, a few that tell them apart: each leaves the fewest alike.

    Of those that do equally well one that all recorded, and of these a choice by name: it says more than a number.
    """
    names = differing([without_seed(each.settings) for each in rivals])
    if len(names) <= MOST_SETTINGS:
        return names
    settings = [{**LATER, **each.settings} for each in rivals]

    def worth(name: str, chosen: Sequence[str]) -> tuple[int, bool, bool]:
        kinds = {json.dumps([each.get(known) for known in (*chosen, name)]) for each in settings}
        values = [each.get(name) for each in settings]
        return len(kinds), all(name in each for each in settings), all(isinstance(each, str) for each in values)

    chosen: list[str] = []
    reached = 1
    while reached < len(rivals):
        (kinds, *_), name = max(((worth(name, chosen), name) for name in names), key=lambda found: found[0])
        if kinds == reached:  # what is left differs in whether it was recorded at all
            return names
        chosen, reached = [*chosen, name], kinds
    return sorted(chosen, key=names.index)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names under which these mappings do not all hold the same, in the order in which they are met."""
    missing = object()
    names = dict.fromkeys(name for each in settings for name in each)
    return [
        name for name in names if any(each.get(name, missing) != settings[0].get(name, missing) for each in settings)
    ]


def shown(value: Any) -> str:
    """A setting's value as a person would write it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value)
    return str(value)


def shortened(text: str, length: int) -> str:
    """The text, or its beginning and end with an ellipsis between: what tells names apart is often at the end."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 3
    return text[: length - 1 - tail].rstrip() + "…" + text[len(text) - tail :].lstrip()


def distinct(labels: Iterable[str], numbered: str = "{} ({})") -> list[str]:
    """The labels, not too long, with a number behind those that would be the same."""
    taken: list[str] = []
    for label in labels:
        short = candidate = shortened(label, LONGEST_LABEL).strip() or "unnamed"
        number = 1
        while candidate in taken:
            number += 1
            candidate = numbered.format(short, number)
        taken.append(candidate)
    return taken
