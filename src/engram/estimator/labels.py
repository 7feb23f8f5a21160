"""Labels of any type as the names of a model's classes, and back: `Metadata.labels` records their type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engram.errors import DataError
from engram.model import Model

Array = NDArray[Any]
Kind = Literal["text", "int", "float", "bool"]

KINDS: dict[str, Kind] = {"b": "bool", "i": "int", "u": "int", "f": "float", "U": "text", "O": "text", "T": "text"}
TYPE_NAMES: dict[Kind, str] = {"text": "texts", "int": "whole numbers", "float": "floats", "bool": "True and False"}


def kind_of(labels: Array, before: Kind | None) -> Kind:
    """The type of labels, which must be that of earlier ones, if there were any."""
    kind = KINDS.get(labels.dtype.kind)
    if kind is None or (labels.dtype.kind == "O" and not all(isinstance(label, str) for label in labels)):
        raise DataError(f"Unknown label type: {labels.dtype}. Labels must be texts, numbers or bools, all of one kind.")
    if labels.dtype.kind == "u" and len(labels) and labels.max() > np.iinfo(np.int64).max:
        raise DataError(f"Labels must be less than 2^63; found {labels.max()}.")
    if before is not None and kind != before:
        raise DataError(f"Some labels are {TYPE_NAMES[before]}, others {TYPE_NAMES[kind]}. Convert them before.")
    return kind


def names_of(values: Array, kind: Kind) -> list[str]:
    """Labels as the names of classes."""
    # Minus zero is the same label as zero.
    return [repr(value + 0.0) if kind == "float" else str(value) for value in values.tolist()]


def values_of(names: Sequence[str], kind: Kind) -> Array:
    """The labels that names stand for."""
    if kind == "bool":
        return np.array([name == "True" for name in names])
    if kind == "text":
        texts = np.array(names)
        return texts if texts.tolist() == list(names) else np.array(names, dtype=object)  # numpy cuts zeros at the end
    return np.array([int(name) if kind == "int" else float(name) for name in names])


def kind_of_names(model: Model) -> Kind:
    """The type of a saved model's labels: text, if other names were added by `engram learn` or `rename`."""
    kind, names = model.metadata.labels, [*model.names, *model.metadata.announced]
    try:
        return kind if names_of(values_of(names, kind), kind) == names else "text"
    except (ValueError, OverflowError):
        return "text"
