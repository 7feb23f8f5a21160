"""`inspect`: what a model knows and stores, in counts and bytes, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engram.data import Samples
from engram.methods import METHODS, make
from engram.model.folder import ModelFolder
from engram.model.held_out import Calibration, HeldOutCounts, RejectionThreshold, value_and_interval
from engram.model.model import Adaptation, Model, settings_of
from engram.model.saving import folder_bytes, load_version
from engram.network import choose_extractor


@dataclass(frozen=True, kw_only=True)
class ClassSummary:
    """A class, and what is stored of it."""

    name: str
    features: int  # stored features
    images: int  # exemplars
    bytes: int  # of these and of statistics, without what all classes share
    seen: int  # samples that were learned


@dataclass(frozen=True, kw_only=True)
class ByteCounts:
    """Where the bytes are."""

    features: int  # stored features
    shared: int  # the part of the memory that belongs to no single class, such as a codebook
    images: int  # exemplars
    statistics: int  # means and covariances of classes
    memory: int  # all of these: what the budget limits
    network: int
    classifier: int
    folder: int  # all files, including earlier versions


@dataclass(frozen=True, kw_only=True)
class Version:
    """An entry of the history: how a version was made, and whether it is still there."""

    version: int
    created: str
    action: str
    details: Mapping[str, Any]
    stored: bool  # whether it is still there, to roll back to
    in_use: bool
    learned: Mapping[str, int]  # numbers of new and known classes and of their samples; empty unless it was an update


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What a model knows and stores."""

    version: int
    created: str
    engram: str  # the version that wrote it
    method: str
    network: str
    image_size: int | None  # None: its inputs are vectors
    classes: tuple[ClassSummary, ...]
    bytes: ByteCounts
    budget: int | None
    features_per_class: int | None  # as requested; the setting is what the budget allows
    codec: str  # of the stored features; a changed setting takes effect with the next update
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]  # the method's
    changed: Mapping[str, Any]  # the settings that differ from them
    classifier: str
    held_out_counts: HeldOutCounts
    accuracy: float | None  # over all classes with held-out images
    interval: tuple[float, float] | None  # 95 %
    calibration: Calibration
    rejection: RejectionThreshold | None  # of `--reject auto`; None: it cannot be estimated
    adaptation: Adaptation | None
    history: tuple[Version, ...]  # every version that was ever made, oldest first

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def inspect(folder: ModelFolder) -> ModelSummary:
    """Summarise the model in a folder."""
    manifest, model = load_version(folder, device="cpu")
    learner, metadata, settings = model.learner, model.metadata, settings_of(model.learner)
    memory, (accuracy, interval) = learner.memory, value_and_interval(metadata.held_out_counts.accuracy())
    tensors, defaults = learner.state(), _defaults(model)

    def nbytes(prefix: str) -> int:
        return sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(prefix))

    return ModelSummary(
        version=manifest.version,
        created=manifest.created,
        engram=manifest.engram,
        method=learner.name,
        network=choose_extractor(learner.shape_) if learner.network == "auto" else str(learner.network),
        image_size=model.image_size,
        classes=_classes(model),
        bytes=ByteCounts(
            features=memory.features.nbytes,
            shared=memory.shared_bytes,
            images=memory.images.nbytes,
            statistics=memory.statistics.nbytes,
            memory=memory.nbytes,
            network=nbytes("network."),
            classifier=nbytes("classifier."),
            folder=folder_bytes(folder.path),
        ),
        budget=metadata.budget,
        features_per_class=metadata.features_per_class,
        codec=memory.features.codec,
        settings=settings,
        defaults=defaults,
        changed={name: value for name, value in settings.items() if value != defaults.get(name)},
        classifier=learner.classifier_description,
        held_out_counts=metadata.held_out_counts,
        accuracy=accuracy,
        interval=interval,
        calibration=metadata.calibration,
        rejection=model.rejection,
        adaptation=metadata.adaptation,
        history=_history(folder, manifest.version),
    )


def _defaults(model: Model) -> dict[str, Any]:
    """The default settings of the model's method, with what None stands for in a network like its own."""
    learner = model.learner
    default = make(learner.name, objective=learner.settings()["objective"])
    settings = {**settings_of(default), "objective": METHODS[learner.name].objective}
    default.network_ = learner.network_
    resolved = default.resolved_settings(Samples.of(model.blank_input, torch.tensor([0])))
    return {name: resolved.get(name) if value is None else value for name, value in settings.items()}


def _classes(model: Model) -> tuple[ClassSummary, ...]:
    features, images = model.learner.memory.features, model.learner.memory.images
    own = model.learner.memory.statistics.row_bytes
    none = [0] * len(model.names)  # a memory that was never used has no counts
    counts = zip(
        features.counts.tolist() or none, images.counts.tolist() or none, model.names, model.metadata.seen, strict=True
    )
    return tuple(
        ClassSummary(
            name=name, features=f, images=i, bytes=f * features.row_bytes + i * images.row_bytes + own, seen=seen
        )
        for f, i, name, seen in counts
    )


def _history(folder: ModelFolder, current: int) -> tuple[Version, ...]:
    stored = folder.versions()
    return tuple(
        Version(
            **vars(change),
            stored=change.version in stored,
            in_use=change.version == current,
            learned=_learned(change.details),
        )
        for change in folder.history()
    )


def _learned(details: Mapping[str, Any]) -> dict[str, int]:
    learned: dict[str, int] = {}
    for kind in (kind for kind in ("new", "more") if kind in details):
        counts = details[kind]  # samples of each class; of a deleted version, the numbers of classes and of samples
        classes, samples = (len(counts), sum(counts.values())) if isinstance(counts, dict) else counts
        learned |= {kind: classes, f"{kind}_samples": samples}
    return learned
