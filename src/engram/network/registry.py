"""The networks by name, networks from the Hugging Face hub, and weights from files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import DataError, UsageError, unknown
from engram.network import hub, parallel
from engram.network.backbones import (
    MLP,
    VARIANTS,
    EfficientNetLite,
    PaddedVectors,
    Pretrained,
    SmallCNN,
    Variant,
    load_efficientnet,
    resnet18,
    resnet32,
)
from engram.progress import SILENT, Progress
from engram.storage import check_file, load_tensors, tensors_of
from engram.text import printable

DEFAULT_PRETRAINED = "efficientnet-lite0"
IDENTITY = "identity"
SMALL_SIDE = 24  # pixels: smaller images get the small network, and one thread
PYTORCH = (".pth", ".pt", ".bin")
WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts save a state dict


@dataclass(frozen=True)
class NetworkEntry:
    """A network by name."""

    summary: str
    make: Callable[..., nn.Module]  # (channels or vector length, last_relu=...) -> network without pretrained weights
    dimension: int | None  # d; None: depends on the vectors
    takes_vectors: bool = False
    input_size: int | None = None  # pixels a side; None: any
    load: Callable[[], nn.Module] | None = None  # the network with its pretrained weights
    weights: str = "none: trained from scratch"
    licence: str = ""  # of the weights
    is_installed: Callable[[], bool] = lambda: True

    def without_values(self) -> nn.Module:
        """The network for colour images with its shapes alone: on the meta device, which skips the initialisation."""
        with torch.device("meta"):
            return self.make(3)

    def describe(self, name: str) -> dict[str, Any]:
        parameters = None if self.takes_vectors else sum(each.numel() for each in self.without_values().parameters())
        return {
            **{"name": name, "summary": self.summary, "parameters": parameters, "dimension": self.dimension},
            **{"input_size": self.input_size, "weights": self.weights, "licence": self.licence},
            "offline": self.is_installed(),
        }


def _efficientnet(variant: Variant) -> NetworkEntry:
    return NetworkEntry(
        f"EfficientNet-Lite, {'larger' if variant.number else 'the default for photos'}",
        make=lambda channels, last_relu=True: EfficientNetLite(variant),
        dimension=1280,
        input_size=variant.size,
        load=lambda: load_efficientnet(variant.name),
        weights=f"ImageNet, from the package {variant.package}",
        licence="Apache 2.0 (Google)",
        is_installed=lambda: variant.path() is not None,
    )


NETWORKS = {
    **{name: _efficientnet(variant) for name, variant in VARIANTS.items()},
    "resnet32": NetworkEntry("ResNet-32 for small images (CIFAR), as in the paper", resnet32, 64),
    "resnet18": NetworkEntry("ResNet-18 (ImageNet), as in the paper", resnet18, 512),
    "resnet18-small": NetworkEntry(
        "ResNet-18 with a stem for images of 32 to 64 pixels", partial(resnet18, small=True), 512
    ),
    "small": NetworkEntry("three convolutions for images of a few pixels", SmallCNN, 64),
    "mlp": NetworkEntry("two hidden layers, for vectors", MLP, 64, takes_vectors=True),
    IDENTITY: NetworkEntry(
        "vectors are used as features, only scaled",
        make=lambda inputs, last_relu=True: PaddedVectors(inputs),
        dimension=None,
        takes_vectors=True,
        weights="not needed",
    ),
}


def is_pretrained(network: str | nn.Module) -> bool:
    """Whether a network has useful features without any training."""
    if isinstance(network, nn.Module):
        return isinstance(network, Pretrained)
    if network in NETWORKS:
        return NETWORKS[network].load is not None or network == IDENTITY
    return network != "auto" and hub.is_hub_name(network)


def check_name(network: str) -> None:
    """Raise an error if there is no network of this name."""
    if network not in (*NETWORKS, "auto") and not hub.is_hub_name(network):
        raise unknown("network", network, [*NETWORKS, "auto"], "engram networks")


def portable_name(network: str) -> str:
    """The name of the network in a saved model, which can be rebuilt without the folder of a local network."""
    is_local = network not in (*NETWORKS, "auto") and not network.startswith(hub.PREFIX)
    return f"{hub.PREFIX}{Path(network).name}" if is_local else network


def choose_extractor(shape: tuple[int, ...]) -> str:
    """The name of the network to train from scratch on inputs of this shape, (h, w, c) or (d,)."""
    if len(shape) == 1:
        return "mlp"
    side = min(shape[:2])
    return "small" if side < SMALL_SIDE else "resnet32" if side < 64 else "resnet18"


def input_size(network: str) -> int | None:
    """The input size of a network in pixels a side; None if it takes any. A hub network may be downloaded."""
    if network in NETWORKS:
        return NETWORKS[network].input_size
    return hub.load_hub(network).input_size if hub.is_hub_name(network) else None


def make_extractor(
    network: str | nn.Module, shape: tuple[int, ...], *, last_relu: bool = True, progress: Progress = SILENT
) -> nn.Module:
    """The feature extractor of this name for inputs of this shape, pretrained if it can be; or a copy of a module."""
    if isinstance(network, nn.Module):
        return copy.deepcopy(network)
    check_name(network)
    name = choose_extractor(shape) if network == "auto" else network
    if (name in NETWORKS and NETWORKS[name].takes_vectors) != (len(shape) == 1):
        kind = "vectors" if len(shape) == 1 else "images"
        raise UsageError(f"The network '{name}' does not take {kind} of shape {shape}. Try --network auto.")
    if name not in NETWORKS:
        return hub.load_hub(name, progress)
    entry = NETWORKS[name]
    return entry.make(shape[-1], last_relu=last_relu) if entry.load is None else entry.load()


def restore_extractor(
    network: str | nn.Module, shape: tuple[int, ...], tensors: Mapping[str, Tensor], *, last_relu: bool = True
) -> nn.Module:
    """The extractor with the state dict `tensors`; it needs neither the hub nor a package of weights."""
    if "description" in tensors:  # the buffer of a hub network
        return hub.HubExtractor.from_state_dict(tensors)
    if isinstance(network, str) and network in NETWORKS and NETWORKS[network].load is not None:
        extractor = NETWORKS[network].without_values()
        # Not `to_empty`: it imports sympy, which takes a third as long as torch.
        extractor.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
        return extractor.float()
    extractor = make_extractor(network, shape, last_relu=last_relu)
    extractor.load_state_dict(tensors)
    return extractor


def feature_dimension(extractor: nn.Module, sample: Tensor) -> int:
    """d, found by passing one sample through; an error if the output is not one vector per sample."""
    was_training = extractor.training
    with torch.no_grad():
        features = extractor.eval()(sample)
    extractor.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(sample):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UsageError(f"The network must give features (n, d); {type(extractor).__name__} gave {shape}.")
    return features.shape[1]


def describe_network(network: str) -> dict[str, Any]:
    """One network, for `engram networks NAME`; a hub network is not downloaded."""
    if network in NETWORKS:
        return NETWORKS[network].describe(network)
    if not hub.is_hub_name(network):
        raise unknown("network", network, NETWORKS, "engram networks")
    return hub.describe(network)


def threads_for(shape: tuple[int, ...], network: str | nn.Module = "auto") -> AbstractContextManager[None]:
    """Compute in one thread for vectors and small images, where a second one costs more than it gains.

    A pretrained network enlarges small images, so it keeps all threads. The choice depends only on the data and the
    network, and so do the results.
    """
    small = len(shape) == 1 or (min(shape[:2]) < SMALL_SIDE and not is_pretrained(network))
    return parallel.threads(1 if small else torch.get_num_threads())


def load_weights(extractor: nn.Module, path: Path) -> tuple[Tensor, Tensor] | None:
    """Load a weights file with torchvision's parameter names into an extractor; a classifier `fc` is ignored.

    Returns mean and deviation of the inputs that they were trained with, if the file states them, as engram's do.
    """
    found, statistics = _read_weights(path)
    if problem := _mismatch(extractor.state_dict(), found):
        raise DataError(f"{printable(path)} does not fit {type(extractor).__name__}: {problem}.")
    extractor.load_state_dict(found, strict=False)
    return (statistics["mean"], statistics["std"]) if statistics.keys() >= {"mean", "std"} else None


def extractor_for_weights(path: Path) -> str:
    """The name of the network, for colour images, that a weights file fits."""
    found, _ = _read_weights(path)
    for name in ("resnet18", "resnet18-small", "resnet32", "small"):
        if not _mismatch(NETWORKS[name].without_values().state_dict(), found):
            return name
    raise DataError(
        f"{printable(path)} does not hold the weights of resnet18 (with torchvision's parameter names), "
        "resnet18-small, resnet32 or small. A folder in the layout of the Hugging Face hub can be given as --network."
    )


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of the extractor in a file, and the mean and deviation of its inputs if the file states them."""
    tensors = _read_pytorch(path) if path.suffix.lower() in PYTORCH else load_tensors(path)
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(("fc.", "input."))}
    return weights, tensors_of(tensors, "input")


def _read_pytorch(path: Path) -> dict[str, Tensor]:
    """The tensors of a PyTorch file, which is read without running code in it."""
    check_file(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes lead the unpickler to errors of any kind
        raise DataError(
            f"{printable(path)} cannot be read as PyTorch weights: it is damaged, or holds objects other than tensors, "
            "which are never loaded. Save its state dict, or convert it to safetensors."
        ) from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{printable(path)} holds no state dict: a mapping of parameter names to tensors.")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}  # DataParallel's prefix


def _mismatch(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Why weights do not fit, or an empty string."""
    # Many published files lack the batch counters, which do not matter here.
    missing = {name for name in wanted if not name.endswith("num_batches_tracked")} - set(found)
    if missing or set(found) - set(wanted):
        return f"{min(missing or set(found) - set(wanted))} is on one side only"
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            return f"{name} is {tuple(tensor.shape)}, this network's {tuple(wanted[name].shape)}"
    return ""
