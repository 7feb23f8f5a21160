"""`verify`: whether a model's files are as they were saved, and whether what they say agrees with itself.

This finds damage, not forgery: whoever can write the folder can write checksums too. Nothing that is read can run code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engram.errors import DataError, EngramError
from engram.features import FeatureMemory, ImageMemory
from engram.model.folder import ModelFolder
from engram.model.generations import generation_path
from engram.model.inspection import folder_bytes
from engram.model.manifest import Manifest
from engram.model.model import Model, restore_model
from engram.text import printable

LENGTH = 1e-3  # how far from 1 the length of a stored vector may be


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What was found. The model is whole if there is no problem."""

    generations: tuple[int, ...]  # that were looked at
    in_use: int | None
    bytes: int  # of the folder
    problems: tuple[str, ...]  # a sentence each

    @property
    def intact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"intact": self.intact, **asdict(self)}


def verify(folder: ModelFolder) -> VerifyResult:
    """Compare every file with its checksum, and check that each intact generation agrees with itself."""
    problems = folder.verify(_check)
    return VerifyResult(
        generations=tuple(sorted(folder.digests() if folder.exists() else ())),
        in_use=_in_use(folder),
        bytes=folder_bytes(folder.path),
        problems=tuple(problems),
    )


def _check(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The inconsistencies of a generation, and the error that ends the search for them, if any."""
    name = generation_path(manifest.generation)
    try:
        for contradiction in inconsistencies(restore_model(manifest, tensors, "cpu")):
            yield f"{name}: {printable(contradiction)}"
    except EngramError as error:
        yield f"{name}: {printable(error)}"
    except Exception as error:  # inconsistent tensors can lead to any
        yield f"{name}: It cannot be used: {printable(repr(error))}."


def inconsistencies(model: Model) -> Iterator[str]:
    """Where a model does not agree with itself, a sentence each."""
    for check in CHECKS:
        yield from check(model)


def _in_use(folder: ModelFolder) -> int | None:
    try:
        return folder.pointer().current
    except DataError:
        return None


def _columns(model: Model) -> Iterator[str]:
    learner, classes = model.learner, len(model.names)
    if len(set(learner.classes_)) < classes:
        yield "Two of its classes have one label."
    if len(learner.task_of_class_) != classes or not all(0 <= task < learner.tasks_ for task in learner.task_of_class_):
        yield f"It does not say for each of its {classes} classes which of {learner.tasks_} tasks brought it."
    if learner.trained.classes != classes:
        yield f"Its head has {learner.trained.classes} rows for {classes} classes."
    classifier = learner.classifier_
    if classifier is not None and classifier.classes_.tolist() != list(range(classes)):
        yield f"Its classifier does not have a row for each of its {classes} classes."


def _memory(model: Model) -> Iterator[str]:
    memory, learner = model.learner.memory, model.learner
    yield from _grouped("vectors", memory.features, len(model.names), (learner.trained.dimension,))
    yield from _grouped("images", memory.images, len(model.names), learner.shape_)


def _grouped(kind: str, memory: FeatureMemory | ImageMemory, classes: int, shape: tuple[int, ...]) -> Iterator[str]:
    counts = memory.counts.tolist()
    if len(counts) not in (0, classes):
        yield f"Its stored {kind} are counted for {len(counts)} instead of {classes} classes."
    if min(counts, default=0) < 0 or sum(counts) != len(memory):
        yield f"It has {len(memory)} stored {kind}, and counts {sum(counts)}."
    rows = memory.rows
    if len(memory) and tuple(rows.shape[1:]) != shape:
        yield f"Its stored {kind} are of the shape {tuple(rows.shape[1:])} instead of {shape}."
    expected = torch.uint8 if kind == "images" and len(shape) == 3 else torch.float32
    if len(memory) and rows.dtype != expected:
        yield f"Its stored {kind} are of the type {rows.dtype} instead of {expected}."


def _numbers(model: Model) -> Iterator[str]:
    for name, tensor in model.learner.state().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield f"Its {name} has numbers that are not finite."
    rows = model.learner.memory.features.rows
    wrong = int(((rows.norm(dim=1) - 1).abs() > LENGTH).sum())
    if wrong:
        yield f"{wrong} of its {len(rows)} stored vectors are not of unit length."


def _budget(model: Model) -> Iterator[str]:
    kept, budget = model.learner.memory.nbytes, model.metadata.budget
    if budget is not None and kept > budget:
        yield f"It keeps {kept:,} bytes, which is more than its budget of {budget:,}."


def _answers(model: Model) -> Iterator[str]:
    """Ask it something: whatever else is wrong may show."""
    shape = model.learner.shape_
    blank: Tensor = torch.zeros(1, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    probabilities = model.probabilities(blank)
    if probabilities.shape != (1, len(model.names)) or not bool(probabilities.isfinite().all()):
        yield "It does not give each class a probability."


CHECKS: tuple[Callable[[Model], Iterator[str]], ...] = (_columns, _memory, _numbers, _budget, _answers)
