"""A `Model` in its folder: load, save and verify. Nothing is loaded or saved that `verify` would reject.

A model may come from someone else: the types and shapes of its tensors are checked before they are read, and nothing is
allocated or computed before its size is known to be plausible; then their values and whether they fit together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor

from engram.errors import DataError, EngramError, TrainingError, UsageError, unknown
from engram.features import FeatureMemory, ImageMemory
from engram.methods import METHODS, make
from engram.model.folder import ModelFolder, Writer
from engram.model.manifest import Manifest, version_path
from engram.model.model import NOT_SAVED, Metadata, Model, settings_of
from engram.model.plan import LARGEST_SIDE
from engram.network import NETWORKS
from engram.network.hub import PREFIX
from engram.storage import TensorShape, machine_memory
from engram.text import printable

_METADATA = pydantic.TypeAdapter(Metadata)
LENGTH_TOLERANCE = 1e-3  # how far the norm of a stored feature vector may be from 1
DESCRIPTION = "network.extractor.description"  # of a network of the hub, without which it would be downloaded

# Type and shape of each tensor. A letter stands for the same number everywhere: K classes, d numbers of a feature.
REQUIRED = {
    **{name: "int64 K" for name in ("classes", "task_of_class")},
    **{"shape": "int64 s", "tasks": "int64 1", "pretrained": "int64 1"},
    **{"network.mean": "float32 c", "network.std": "float32 c", "network.head.weight": "float32 K d"},
    **{"memory.features.counts": "int64 k", "memory.images.counts": "int64 i"},
}
KNOWN = {
    **REQUIRED,
    **{"network.head.bias": "float32 K", "network.head.newest": "bool K"},
    **{f"network.head.{name}": "float32" for name in ("scale", "alpha", "beta")},
    **{f"network.head.{name}": "float32 K" for name in ("shift", "first_score", "first_confidence")},
    "network.head.preferred": "bool K",
    **{"classifier.classes": "int64 K", "classifier.weight": "float32 K w", "classifier.intercept": "float32 K"},
    **{"classifier.chosen": "int64", "classifier.dimension": "int64", "classifier.precision": "float32 K d d"},
    **{"memory.features.rows": "float32|float16 n f", "memory.features.held_out": "bool n"},
    **{"memory.features.codes": "uint8 n p", "memory.features.codebook": "float16 p r l"},
    **{"memory.features.lowest": "float32 f", "memory.features.steps": "float32 f"},
    "memory.features.rotation": "float16 f f",
    **{"memory.statistics.counts": "int64 t", "memory.statistics.means": "float32 t u"},
}
PARTS = ("network.", "classifier.", "memory.")  # in which a network, classifier or codec of one's own has other tensors
PLAIN_TYPES = ("float32", "float16", "int64", "uint8", "bool")


def load(folder: ModelFolder, *, version: int | None = None, device: str = "auto") -> Model:
    """The model in a folder, from the version in use or an earlier one."""
    return load_version(folder, version, device=device)[1]


def load_version(folder: ModelFolder, version: int | None = None, device: str = "auto") -> tuple[Manifest, Model]:
    """`load`, with the manifest of the version."""
    manifest, tensors = folder.load(version, check_shapes)
    return manifest, restore_model(manifest, tensors, device)


def restore_model(manifest: Manifest, tensors: Mapping[str, Tensor], device: str) -> Model:
    """The model that a manifest and its tensors describe; DataError if they do not fit together."""
    if manifest.method not in METHODS:
        raise unknown("method", manifest.method, METHODS, "engram methods")
    metadata = _check_state(manifest, tensors)
    try:
        learner = make(manifest.method, **{**manifest.settings, "device": device})
        learner.restore(tensors)
        model = Model(learner, manifest.classes, metadata)
        with suppress(TrainingError):  # not finite, which `inconsistencies` reports
            model.scores(model.blank_input)  # its tensors may not fit each other, or inputs of this shape
        problem = next(contradictions(model), None)
    except UsageError as error:  # of a version with other settings
        raise DataError(f"The model was saved by engram {manifest.engram} and cannot be restored. {error}") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"The model's tensors do not fit together: {error!r}") from error
    if problem is not None:
        raise DataError(problem)
    return model


def _check_state(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Metadata:
    """The metadata of a model with this manifest; DataError unless it can have these tensors."""
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    shapes = {name: TensorShape(kinds[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
    check_shapes(manifest, shapes)
    check_values(tensors)
    try:
        return _METADATA.validate_python(manifest.details)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"The model's details are inconsistent: {where}: {first['msg']}.") from error


def save(
    writer: Writer,
    model: Model,
    *,
    action: str,
    record: Mapping[str, Any] | None = None,
    alone: bool = False,
) -> Manifest:
    """Publish a model as the next version of its folder; see `Writer.publish`.

    EngramError if `verify` would reject it: then nothing is published.
    """

    def check(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        try:
            _check_state(manifest, tensors)
            for problem in inconsistencies(model):
                raise DataError(problem)
        except DataError as error:
            raise EngramError(f"The model was not published. {error}") from error

    return writer.publish(
        model.learner.state(),
        check=check,
        action=action,
        method=model.learner.name,
        settings=settings_of(model.learner),
        classes=model.names,
        details=_METADATA.dump_python(model.metadata, mode="json"),
        record=record,
        alone=alone,
    )


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What `verify` found."""

    versions: tuple[int, ...]  # that were checked
    in_use: int | None
    newer: tuple[int, ...]  # those that `current.json` does not name, but are newer than all it names
    leftovers: tuple[str, ...]  # files and folders of interrupted writes, which the next writer removes
    bytes: int  # of the folder
    problems: tuple[str, ...]  # a sentence each

    @property
    def intact(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"intact": self.intact, **asdict(self)}


def verify(folder: ModelFolder) -> VerifyResult:
    """Compare every file with its checksum, and check that each intact version is consistent. This only reads."""
    problems = folder.problems(_check, check_shapes)
    return VerifyResult(
        versions=tuple(sorted(folder.digests() if folder.exists() else ())),
        in_use=folder.number_in_use(),
        newer=tuple(folder.newer()),
        leftovers=tuple(folder.leftovers()),
        bytes=folder_bytes(folder.path),
        problems=tuple(problems),
    )


def _check(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    name = version_path(manifest.version)
    try:
        for problem in inconsistencies(restore_model(manifest, tensors, "cpu")):
            yield f"{name}: {printable(problem)}"
    except EngramError as error:
        yield f"{name}: {printable(error)}"
    except Exception as error:  # inconsistent tensors can raise any
        yield f"{name}: It cannot be used: {printable(repr(error))}."


def folder_bytes(path: Path) -> int:
    """The bytes of all files in a folder. Files that are removed meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def check_shapes(manifest: Manifest, shapes: Mapping[str, TensorShape]) -> None:
    """Raise DataError unless a model can have tensors of these types and shapes, and the manifest's settings."""
    if missing := sorted(REQUIRED.keys() - shapes.keys()):
        raise DataError(f"The saved state is not of a learner: it lacks {missing[0]}.")
    sizes = {"1": 1, "K": len(manifest.classes)}
    for name, (kind, shape) in shapes.items():
        if name not in KNOWN:
            if not name.startswith(PARTS) or kind not in PLAIN_TYPES:
                raise DataError(f"The model has a tensor {name} of type {kind}, which no model has.")
            continue
        kinds, *letters = KNOWN[name].split()
        fits = kind in kinds.split("|") and len(shape) == len(letters)
        if not fits or any(sizes.setdefault(letter, size) != size for letter, size in zip(letters, shape, strict=True)):
            expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
            raise DataError(f"The tensor {name} is {kind} {tuple(shape)} instead of {kinds} ({expected}).")
    decoded = 4 * sizes.get("n", 0) * max(sizes["d"], sizes.get("p", 0) * sizes.get("l", 0))
    if decoded > (memory := machine_memory()):  # a vector may be stored in one byte
        raise DataError(f"Its stored features take {decoded:,} bytes; this machine has {memory:,} bytes of memory.")
    if foreign := sorted(set(NOT_SAVED) & manifest.settings.keys()):
        raise DataError(f"The model has the setting '{foreign[0]}', which is of a machine and not of a model.")
    network = manifest.settings.get("network", "auto")
    if network not in (*NETWORKS, "auto") and not (str(network).startswith(PREFIX) and DESCRIPTION in shapes):
        raise DataError(f"The model's network {network!r} is none that engram has, and the model does not describe it.")


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise DataError unless the numbers that say how much to allocate are plausible."""
    shape, channels = tensors["shape"].tolist(), len(tensors["network.mean"])
    is_image = len(shape) == 3 and max(shape[:2]) <= LARGEST_SIDE and shape[2] <= 4 and min(shape) > 0
    normalised = channels in (1, *shape[-1:]) or shape[-1:] == [1]
    if not (is_image and normalised) and shape != [channels]:
        raise DataError(f"Inputs of shape {tuple(shape)} are neither images up to {LARGEST_SIDE} pixels nor vectors.")
    dimension = tensors["network.head.weight"].shape[1]
    if int(tensors.get("classifier.dimension", dimension)) != dimension:
        raise DataError(f"The classifier is not of features of {dimension} numbers.")
    for name in ("features", "images"):
        counts = tensors[f"memory.{name}.counts"]
        if bool((counts < 0).any()):
            raise DataError(f"A count of stored {name} is negative.")


def contradictions(model: Model) -> Iterator[str]:
    """A sentence for each part of a model that does not fit the others."""
    learner, classes, memory = model.learner, len(model.names), model.learner.memory
    if len(set(learner.classes_)) < classes:
        yield "Two of its classes have one label."
    if not all(0 <= task < learner.tasks_ for task in learner.task_of_class_):
        yield f"It does not say for each of its {classes} classes which of {learner.tasks_} tasks brought it."
    counts = model.metadata.held_out_counts
    wrong = len(counts.correct) != len(counts.total) or len(counts.total) not in (0, classes)
    if wrong or not all(0 <= correct <= total for correct, total in zip(counts.correct, counts.total, strict=True)):
        yield f"It does not count correct predictions of {classes} classes."
    if learner.classifier_ is not None and learner.classifier_.classes_.tolist() != list(range(classes)):
        yield f"Its classifier does not have a row for each of its {classes} classes."
    yield from _wrong_rows("features", memory.features, classes, (learner.trained.dimension,))
    yield from _wrong_rows("images", memory.images, classes, learner.shape_)


def _wrong_rows(kind: str, memory: FeatureMemory | ImageMemory, classes: int, shape: tuple[int, ...]) -> Iterator[str]:
    counts, rows = memory.counts.tolist(), memory.rows
    if len(counts) not in (0, classes):
        yield f"Its stored {kind} are counted for {len(counts)} instead of {classes} classes."
    if sum(counts) != len(memory):
        yield f"It has {len(memory)} stored {kind}, and counts {sum(counts)}."
    if len(memory) and tuple(rows.shape[1:]) != shape:
        yield f"Its stored {kind} are of the shape {tuple(rows.shape[1:])} instead of {shape}."
    expected = torch.uint8 if kind == "images" and len(shape) == 3 else torch.float32
    if len(memory) and rows.dtype != expected:
        yield f"Its stored {kind} are of the type {rows.dtype} instead of {expected}."


def inconsistencies(model: Model) -> Iterator[str]:
    """A sentence for each reason why a model cannot be relied on: contradictions, and numbers that make no sense."""
    yield from contradictions(model)
    learner, memory, budget = model.learner, model.learner.memory, model.metadata.budget
    for name, tensor in learner.state().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield f"Its {name} has numbers that are not finite."
    rows = memory.features.rows
    if wrong := int(((rows.norm(dim=1) - 1).abs() > LENGTH_TOLERANCE).sum()):
        yield f"{wrong} of its {len(rows)} stored features are not of unit length."
    if budget is not None and memory.nbytes > budget:
        yield f"It stores {memory.nbytes:,} bytes, which is more than its budget of {budget:,}."
    probabilities = model.probabilities(model.blank_input)
    if probabilities.shape != (1, len(model.names)) or not bool(probabilities.isfinite().all()):
        yield "It does not give each class a probability."
