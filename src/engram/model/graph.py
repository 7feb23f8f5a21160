"""A model as one ONNX graph: from raw images, or vectors, to scores and calibrated probabilities.

Scaling, normalisation, network and classifier are all inside, so whatever runs ONNX answers as engram does. How a
picture's file becomes a square of pixels is not: `engram.preparation` in the file's metadata says it in words.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engram.errors import EngramError, not_installed
from engram.methods import Learner
from engram.model.manifest import VERSION
from engram.model.model import Model

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20  # the exporter's own, which needs no conversion
OUTPUTS = ("scores", "probabilities")
CHATTER = "torch.onnx._internal.exporter._registration"  # it misses torchvision, which nothing here needs


class _Answering(nn.Module):
    """What `Model.scores` and `Model.probabilities` compute, as one module."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        learner = _on_cpu(model.learner)
        self.network = learner.trained.frozen(exact=True)  # in float32, whatever it answers in here
        self.classify, self.calibrated = learner.classify, model.calibrated

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (n, K) and probabilities (n, K)."""
        scores = self.classify(self.network.features(inputs))
        return scores, self.calibrated(scores)


def _on_cpu(learner: Learner) -> Learner:
    """The learner with a network of its own on the CPU; nothing is copied but that."""
    moved = copy.copy(learner)
    moved.network_ = copy.deepcopy(learner.trained).cpu()
    return moved


def input_name(model: Model) -> str:
    """What the graph calls its input."""
    return "images" if model.image_size is not None else "vectors"


def make_graph(model: Model, generation: int | None = None) -> ModelProto:
    """The graph, checked, with its metadata. The same model gives the same bytes."""
    _require()
    import onnx.checker
    import onnx.helper

    name, shape = input_name(model), model.learner.shape_
    dtype = torch.uint8 if name == "images" else torch.float32
    example = torch.zeros(2, *shape, dtype=dtype)  # of one, the exporter would take the 1 for a constant
    try:
        with _quietly():
            program = torch.onnx.export(
                _Answering(model).eval(),
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=[name],
                output_names=OUTPUTS,
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]  # pages of advice to its author follow
        raise EngramError(f"This model's network cannot be written as ONNX: {reason}") from error
    assert program is not None
    graph = program.model_proto
    _strip(graph)
    graph.producer_name, graph.producer_version = "engram", VERSION
    onnx.helper.set_model_props(graph, metadata(model, generation))
    onnx.checker.check_model(graph, full_check=True)
    return graph


def metadata(model: Model, generation: int | None = None) -> dict[str, str]:
    """What the file says of itself beside the graph; whatever is not plain text is JSON."""
    known = {
        "engram.classes": json.dumps(model.names),  # in the order of the columns
        "engram.temperature": repr(model.metadata.calibration.temperature),  # which is in the probabilities already
        "engram.method": model.learner.name,
        "engram.preparation": _preparation(model),
    }
    if generation is not None:
        known["engram.generation"] = str(generation)
    if model.image_size is not None:
        known["engram.image_size"] = str(model.image_size)
    return known


def _preparation(model: Model) -> str:
    """How an input is to be made ready."""
    size, shape = model.image_size, model.learner.shape_
    if shape == (size, size, 3):
        return (
            "Decoded, turned upright as EXIF says, on white where transparent; "
            f"shorter side scaled to {size} with bicubic, middle square, RGB, uint8."
        )
    kind = "float32 vectors" if size is None else "uint8 images (height, width, channels)"
    return f"As they were learned: {kind} of {shape}."


def _require() -> None:
    """Refuse with a sentence where what writes ONNX is not installed: the exporter itself is written in onnxscript."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise not_installed(f"To write ONNX, {' and '.join(missing)}", "export")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the exporter has to say about itself."""
    logger = logging.getLogger(CHATTER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _strip(graph: ModelProto) -> None:
    """Drop the exporter's notes: they name files of this machine, and nobody else can use them."""
    inner = graph.graph
    for part in (*inner.node, *inner.input, *inner.output, *inner.value_info, *inner.initializer, inner, graph):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
