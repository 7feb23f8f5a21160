"""Two ways of doing the same, timed in turns in one process: what counts is their ratio, on whatever machine."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import engram


@dataclass
class Outcome:
    """One line of the table: a ratio, what it should be, and how it came about."""

    phase: str
    against: str
    ratio: float
    goal: float
    at_least: bool = True  # whether the ratio should be no less than the goal, or no more
    unit: str = "×"  # or "%", of which the ratio is a hundredth
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    def say(self, value: float) -> str:
        return f"{100 * value:.0f} %" if self.unit == "%" else f"{value:.3g} {self.unit}"

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.say(self.goal)}"


def clock() -> float:
    """With one thread, the processor time of this process, which other processes hardly change; else the wall clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def in_turns(*ways: Callable[[], object], rounds: int = 7) -> list[list[float]]:
    """The seconds that each way took in each round, after one round that does not count."""
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for way, taken in zip(ways, seconds, strict=True):
            start = clock()
            way()
            if number:
                taken.append(clock() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median over rounds of one time over another of the same round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def speeds(images: int, *ways: list[float]) -> str:
    """How many images a second each way did, in its median round: `430 images/s against 270 images/s`."""
    return " against ".join(f"{images / statistics.median(taken):.0f} images/s" for taken in ways)


def milliseconds(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.3g} ms"


def cifar100() -> engram.Dataset:
    """The real images, or the reason why this benchmark is left out."""
    if not (root := os.environ.get("ENGRAM_DATA")):
        sys.exit("left out: CIFAR-100 is not there; name its folder in ENGRAM_DATA")
    return engram.load("cifar100", Path(root))


def two_tasks(images: int | None = None) -> list[engram.Task]:
    """The first two tasks of CIFAR-100, of ten classes each, or the first so many images of each."""
    tasks = engram.split(cifar100(), classes_per_task=10).tasks[:2]
    if images is None:
        return list(tasks)
    return [replace(task, train=task.train.select(torch.arange(images))) for task in tasks]


def show(*outcomes: Outcome) -> None:
    """Print what was found, for a person and, as the last line, for `all.py`."""
    for each in outcomes:
        verdict = "met" if each.met else "NOT MET"
        print(
            f"{each.phase}: {each.say(each.ratio)} ({each.wanted}: {verdict}). Against: {each.against}. {each.detail}"
        )
    print(json.dumps([asdict(each) for each in outcomes]), flush=True)
