"""`Section`: what may stand in one table, and how results and suites are put into sections."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram.experiments.aggregate import (
    Group,
    StreamKind,
    distinct,
    group_by_settings,
    measured,
    one_per_seed,
    stream_kind,
)
from engram.experiments.report.reading import RESULT, Found, Suite
from engram.experiments.results import Result


@dataclass(frozen=True)
class Section:
    """Groups on one kind of stream, of one suite or of none. Nothing is compared across sections."""

    title: str
    name: str  # the title in lower-case letters, digits and dashes: for anchors and files
    kind: StreamKind
    groups: tuple[Group, ...]
    suite: Suite | None = None

    @property
    def varies(self) -> str | None:
        """What is varied, where a suite says so and there are values of it."""
        values = [group.value for group in self.groups if group.value is not None]
        return self.suite.varies if self.suite and len(set(values)) > 1 else None

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return len(self.kind.classes_seen)

    @property
    def split(self) -> dict[str, Any]:
        """How the stream was made of the data set; empty where it was not recorded."""
        return dict(json.loads(self.kind.split))

    @property
    def source(self) -> dict[str, Any]:
        """How the data set was loaded; empty where it was not recorded."""
        source = self.groups[0].results[0].split.get("source")
        return source if isinstance(source, dict) else {}

    @property
    def same_seeds(self) -> bool:
        """Whether all groups have the same seeds, so that their means may stand side by side."""
        return len({group.seeds for group in self.groups}) == 1

    @property
    def contenders(self) -> tuple[Group, ...]:
        """The groups that compete: all but the bounds, or all where there is nothing else."""
        return tuple(group for group in self.groups if not group.is_bound) or self.groups


def sections(found: Found) -> list[Section]:
    """What was found, in sections: one for each suite and kind of stream, then one for each kind among the rest."""
    made: list[Section] = []
    used: set[Path] = set()
    for file, suite in sorted(found.suites.items()):
        parts, paths = _of_suite(file.parent, suite, found)
        made += parts
        used |= paths
    rest: dict[StreamKind, list[Result]] = {}
    for path, result in found.results.items():
        if path not in used:
            rest.setdefault(stream_kind(result), []).append(result)
    for kind in sorted(rest, key=lambda kind: (kind.dataset, kind.classes_seen, str(kind))):
        made.append(Section("", "", kind, _ordered(group_by_settings(rest[kind], found.notes))))
    return _named(made)


def _of_suite(folder: Path, suite: Suite, found: Found) -> tuple[list[Section], set[Path]]:
    """The sections of one suite, and the result files that they use."""
    groups: dict[StreamKind, list[Group]] = {}
    used: set[Path] = set()
    for label, variant in zip(distinct(each.label for each in suite.variants), suite.variants, strict=True):
        paths = [path for run in variant.runs if (path := (folder / run / RESULT).resolve()) in found.results]
        used |= set(paths)
        by_kind: dict[StreamKind, list[Result]] = {}
        for path in dict.fromkeys(paths):
            by_kind.setdefault(stream_kind(found.results[path]), []).append(found.results[path])
        for kind, results in by_kind.items():
            members = one_per_seed(label, results, found.notes)
            groups.setdefault(kind, []).append(Group(label, variant.series, variant.value, members))
    return [Section("", "", kind, tuple(members), suite) for kind, members in groups.items()], used


def _ordered(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Best first and bounds last; by name where seeds differ, as an order by means would compare them."""
    if len({group.seeds for group in groups}) > 1:
        return tuple(sorted(groups, key=lambda group: (group.is_bound, group.label)))
    means = {group.label: spread.mean for group in groups if (spread := measured(group, "average"))}
    return tuple(sorted(groups, key=lambda group: (group.is_bound, -means[group.label], group.label)))


def _named(parts: Iterable[Section]) -> list[Section]:
    """The sections with titles and names, none of them twice."""
    parts = list(parts)
    plain = [_title(part) for part in parts]
    # Which data it was, and whether a split was recorded, is worth a word only where it tells two sections apart.
    full = [
        f"{title} ({words})" if plain.count(title) > 1 and (words := _which(part)) else title
        for title, part in zip(plain, parts, strict=True)
    ]
    titles = distinct(full)
    names = distinct((_name(title) for title in titles), "{}-{}")
    return [replace(part, title=title, name=name) for part, title, name in zip(parts, titles, names, strict=True)]


def _title(section: Section) -> str:
    """The stream in words: `digits: 5 tasks of 2 classes`."""
    sizes = [b - a for a, b in zip([0, *section.kind.classes_seen], section.kind.classes_seen, strict=False)]
    count = f"{len(sizes)} tasks" if len(sizes) > 1 else "1 task"
    if len(set(sizes)) == 1:
        words = f"{count} of {_classes(sizes[0])}"
    elif len(set(sizes[1:])) == 1:
        words = f"{count}, {_classes(sizes[0])} and then {sizes[1]} each"
    else:
        words = f"{count}, {_classes(sum(sizes))}"
    split = section.split
    if order := split.get("class_order", "seed"):
        words += "" if order == "seed" else ", class order 1993" if order == "1993" else ", class order given"
    if held := split.get("validation"):
        words += f", validated on {held * 100:g} % held out" if isinstance(held, int | float) else ""
    title = f"{section.kind.dataset}: {words}"
    return f"{section.suite.suite} on {title}" if section.suite else title


def _which(section: Section) -> str:
    """What tells a section from one of the same title."""
    split = section.split
    if not split:
        return "split not recorded"
    size = section.source.get("image_size")
    words = [f"images of {size} pixels"] if size else []
    return ", ".join([*words, f"data {str(split['data'])[:8]}"]) if "data" in split else ""


def _classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count} classes"


def _name(title: str) -> str:
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60].strip("-") or "section"
