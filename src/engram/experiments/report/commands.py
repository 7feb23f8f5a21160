"""How to run it again: commands that are built from the results alone."""

from __future__ import annotations

import shlex
from typing import Any

from engram.experiments.aggregate import Group
from engram.experiments.identity import done_otherwise, spoken_objective
from engram.experiments.report.sections import Section

PUBLISHED = ("digits", "cifar10", "cifar100")  # which are loaded by their name alone
SOURCE_FLAGS = ("dataset", "data", "image_size", "fit", "class_list")


def source_flags(section: Section) -> list[str]:
    """The flags that load the data set again; none where it was not recorded whence it came."""
    if section.kind.dataset in PUBLISHED:
        return ["--dataset", section.kind.dataset]
    known = [(name, section.source[name]) for name in SOURCE_FLAGS if name in section.source]
    return [word for name, value in known for word in (f"--{name.replace('_', '-')}", str(value))]


def commands(section: Section, group: Group) -> list[str]:
    """The commands that make a group's results again, one for each unbroken run of seeds, with every setting."""
    if section.kind.classes_per_task is None or not source_flags(section):
        return []
    shared = [*_stream_flags(section), *_setting_flags(group)]
    made = []
    for first, count in _unbroken(group.seeds):
        seeds = ["--seed", str(first), *(["--seeds", str(count)] if count > 1 else [])]
        made.append(_wrapped(["engram", "run", group.method], [*_pairs(shared), seeds]))
    return made


def _stream_flags(section: Section) -> list[str]:
    kind, split = section.kind, section.split
    flags = [*source_flags(section), "--classes-per-task", str(kind.classes_per_task), "--tasks", str(section.tasks)]
    if split.get("first_task") is not None:
        flags += ["--first-task", str(split["first_task"])]
    order = split.get("class_order", "seed")
    if order != "seed":
        flags += ["--class-order", order if isinstance(order, str) else "ORDER.txt"]
    if split.get("validation"):
        flags += ["--validation", str(split["validation"])]
    return flags


def _setting_flags(group: Group) -> list[str]:
    flags: list[str] = []
    for name, value in {**done_otherwise(group.method), **group.results[0].settings}.items():
        if name != "seed" and (name, value) != ("device", "auto"):
            flags += ["--set", f"{name}={_written(name, value)}"]
    return flags


def _written(name: str, value: Any) -> str:
    if name == "objective":
        return str(spoken_objective(value))
    if value is None:
        return "none"
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)


def _pairs(flags: list[str]) -> list[list[str]]:
    return [flags[place : place + 2] for place in range(0, len(flags), 2)]


def _unbroken(seeds: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, how many) of each run of seeds without a gap."""
    runs: list[tuple[int, int]] = []
    for seed in seeds:
        if runs and seed == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((seed, 1))
    return runs


def _wrapped(start: list[str], flags: list[list[str]], width: int = 100) -> str:
    """A command over several lines, broken between flags."""
    lines = [shlex.join(start)]
    for flag in flags:
        words = shlex.join(flag)
        if len(lines[-1]) + len(words) < width:
            lines[-1] += f" {words}"
        else:
            lines.append(f"    {words}")
    return " \\\n".join(lines)
