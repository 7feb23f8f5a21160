"""`Model`: a learner with the names of its classes and its metadata."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from engram.errors import DataError, UsageError, unknown
from engram.methods import Learner, make
from engram.model.held_out import Calibration, ClassSimilarity, Count, HeldOutCounts, RejectionThreshold
from engram.model.manifest import Strict
from engram.network import portable_name, threads_for

NOT_SAVED = ("weights", "unlabelled", "device")  # settings about where files are, or the machine, not about the model


@dataclass(frozen=True, kw_only=True)
class Adaptation(Strict):
    """How well stored features were adapted, estimated on held-out images of the new classes."""

    images: Count
    omega: float  # the mean cosine between adapted features and those of the new network
    omega_unadapted: float  # the same without adaptation
    adapted: bool = True  # False: features were better left as they were


@dataclass(frozen=True, kw_only=True)
class Metadata(Strict):
    """What is known of a model beside its tensors, settings and class names."""

    seen: tuple[Count, ...] = ()  # samples learned of each class, by class index
    budget: Annotated[int, Field(ge=1)] | None = None  # bytes that stored features and exemplars may take
    features_per_class: Annotated[int, Field(ge=1)] | None = None  # as requested; the budget may allow fewer
    calibration: Calibration = field(default_factory=Calibration)
    adaptation: Adaptation | None = None  # of the last update; None if nothing was adapted
    held_out_counts: HeldOutCounts = field(default_factory=HeldOutCounts)
    epochs: Annotated[int, Field(ge=1)] | None = None  # requested for the last update; None: chosen by its size
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0  # the share held out in the last update
    # For `IncrementalClassifier`:
    labels: Literal["text", "int", "float", "bool"] = "text"  # the type of the labels that class names stand for
    announced: tuple[str, ...] = ()  # classes announced by `partial_fit` and not learned yet
    feature_names: tuple[str, ...] = ()  # of the inputs' columns, if they have names


@dataclass(frozen=True, eq=False)
class Model:
    """A learner that has learned, and the names of its classes."""

    learner: Learner
    names: tuple[str, ...]  # by class index
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
        """Calibrated probabilities (n, K) of raw inputs."""
        return self.calibrated(self.scores(inputs))

    def classify(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Calibrated probabilities (n, K) of raw inputs, and their similarity (n,) to the nearest class mean."""
        with threads_for(self.learner.shape_):
            features = self.learner.features(inputs)
            probabilities = self.calibrated(self.learner.classify(features))
            return probabilities, None if self.class_similarity is None else self.class_similarity(features)

    def calibrated(self, scores: Tensor) -> Tensor:
        """Scores (n, K) as probabilities."""
        return torch.softmax(scores / self.metadata.calibration.temperature, dim=1)

    @property
    def is_calibrated(self) -> bool:
        """Whether probabilities were calibrated on held-out images; otherwise they only rank the classes."""
        return self.metadata.calibration.temperature != 1 or self.metadata.calibration.error_after is not None

    @cached_property
    def class_similarity(self) -> ClassSimilarity | None:
        """Tells images of unknown classes from known ones; None if the stored features do not allow it."""
        return ClassSimilarity.of(self.learner)

    @property
    def rejection(self) -> RejectionThreshold | None:
        """The threshold of `--reject auto`."""
        return None if self.class_similarity is None else self.class_similarity.threshold()

    def class_index(self, name: str) -> int:
        """The index of a class, by its name."""
        if name not in self.names:
            raise unknown("class", name, self.names)
        return self.names.index(name)

    def label(self, name: str) -> int:
        """The learner's label of a class, by its name."""
        return self.learner.classes_[self.class_index(name)]

    @property
    def image_size(self) -> int | None:
        """The side of the square images that it takes; None if its inputs are vectors."""
        return self.learner.shape_[0] if len(self.learner.shape_) == 3 else None

    @property
    def blank_input(self) -> Tensor:
        """A black image, or a vector of zeros, as a batch of one."""
        return blank_inputs(1, self.learner.shape_)

    def __reduce__(self) -> tuple[Any, ...]:
        # As in a folder: settings and tensors, from which the learner is built again.
        settings = {**_settings(self.learner), "network": self.learner.network, "device": self.learner.device}
        tensors = {name: tensor.cpu() for name, tensor in self.learner.state().items()}
        return _unpickle, (self.learner.name, settings, tensors, self.names, self.metadata)


def blank_inputs(count: int, shape: tuple[int, ...]) -> Tensor:
    """Black images (count, h, w, c), or vectors of zeros (count, d)."""
    return torch.zeros(count, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)


def _unpickle(
    method: str, settings: dict[str, Any], tensors: dict[str, Tensor], names: tuple[str, ...], metadata: Metadata
) -> Model:
    learner = make(method, **settings)
    learner.restore(tensors)
    return Model(learner, names, metadata)


def settings_of(learner: Learner) -> dict[str, Any]:
    """The settings that are saved: `make(learner.name, **settings)` gives a learner that can restore its state."""
    if isinstance(learner.network, nn.Module):
        raise UsageError("A network of one's own cannot be saved in a model's folder. Use one that has a name.")
    return _settings(learner)


def _settings(learner: Learner) -> dict[str, Any]:
    settings = learner.settings()
    if isinstance(learner.network, str):
        settings["network"] = portable_name(learner.network)
    return {name: value for name, value in settings.items() if name not in NOT_SAVED}


def with_settings(learner: Learner, /, **changed: Any) -> Learner:
    """A copy of a learner, with what it has learned, and some settings changed."""
    other = unlearned(learner, **changed)
    if learner.tasks_:
        other.restore(learner.state())
    return other


def unlearned(learner: Learner, /, **changed: Any) -> Learner:
    """A new learner with the settings of another, some of them changed."""
    own = {name: getattr(learner, name) for name in ("network", "unlabelled", "device") if hasattr(learner, name)}
    return make(learner.name, **{**_settings(learner), **own, **changed})


def with_metadata(model: Model, **changed: Any) -> Model:
    """The same model with some metadata changed."""
    return replace(model, metadata=replace(model.metadata, **changed))
