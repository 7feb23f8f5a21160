"""`export`: a model for those who have no engram, as a file whose ending says what is in it.

.onnx         the whole model: image in, scores and calibrated probabilities out (see `graph`)
.npz          what it keeps of the past: stored vectors, and images where there are any, with their labels
.safetensors  the extractor's weights, which a new model can start from: engram learn --from-weights
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engram import storage
from engram.errors import DataError, UsageError
from engram.model.folder import CURRENT
from engram.model.generations import GENERATIONS
from engram.model.graph import OPSET, OUTPUTS, input_name, make_graph
from engram.model.model import Model
from engram.progress import SILENT, Progress
from engram.text import printable


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The file that was written."""

    path: Path
    kind: str  # onnx, npz or safetensors
    bytes: int
    generation: int | None
    holds: Mapping[str, Any] = field(default_factory=dict)  # what is in it, in numbers and names of its kind

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        named = {"path": str(self.path), "kind": self.kind, "bytes": self.bytes, "generation": self.generation}
        return {**named, **self.holds}


def export(
    model: Model,
    path: Path,
    *,
    generation: int | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> ExportResult:
    """Write a model to a file of the kind that its ending says, whole or not at all.

    `generation` is the number the model has in its folder, for the file to tell. Whatever is at `path` stays as it is,
    unless it is a file to `overwrite`.
    """
    write = _writer(path)
    _check_place(path, overwrite)
    storage.make_folder(path.parent)
    with progress.phase("export"), storage.disk_errors(f"{printable(path)} cannot be written"):
        holds = write(model, path, generation)
        size = path.stat().st_size
    return ExportResult(path=path, kind=path.suffix[1:].lower(), bytes=size, generation=generation, holds=holds)


Write = Callable[[Model, Path, int | None], Mapping[str, Any]]


def _write_graph(model: Model, path: Path, generation: int | None) -> Mapping[str, Any]:
    content = make_graph(model, generation).SerializeToString(deterministic=True)
    storage.write_file(path, content)
    shape = ["batch", *model.learner.shape_]
    return {"input": input_name(model), "shape": shape, "outputs": OUTPUTS, "opset": OPSET, "classes": model.names}


def _write_arrays(model: Model, path: Path, generation: int | None) -> Mapping[str, Any]:
    """Labels are positions in `classes`. Where a model's inputs are vectors, its `images` are such vectors."""
    learner, features, images = model.learner, model.learner.memory.features, model.learner.memory.images
    if not len(features) and not len(images):
        raise DataError(f"The method '{learner.name}' keeps no vectors and no images: there is nothing to write.")
    arrays = {
        "features": features.rows.reshape(-1, learner.trained.dimension).numpy(),  # (n, d), be n 0
        "labels": features.class_indices.numpy(),
        "classes": np.array(model.names, dtype=np.str_),
    }
    if len(images):
        arrays |= {"images": images.rows.numpy(), "image_labels": images.class_indices.numpy()}
    with storage.writing(path) as aside, aside.open("wb") as file:  # by its name, numpy would give it another ending
        np.savez(file, allow_pickle=False, **arrays)
    return {"features": len(features), "images": len(images), "classes": model.names}


def _write_weights(model: Model, path: Path, generation: int | None) -> Mapping[str, Any]:
    network = model.learner.trained
    weights = network.extractor.state_dict()
    storage.save_tensors(path, {**weights, "input.mean": network.mean, "input.std": network.std})
    return {"tensors": len(weights) + 2, "dimension": network.dimension}


WRITERS: dict[str, Write] = {".onnx": _write_graph, ".npz": _write_arrays, ".safetensors": _write_weights}


def _writer(path: Path) -> Write:
    try:
        return WRITERS[path.suffix.lower()]
    except KeyError:
        raise UsageError(
            f"The ending of '{printable(path)}' does not say what to write. There are: .onnx (the whole model), "
            ".npz (the stored vectors and labels), .safetensors (the extractor's weights)."
        ) from None


def _check_place(path: Path, overwrite: bool) -> None:
    if os.path.isdir(path):
        raise UsageError(f"{printable(path)} is a folder. Name a file.")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{printable(path)} is there already. Name another file, or overwrite it with --overwrite.")
    parent = path.parent.resolve()
    for folder in (parent, *parent.parents):
        if os.path.exists(folder / CURRENT) and os.path.exists(folder / GENERATIONS):
            raise UsageError(
                f"{printable(path)} would lie inside the model {printable(folder)}, where nothing else belongs. Name another."
            )
