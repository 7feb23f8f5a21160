"""The networks by name: trained from scratch, pretrained, or from the Hugging Face hub."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import UsageError, unknown
from engram.network import hub
from engram.network.efficientnet import VARIANTS, EfficientNetLite, load_efficientnet
from engram.network.extractors import MLP, SMALL_SIDE, PaddedVectors, ResNet18, ResNet32, SmallCNN
from engram.network.pretrained import Pretrained
from engram.progress import SILENT, Progress

DEFAULT_PRETRAINED = "efficientnet-lite0"
DESCRIPTION = "description"  # the buffer of a hub network that says how to build it again


@dataclass(frozen=True, kw_only=True)
class NetworkEntry:
    """A network by name, and what a person wants to know before choosing it."""

    name: str
    summary: str
    parameters: int | None = None
    dimension: int | None = None  # d
    input_size: int | None = None  # pixels a side; None: whatever the images have
    weights: str = "none: trained from scratch"  # where they come from
    licence: str = ""  # of the weights
    offline: bool = True  # whether it can be used without a download


# Each is made for the channels of its images or the length of its vectors. Without its last ReLU, features have both
# signs (LUCIR).
FROM_SCRATCH: dict[str, Callable[..., nn.Module]] = {
    "resnet32": ResNet32,
    "resnet18": ResNet18,
    "resnet18-small": functools.partial(ResNet18, small=True),
    "small": SmallCNN,
    "mlp": MLP,
}
IDENTITY = "identity"  # vectors are features already; only their columns are scaled
NAMES = (*VARIANTS, *FROM_SCRATCH, IDENTITY)
FOR_VECTORS = ("mlp", IDENTITY)

SUMMARIES = {
    "resnet32": "ResNet-32 for small images (CIFAR), as in the paper",
    "resnet18": "ResNet-18 (ImageNet), as in the paper",
    "resnet18-small": "ResNet-18 with a stem for images of 32 to 64 pixels",
    "small": "three convolutions for images of a few pixels",
    "mlp": "two hidden layers, for vectors",
    IDENTITY: "vectors are used as features, only scaled",
}


def is_pretrained(network: str | nn.Module) -> bool:
    """Whether a network comes with weights, so that it is useful without any training."""
    if isinstance(network, nn.Module):
        return isinstance(network, Pretrained)
    return network in VARIANTS or network == IDENTITY or hub.is_hub_name(network)


def check_name(network: str) -> None:
    """Refuse a network that does not exist."""
    if network not in (*NAMES, "auto") and not hub.is_hub_name(network):
        raise unknown("network", network, [*NAMES, "auto"], "engram networks")


def portable_name(network: str) -> str:
    """The name that a saved model gives its network: of a local folder, no more than its own name.

    The model has all that is needed to build the network again, so the folder may be gone.
    """
    local = network not in (*NAMES, "auto") and not network.startswith(hub.PREFIX)
    return f"{hub.PREFIX}{Path(network).name}" if local else network


def choose_extractor(shape: tuple[int, ...]) -> str:
    """The name of a sensible network to train from scratch on inputs of this shape, (h, w, c) or (d,)."""
    if len(shape) == 1:
        return "mlp"
    side = min(shape[:2])
    return "small" if side < SMALL_SIDE else "resnet32" if side < 64 else "resnet18"


def input_size(network: str) -> int | None:
    """The pixels a side that a pretrained network was trained with; None for one that takes any size.

    For a hub network this loads its configuration, which may mean a download.
    """
    if network in VARIANTS:
        return VARIANTS[network].size
    return hub.load_hub(network).input_size if hub.is_hub_name(network) else None


def make_extractor(
    network: str | nn.Module, shape: tuple[int, ...], *, last_relu: bool = True, progress: Progress = SILENT
) -> nn.Module:
    """The extractor called `network` for inputs of this shape, or a copy of one's own module, which ends as it ends."""
    if isinstance(network, nn.Module):
        return copy.deepcopy(network)
    name = _named(network, shape)
    if name in VARIANTS:
        return load_efficientnet(name)
    if hub.is_hub_name(name):
        return hub.load_hub(name, progress)
    if name == IDENTITY:
        return PaddedVectors(shape[-1])
    return FROM_SCRATCH[name](shape[-1], last_relu=last_relu)


def empty_extractor(
    network: str | nn.Module, shape: tuple[int, ...], tensors: Mapping[str, Tensor], *, last_relu: bool = True
) -> nn.Module:
    """The same extractor without its weights, which are those of `tensors`, its state dict."""
    if DESCRIPTION in tensors:  # no hub is asked: a model outlives it
        return hub.HubExtractor.from_description(tensors[DESCRIPTION])
    if isinstance(network, str) and network in VARIANTS:
        with torch.device("meta"):
            extractor = EfficientNetLite(VARIANTS[network])
        return extractor.to_empty(device="cpu")
    return make_extractor(network, shape, last_relu=last_relu)


def _named(network: str, shape: tuple[int, ...]) -> str:
    check_name(network)
    name = choose_extractor(shape) if network == "auto" else network
    if (name in FOR_VECTORS) != (len(shape) == 1):
        kind = "vectors" if len(shape) == 1 else "images"
        raise UsageError(f"The network '{name}' does not take {kind} of shape {shape}. Try --network auto.")
    return name


def networks() -> list[dict[str, Any]]:
    """Every network that has a name, for `engram networks`."""
    entries = [
        NetworkEntry(
            name=name,
            summary="EfficientNet-Lite" + (", the default for photos" if name == DEFAULT_PRETRAINED else ", larger"),
            parameters=_parameters(EfficientNetLite(variant)),
            dimension=1280,
            input_size=variant.size,
            weights=f"ImageNet, from the package {variant.package}",
            licence="Apache 2.0 (Google)",
            offline=variant.path() is not None,
        )
        for name, variant in VARIANTS.items()
    ]
    for name, summary in SUMMARIES.items():
        made = None if name in FOR_VECTORS else FROM_SCRATCH[name](3)
        entries.append(
            NetworkEntry(
                name=name,
                summary=summary,
                parameters=None if made is None else _parameters(made),
                dimension={"resnet18": 512, "resnet18-small": 512, IDENTITY: None}.get(name, 64),
                weights="not needed" if name == IDENTITY else "none: trained from scratch",
            )
        )
    return [asdict(entry) for entry in entries]


def describe_network(network: str) -> dict[str, Any]:
    """One network, for `engram networks NAME`; of one on the hub, what is known without a download."""
    if network in NAMES:
        return next(entry for entry in networks() if entry["name"] == network)
    if not hub.is_hub_name(network):
        raise unknown("network", network, NAMES, "engram networks")
    known = hub.describe(network)
    entry = NetworkEntry(
        name=network,
        summary=str(known.get("model_type", "vision backbone, not downloaded yet")),
        parameters=known.get("parameters"),
        dimension=known.get("dimension"),
        input_size=known.get("input_size"),
        weights=f"{known['source']}" + (f" at {known['commit']}" if known.get("commit") else ""),
        licence=str(known.get("licence") or ""),
        offline=bool(known["cached"]),
    )
    return asdict(entry)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
