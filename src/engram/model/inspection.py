"""What a model knows and keeps: `inspect` tells it in counts and bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engram.features import FeatureMemory, ImageMemory
from engram.methods import METHODS, Learner, make
from engram.model.evidence import HeldOutCounts
from engram.model.folder import ModelFolder
from engram.model.manifest import Change
from engram.model.model import Adaptation, Calibration, Model, restore_model, settings_of
from engram.network import choose_extractor


@dataclass(frozen=True, kw_only=True)
class ClassSummary:
    """A class, and what is kept of it."""

    name: str
    features: int  # stored vectors
    images: int  # stored images
    bytes: int  # of both, without what all vectors share
    seen: int  # samples that were learned


@dataclass(frozen=True, kw_only=True)
class ByteCounts:
    """Where the bytes are."""

    features: int  # stored vectors
    shared: int  # of these: what belongs to no single one, such as a codebook
    images: int  # stored images
    memory: int  # both: what the budget limits
    network: int
    classifier: int
    folder: int  # all files, with those of earlier generations


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a generation came about, and whether it is still there."""

    generation: int
    created: str
    action: str
    details: Mapping[str, Any]
    kept: bool  # it can be gone back to
    in_use: bool
    learned: Mapping[str, int]  # numbers of new and known classes and of their samples; empty unless it was an update


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What a model knows and keeps."""

    generation: int
    created: str
    engram: str  # the version that wrote it
    method: str
    network: str
    image_size: int | None  # None: it learns vectors
    classes: tuple[ClassSummary, ...]
    bytes: ByteCounts
    budget: int | None
    features_per_class: int | None  # asked for; the setting is what the budget leaves of it
    codec: str  # how vectors are kept; another that is set holds from the next lesson on
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]  # the method's
    changed: Mapping[str, Any]  # the settings that differ from them
    classifier: str
    held_out_counts: HeldOutCounts  # how held-out images of each class are recognised
    accuracy: float | None  # over all classes with held-out images
    interval: tuple[float, float] | None
    calibration: Calibration
    adaptation: Adaptation | None
    history: tuple[Generation, ...]  # every one there ever was, oldest first

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def inspect(folder: ModelFolder) -> ModelSummary:
    """What the model of a folder knows and keeps."""
    manifest, tensors = folder.load()
    model = restore_model(manifest, tensors, "cpu")
    learner, settings = model.learner, settings_of(model.learner)
    defaults = _defaults(learner, settings)
    memory, accuracy = learner.memory, model.metadata.held_out_counts.accuracy()
    return ModelSummary(
        generation=manifest.generation,
        created=manifest.created,
        engram=manifest.engram,
        method=learner.name,
        network=choose_extractor(learner.shape_) if learner.network == "auto" else str(learner.network),
        image_size=model.image_size,
        classes=_classes(model),
        bytes=ByteCounts(
            features=memory.features.nbytes,
            shared=memory.features.nbytes - len(memory.features) * memory.features.row_bytes,
            images=memory.images.nbytes,
            memory=memory.nbytes,
            network=sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("network.")),
            classifier=sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("classifier.")),
            folder=folder_bytes(folder.path),
        ),
        budget=model.metadata.budget,
        features_per_class=model.metadata.features_per_class,
        codec=memory.features.codec,
        settings=settings,
        defaults=defaults,
        changed={name: value for name, value in settings.items() if value != defaults.get(name)},
        classifier=learner.classifier_description,
        held_out_counts=model.metadata.held_out_counts,
        accuracy=None if accuracy is None else accuracy.value,
        interval=None if accuracy is None else (accuracy.low, accuracy.high),
        calibration=model.metadata.calibration,
        adaptation=model.metadata.adaptation,
        history=_history(folder.history(), set(folder.generations()), manifest.generation),
    )


def folder_bytes(path: Path) -> int:
    """The bytes of all files below a folder. What is removed meanwhile does not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _classes(model: Model) -> tuple[ClassSummary, ...]:
    memory = model.learner.memory
    features, images = (_counts(kind, len(model.names)) for kind in (memory.features, memory.images))
    sizes = [kind.row_bytes for kind in (memory.features, memory.images)]
    return tuple(
        ClassSummary(
            name=name, features=vectors, images=pictures, bytes=vectors * sizes[0] + pictures * sizes[1], seen=seen
        )
        for name, vectors, pictures, seen in zip(model.names, features, images, model.metadata.seen, strict=True)
    )


def _counts(memory: FeatureMemory | ImageMemory, classes: int) -> list[int]:
    """How many rows each class has. A memory that was never used has no counts."""
    return memory.counts.tolist() or [0] * classes


def _defaults(learner: Learner, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the method sets where nothing is asked for; with another objective, what that one sets."""
    default = settings_of(make(learner.name, objective=settings["objective"]))
    return {**default, "objective": METHODS[learner.name].objective}


def _history(changes: tuple[Change, ...], there: set[int], current: int) -> tuple[Generation, ...]:
    return tuple(
        Generation(
            generation=change.generation,
            created=change.created,
            action=change.action,
            details=change.details,
            kept=change.generation in there,
            in_use=change.generation == current,
            learned=_learned(change.details),
        )
        for change in changes
    )


def _learned(details: Mapping[str, Any]) -> dict[str, int]:
    learned: dict[str, int] = {}
    for kind in ("new", "more"):
        counts = details.get(kind)
        if isinstance(counts, dict):  # samples of each class
            learned |= {kind: len(counts), f"{kind}_samples": sum(counts.values())}
        elif isinstance(counts, list):  # of a generation that was deleted: numbers of classes and of samples
            learned |= {kind: counts[0], f"{kind}_samples": counts[1]}
    return learned
