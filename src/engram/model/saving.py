"""Loading a `Model` from its folder and saving it there: nothing is loaded or saved that `verify` would reject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic
import torch
from torch import Tensor

from engram.errors import DataError, EngramError, UsageError, unknown
from engram.methods import METHODS, make
from engram.model.checks import check_shapes, check_values, contradictions, inconsistencies
from engram.model.folder import KEEP, Writer
from engram.model.manifest import Manifest
from engram.model.model import Metadata, Model, settings_of
from engram.model.reading import FolderReader
from engram.storage import TensorShape

_METADATA = pydantic.TypeAdapter(Metadata)


def load(folder: FolderReader, *, generation: int | None = None, device: str = "auto") -> Model:
    """The model in a folder, from the generation in use or an earlier one."""
    return load_generation(folder, generation, device=device)[1]


def load_generation(
    folder: FolderReader, generation: int | None = None, device: str = "auto"
) -> tuple[Manifest, Model]:
    """`load`, with the manifest of the generation."""
    manifest, tensors = folder.load(generation, check_shapes)
    return manifest, restore_model(manifest, tensors, device)


def restore_model(manifest: Manifest, tensors: Mapping[str, Tensor], device: str) -> Model:
    """The model that a manifest and its tensors describe; DataError if they do not fit together."""
    if manifest.method not in METHODS:
        raise unknown("method", manifest.method, METHODS, "engram methods")
    check_shapes(manifest, _shapes(tensors))
    check_values(tensors)
    try:
        learner = make(manifest.method, **{**manifest.settings, "device": device})
        metadata = _METADATA.validate_python(manifest.details)
        learner.restore(tensors)
        learner.classify(torch.zeros(1, learner.trained.dimension))  # its tensors may not fit the features
    except UsageError as error:  # of a version with other settings
        raise DataError(f"The model was saved by engram {manifest.engram} and cannot be restored. {error}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"The model's details are inconsistent: {where}: {first['msg']}.") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"The model's tensors do not fit together: {error!r}") from error
    model = Model(learner, manifest.classes, metadata)
    for problem in contradictions(model):
        raise DataError(problem)
    return model


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, TensorShape]:
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    return {name: TensorShape(kinds[name], tuple(tensor.shape)) for name, tensor in tensors.items()}


def save(
    writer: Writer,
    model: Model,
    *,
    action: str,
    record: Mapping[str, Any] | None = None,
    keep: int = KEEP,
    alone: bool = False,
) -> Manifest:
    """Publish a model as the next generation of its folder; see `Writer.publish`.

    EngramError if `verify` would reject it: then nothing is published.
    """
    state = model.learner.state()
    for problem in inconsistencies(model):
        raise EngramError(f"The model was not published. {problem}")
    return writer.publish(
        state,
        action=action,
        method=model.learner.name,
        settings=settings_of(model.learner),
        classes=model.names,
        details=_METADATA.dump_python(model.metadata, mode="json"),
        record=record,
        keep=keep,
        alone=alone,
    )
