"""`Model`: a learner with the names of its classes and what it knows about itself, in memory and in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn

from engram.errors import DataError, UsageError, unknown
from engram.methods import METHODS, Learner, make
from engram.model.evidence import HeldOutCounts
from engram.model.folder import KEEP, ModelFolder, Writer
from engram.model.manifest import Manifest
from engram.network import portable_name, threads_for

NOTHING_ELSE = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]

NOT_KEPT = ("weights", "unlabelled", "device")  # settings that say where something was, not what the model is


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How sure the model may be, found on images it had not seen."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = NOTHING_ELSE
    temperature: Annotated[float, Field(gt=0)] = 1.0  # what scores are divided by before they become probabilities
    images: Count = 0  # held out, on which the rest was measured; with none the temperature is the last one found
    error_before: Share | None = None  # expected calibration error with the temperature before
    error_after: Share | None = None  # and with this one


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How well stored vectors were carried over, estimated on images of the new task that were held out."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = NOTHING_ELSE
    images: Count
    omega: float  # the mean cosine between a vector carried over and the new network's own
    omega_unadapted: float  # the same, had it been left as it was
    adapted: bool = True  # False: that was better, so all were left as they were


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What is known of a model beside its tensors, settings and names."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = NOTHING_ELSE
    seen: tuple[Count, ...] = ()  # how many samples of each class were learned, in the order of the columns
    budget: Annotated[int, Field(ge=1)] | None = None  # bytes that all that is kept may take
    features_per_class: Annotated[int, Field(ge=1)] | None = (
        None  # asked for; the setting is what the budget left of it
    )
    calibration: Calibration = field(default_factory=Calibration)
    adaptation: Adaptation | None = None  # of the last update; None where nothing was adapted
    held_out_counts: HeldOutCounts = field(
        default_factory=HeldOutCounts
    )  # how held-out images of each class are recognised
    epochs: Annotated[int, Field(ge=1)] | None = None  # asked for, the last time; None: chosen by what arrived
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0  # the share held out, the last time
    # What `IncrementalClassifier` is to find again.
    labels: Literal["text", "int", "float", "bool"] = "text"  # what the names of the classes stand for
    announced: tuple[str, ...] = ()  # classes that were said to come, and have not yet
    feature_names: tuple[str, ...] = ()  # of the numbers of a vector, where they have any


_FACTS = pydantic.TypeAdapter(Metadata)


@dataclass(frozen=True, eq=False)
class Model:
    """A learner that has learned, and the names of its classes."""

    learner: Learner
    names: tuple[str, ...]  # in the order of the learner's columns
    metadata: Metadata = field(default_factory=Metadata)

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.learner.classes_) == len(self.metadata.seen):
            raise DataError(
                f"The model is inconsistent: it has {len(self.names)} names and {len(self.metadata.seen)} counts "
                f"for {len(self.learner.classes_)} classes."
            )

    def scores(self, inputs: Tensor) -> Tensor:
        """Scores (n, K) of raw inputs, columns in the order of `names`."""
        with threads_for(self.learner.shape_):
            return self.learner.scores(inputs)

    def probabilities(self, inputs: Tensor) -> Tensor:
        """Probabilities (n, K) of raw inputs, calibrated."""
        return self.calibrated(self.scores(inputs))

    def calibrated(self, scores: Tensor) -> Tensor:
        """Scores (n, K) as probabilities."""
        return torch.softmax(scores / self.metadata.calibration.temperature, dim=1)

    @property
    def is_calibrated(self) -> bool:
        """Whether probabilities were calibrated on held-out images; otherwise they only rank the classes."""
        return self.metadata.calibration.temperature != 1 or self.metadata.calibration.error_after is not None

    def class_index(self, name: str) -> int:
        """Which column a class has, by its name."""
        if name not in self.names:
            raise unknown("class", name, self.names)
        return self.names.index(name)

    def label(self, name: str) -> int:
        """The learner's label of a class, by its name."""
        return self.learner.classes_[self.class_index(name)]

    def __reduce__(self) -> tuple[Any, ...]:
        # As in a folder: settings and tensors, from which a learner is made anew, and nothing that it has by the way.
        settings = {**_settings(self.learner), "network": self.learner.network, "device": self.learner.device}
        tensors = {name: tensor.cpu() for name, tensor in self.learner.state().items()}
        return _unpickled, (self.learner.name, settings, tensors, self.names, self.metadata)

    @property
    def image_size(self) -> int | None:
        """The side of the squares that its images are; None where its inputs are vectors."""
        return self.learner.shape_[0] if len(self.learner.shape_) == 3 else None


def _unpickled(
    method: str, settings: dict[str, Any], tensors: dict[str, Tensor], names: tuple[str, ...], facts: Metadata
) -> Model:
    learner = make(method, **settings)
    learner.restore(tensors)
    return Model(learner, names, facts)


def settings_of(learner: Learner) -> dict[str, Any]:
    """All settings, so that `make(learner.name, **settings)` gives a learner that can take over its state."""
    if isinstance(learner.network, nn.Module):
        raise UsageError("A network of one's own cannot be kept in a model's folder. Use one that has a name.")
    return _settings(learner)


def _settings(learner: Learner) -> dict[str, Any]:
    settings = learner.settings()
    if isinstance(learner.network, str):
        settings["network"] = portable_name(learner.network)
    return {name: value for name, value in settings.items() if name not in NOT_KEPT}


def remake(learner: Learner, /, **changed: Any) -> Learner:
    """A learner with the same settings but for those `changed`, which knows what this one knows."""
    other = unlearned(learner, **changed)
    if learner.tasks_:
        other.restore(learner.state())
    return other


def unlearned(learner: Learner, /, **changed: Any) -> Learner:
    """A learner with the same settings but for those `changed`, which knows nothing yet."""
    own = {name: getattr(learner, name) for name in ("network", "unlabelled", "device") if hasattr(learner, name)}
    return make(learner.name, **{**_settings(learner), **own, **changed})


def load(folder: ModelFolder, *, generation: int | None = None, device: str = "auto") -> Model:
    """The model of a folder, as it is now or was in an earlier generation."""
    manifest, tensors = folder.load(generation)
    return restore_model(manifest, tensors, device)


def restore_model(manifest: Manifest, tensors: Mapping[str, Tensor], device: str) -> Model:
    """The model that a manifest and its tensors are, or why they are none."""
    if manifest.method not in METHODS:
        raise unknown("method", manifest.method, METHODS, "engram methods")
    try:
        learner = make(manifest.method, **{**manifest.settings, "device": device})
        facts = _FACTS.validate_python(manifest.details)
    except UsageError as error:  # of an engram that knew other settings
        raise DataError(f"The model was saved by engram {manifest.engram}, and cannot be made anew. {error}") from error
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise DataError(f"The model's details are inconsistent: {where}: {problem['msg']}.") from error
    learner.restore(tensors)
    return Model(learner, manifest.classes, facts)


def save(
    writer: Writer,
    model: Model,
    *,
    action: str,
    record: Mapping[str, Any] | None = None,
    keep: int = KEEP,
    alone: bool = False,
) -> Manifest:
    """Publish a model as the next generation of its folder; see `Writer.publish`."""
    return writer.publish(
        model.learner.state(),
        action=action,
        method=model.learner.name,
        settings=settings_of(model.learner),
        classes=model.names,
        details=_FACTS.dump_python(model.metadata, mode="json"),
        record=record,
        keep=keep,
        alone=alone,
    )


def with_metadata(model: Model, **changed: Any) -> Model:
    """The same model, with other facts."""
    return replace(model, metadata=replace(model.metadata, **changed))
