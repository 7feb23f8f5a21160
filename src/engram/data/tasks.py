"""`Task` and `Stream`: the classes that arrive together, and the order in which they arrive."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.data.samples import Dataset, Samples, hold_out
from engram.errors import DataError, UsageError, unknown
from engram.randomness import generator
from engram.text import names_in, printable

FIELD_SEED = 1993  # the class order of iCaRL's code, which most of the field has used since
NAMED_ORDERS = ("seed", str(FIELD_SEED))


@dataclass(frozen=True, eq=False)
class Task:
    """The classes that arrive together, with their training and test samples."""

    index: int  # counted from 0
    classes: tuple[int, ...]  # labels, in the order of the stream
    train: Samples
    test: Samples

    def __post_init__(self) -> None:
        for part, samples in (("training", self.train), ("test", self.test)):
            if foreign := set(samples.classes()) - set(self.classes):
                raise DataError(f"Task {self.index + 1} has {part} samples of classes {sorted(foreign)}, not its own.")
        if missing := set(self.classes) - set(self.train.classes()):
            raise DataError(f"Task {self.index + 1} has no training samples of its classes {sorted(missing)}.")


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in the order of their arrival. Make one with `split`, or from your own tasks."""

    name: str
    tasks: tuple[Task, ...]
    class_names: tuple[str, ...]  # by label
    classes_per_task: int | None = None  # None for a stream of your own tasks
    split: Mapping[str, Any] = field(default_factory=dict)  # the arguments of `split`, for the record

    def __post_init__(self) -> None:
        if [task.index for task in self.tasks] != list(range(len(self.tasks))):
            raise DataError("The tasks of a stream must be counted from 0, in order.")

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def classes(self) -> tuple[int, ...]:
        """Labels in the order in which they first arrive."""
        return tuple(dict.fromkeys(label for task in self.tasks for label in task.classes))

    def first(self, tasks: int) -> Stream:
        if not 1 <= tasks <= len(self):
            raise UsageError(f"This stream has {len(self)} tasks; {tasks} were asked for.")
        return replace(self, tasks=self.tasks[:tasks])

    def fingerprints(self) -> list[str]:
        """A SHA-256 per task over its classes and all its samples, in order."""
        return [
            hashlib.sha256(f"{task.classes} {task.train.fingerprint()} {task.test.fingerprint()}".encode()).hexdigest()
            for task in self.tasks
        ]


def split(
    dataset: Dataset,
    *,
    classes_per_task: int,
    first_task: int | None = None,
    class_order: str | os.PathLike[str] | Sequence[int] = "seed",
    seed: int = 0,
    validation: float = 0.0,
) -> Stream:
    """Split a data set into tasks of `classes_per_task` classes; the last takes the remainder.

    `first_task` is the number of classes of the first task, if it differs. `class_order` is "seed" (drawn from `seed`),
    "1993" (the field's), a file of class names or labels, one per line, or the labels themselves. With `validation`,
    that share of each class's training samples is held out and replaces the test split, which is not used at all.
    """
    present = dataset.train.classes()
    order = _class_order(class_order, present, dataset.class_names, seed)
    if not 1 <= classes_per_task <= len(order):
        raise UsageError(f"{dataset.name} has {len(order)} classes; classes-per-task cannot be {classes_per_task}.")
    if first_task is not None and not 1 <= first_task <= len(order):
        raise UsageError(f"{dataset.name} has {len(order)} classes; first-task cannot be {first_task}.")
    if not 0 <= validation < 1:
        raise UsageError(f"The validation share must lie between 0 and 1; found {validation}.")
    held_out = hold_out(dataset.train, validation, seed, "validation") if validation else None
    train, test = held_out or (dataset.train, dataset.test)
    first = first_task or classes_per_task
    groups = [order[:first], *(order[i : i + classes_per_task] for i in range(first, len(order), classes_per_task))]
    tasks = (Task(index, group, train.of_classes(group), test.of_classes(group)) for index, group in enumerate(groups))
    arguments = {  # of a class order in a file, its content and not its path
        "first_task": first_task,
        "class_order": class_order if isinstance(class_order, str) and class_order in NAMED_ORDERS else list(order),
        "validation": validation,
        **({"data": dataset.identity} if dataset.identity is not None else {}),
        **({"source": dict(dataset.source)} if dataset.source else {}),
    }
    return Stream(dataset.name, tuple(tasks), dataset.class_names, classes_per_task, arguments)


def _class_order(
    order: str | os.PathLike[str] | Sequence[int], present: tuple[int, ...], names: tuple[str, ...], seed: int
) -> tuple[int, ...]:
    if not isinstance(order, str | os.PathLike):
        labels = tuple(operator.index(label) for label in order)
    elif order == "seed":
        drawn = torch.randperm(len(present), generator=generator(seed, "class order"))
        return tuple(present[i] for i in drawn.tolist())
    elif order == str(FIELD_SEED):
        # The legacy generator on purpose: its permutation is what "seed 1993" means in published code.
        return tuple(present[i] for i in np.random.RandomState(FIELD_SEED).permutation(len(present)))
    else:
        labels = _read_order(Path(order), names)
    if sorted(labels) != list(present):
        wrong = {
            "missing": sorted(set(present) - set(labels)),
            "unknown": sorted(set(labels) - set(present)),
            "twice": sorted({label for label in labels if labels.count(label) > 1}),
        }
        named = {label: printable(name) for label, name in enumerate(names)}
        found = [f"{what}: {', '.join(named.get(x, str(x)) for x in each)}" for what, each in wrong.items() if each]
        raise UsageError(f"The class order must name each class once; {'; '.join(found)}.")
    return labels


def _read_order(path: Path, names: tuple[str, ...]) -> tuple[int, ...]:
    """One class per line, by name; by label where no class has that name."""
    try:
        entries = names_in(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The class order '{path}' is neither 'seed', '1993' nor a readable file.") from error
    labels = {str(label): label for label in range(len(names))} | {name: label for label, name in enumerate(names)}
    for entry in entries:
        if entry not in labels:
            raise unknown("class", entry, names, f"the lines of {path}")
    return tuple(labels[entry] for entry in entries)
