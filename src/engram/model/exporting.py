"""`export`: a model as a file for use without engram. The extension of the file says what is in it.

.onnx         the whole model: raw image (or vector) in, scores and calibrated probabilities out
.npz          the memory: stored features, and exemplars if there are any, with their labels
.safetensors  the extractor's weights; a new model can start from those of a ResNet: engram learn --from-weights

In the ONNX graph are scaling, normalisation, network and classifier, so its outputs are engram's. How an image file
becomes a square of pixels is not: `engram.preparation` in the file's metadata describes it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from engram import storage
from engram.errors import DataError, EngramError, UsageError, not_installed
from engram.model.folder import CURRENT
from engram.model.manifest import ENGRAM_VERSION, VERSIONS
from engram.model.model import Model, blank_inputs
from engram.progress import SILENT, Progress
from engram.text import printable

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20  # the exporter's own, which needs no conversion
OUTPUTS = ("scores", "probabilities")
EXPORTER_LOG = "torch.onnx._internal.exporter._registration"  # warns that torchvision, not needed here, is missing


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The file that was written."""

    path: Path
    kind: str  # onnx, npz or safetensors
    bytes: int
    version: int | None
    contents: Mapping[str, Any] = field(default_factory=dict)  # numbers and names that depend on the kind

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        named = {"path": str(self.path), "kind": self.kind, "bytes": self.bytes, "version": self.version}
        return {**named, **self.contents}


def export(
    model: Model,
    path: Path,
    *,
    version: int | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> ExportResult:
    """Write a model to a file of the kind that its extension says, atomically.

    `version` is the number of the model in its folder, recorded in the file. An existing file stays as it is unless
    `overwrite` is set.
    """
    write = WRITERS.get(path.suffix.lower())
    if write is None:
        raise UsageError(
            f"The extension of '{printable(path)}' does not say what to write. There are: .onnx (the whole model), "
            ".npz (the stored features and labels), .safetensors (the extractor's weights)."
        )
    _check_place(path, overwrite)
    storage.make_folder(path.parent)
    with progress.phase("export"), storage.disk_errors(f"{printable(path)} cannot be written"):
        contents = write(model, path, version)
        size = path.stat().st_size
    return ExportResult(path=path, kind=path.suffix[1:].lower(), bytes=size, version=version, contents=contents)


def _check_place(path: Path, overwrite: bool) -> None:
    if os.path.isdir(path):
        raise UsageError(f"{printable(path)} is a folder. Name a file.")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{printable(path)} exists already. Name another file, or overwrite it with --overwrite.")
    parent = path.parent.resolve()
    for folder in (parent, *parent.parents):
        if os.path.exists(folder / CURRENT) and os.path.exists(folder / VERSIONS):
            raise UsageError(f"{printable(path)} would lie inside the model {printable(folder)}. Choose another place.")


def _write_graph(model: Model, path: Path, version: int | None) -> Mapping[str, Any]:
    storage.write_file(path, make_graph(model, version).SerializeToString(deterministic=True))
    shape = ["batch", *model.learner.shape_]
    return {"input": _input_name(model), "shape": shape, "outputs": OUTPUTS, "opset": OPSET, "classes": model.names}


def _write_arrays(model: Model, path: Path, version: int | None) -> Mapping[str, Any]:
    """Labels are positions in `classes`. If a model's inputs are vectors, its `images` are such vectors."""
    learner, features, images = model.learner, model.learner.memory.features, model.learner.memory.images
    if not len(features) and not len(images):
        raise DataError(f"The method '{learner.name}' stores no features and no images: there is nothing to write.")
    arrays = {
        "features": features.rows.reshape(-1, learner.trained.dimension).numpy(),  # (n, d), also for n = 0
        "labels": features.class_indices.numpy(),
        "classes": np.array(model.names, dtype=np.str_),
    }
    if len(images):
        arrays |= {"images": images.rows.numpy(), "image_labels": images.class_indices.numpy()}
    with storage.writing(path) as aside, aside.open("wb") as file:  # given a name, numpy would append .npz to it
        np.savez(file, allow_pickle=False, **arrays)
    return {"features": len(features), "images": len(images), "classes": model.names}


def _write_weights(model: Model, path: Path, version: int | None) -> Mapping[str, Any]:
    network = model.learner.trained
    weights = {**network.extractor.state_dict(), "input.mean": network.mean, "input.std": network.std}
    storage.save_tensors(path, weights)
    return {"tensors": len(weights), "dimension": network.dimension}


Write = Callable[[Model, Path, int | None], Mapping[str, Any]]
WRITERS: dict[str, Write] = {".onnx": _write_graph, ".npz": _write_arrays, ".safetensors": _write_weights}


class Graph(nn.Module):
    """`Model.scores` and `Model.probabilities` as one module."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        learner = copy.copy(model.learner)
        learner.network_ = copy.deepcopy(learner.trained).cpu()
        self.network = learner.trained.frozen(exact=True)  # in float32, even if engram itself computes in bfloat16
        self.classify, self.calibrated = learner.classify, model.calibrated

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (n, K) and probabilities (n, K)."""
        scores = self.classify(self.network.features(inputs))
        return scores, self.calibrated(scores)


def _input_name(model: Model) -> str:
    return "images" if model.image_size is not None else "vectors"


def make_graph(model: Model, version: int | None = None) -> ModelProto:
    """The ONNX graph, checked, with its metadata. The same model gives the same bytes."""
    # The exporter itself is written in onnxscript.
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise not_installed(f"To write ONNX, {' and '.join(missing)}", "export")
    import onnx.checker
    import onnx.helper

    logging.getLogger(EXPORTER_LOG).setLevel(logging.ERROR)
    example = blank_inputs(2, model.learner.shape_)  # with one, the exporter would make the 1 a constant
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                Graph(model).eval(),
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=[_input_name(model)],
                output_names=OUTPUTS,
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]  # pages of advice to its author follow
        raise EngramError(f"This model's network cannot be written as ONNX: {reason}") from error
    assert program is not None
    graph = program.model_proto
    inner = graph.graph
    for part in (*inner.node, *inner.input, *inner.output, *inner.value_info, *inner.initializer, inner, graph):
        part.ClearField("metadata_props")  # the exporter's notes name files of this machine
        part.ClearField("doc_string")
    graph.producer_name, graph.producer_version = "engram", ENGRAM_VERSION
    onnx.helper.set_model_props(graph, metadata(model, version))
    onnx.checker.check_model(graph, full_check=True)
    return graph


def metadata(model: Model, version: int | None = None) -> dict[str, str]:
    """The metadata of the ONNX file; what is not plain text is JSON."""
    size, shape = model.image_size, model.learner.shape_
    if shape == (size, size, 3):
        preparation = (
            "Decoded, turned upright as EXIF says, on white where transparent; "
            f"shorter side scaled to {size} with bicubic, middle square, RGB, uint8."
        )
    else:
        kind = "float32 vectors" if size is None else "uint8 images (height, width, channels)"
        preparation = f"As they were learned: {kind} of {shape}."
    known = {
        "classes": json.dumps(model.names),  # by class index
        "temperature": model.metadata.calibration.temperature,  # the probabilities include it already
        "method": model.learner.name,
        "preparation": preparation,
        "version": version,
        "image_size": size,
    }
    return {f"engram.{name}": str(value) for name, value in known.items() if value is not None}
