"""Weights from files: safetensors, or `.pth` files read without running any code in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import DataError
from engram.network.catalogue import FROM_SCRATCH
from engram.storage import load_tensors
from engram.text import printable

PYTORCH = (".pth", ".pt", ".bin")
WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which training scripts save a state dict


def load_weights(extractor: nn.Module, path: Path) -> None:
    """Load weights with torchvision's parameter names into an extractor; a classifier `fc` in the file is ignored."""
    found = _extractor_weights(path)
    problem = _mismatch(extractor.state_dict(), found)
    if problem:
        raise DataError(f"{printable(path)} does not fit {type(extractor).__name__}: {problem}.")
    extractor.load_state_dict(found, strict=False)


def extractor_for_weights(path: Path) -> str:
    """The name of the network, for colour images, that the weights of a file fit."""
    found = _extractor_weights(path)
    for name in ("resnet18", "resnet18-small", "resnet32", "small"):
        if not _mismatch(FROM_SCRATCH[name](3).state_dict(), found):
            return name
    raise DataError(
        f"{printable(path)} does not hold the weights of a network that engram can build "
        f"({', '.join(FROM_SCRATCH)}; ResNet-18 with torchvision's parameter names). "
        "A folder in the layout of the Hugging Face hub can be given as --network."
    )


def published_statistics(path: Path) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the inputs that weights were trained with, where their file records them: ours do."""
    tensors = _tensors(path)
    return (tensors["input.mean"], tensors["input.std"]) if {"input.mean", "input.std"} <= set(tensors) else None


def _extractor_weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tensors(path).items() if not name.startswith(("fc.", "input."))}


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix.lower() not in PYTORCH:
        return load_tensors(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(f"There is no file {printable(path)}.") from error
    except Exception as error:  # damaged bytes lead the unpickler to errors of any kind
        raise DataError(
            f"{printable(path)} cannot be read as PyTorch weights: it is damaged, or holds more than tensors, "
            "which is never loaded. Save its state dict, or convert it to safetensors."
        ) from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{printable(path)} holds no state dict: a mapping of parameter names to tensors.")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}  # DataParallel's prefix


def _mismatch(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Why weights do not fit, or an empty string."""
    # Counters of batches seen are absent from many published files and mean nothing for loaded weights.
    missing = {name for name in wanted if not name.endswith("num_batches_tracked")} - set(found)
    if missing or set(found) - set(wanted):
        return f"{min(missing or set(found) - set(wanted))} is on one side only"
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            return f"{name} is {tuple(tensor.shape)}, this network's {tuple(wanted[name].shape)}"
    return ""
