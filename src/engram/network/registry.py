"""The networks by name: those that are trained from scratch, pretrained ones, and weights from files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import DataError, UsageError, unknown
from engram.network import hub, parallel
from engram.network.pretrained import VARIANTS, EfficientNetLite, Foldable, Pretrained, Variant, load_efficientnet
from engram.progress import SILENT, Progress
from engram.storage import check_file, load_tensors, tensors_of
from engram.text import printable

DEFAULT_PRETRAINED = "efficientnet-lite0"
IDENTITY = "identity"
SMALL_SIDE = 24  # pixels: smaller images get the small network, and one thread
PYTORCH = (".pth", ".pt", ".bin")
WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts save a state dict


# Networks that are trained from scratch, and vectors as features


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d) and not module.weight.is_meta:  # there `normal_` imports sympy, for a second
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al., 2016). Parameter names are torchvision's."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, projection: bool, relu: bool = True) -> None:
        super().__init__()
        self.relu = relu
        self.conv1 = _convolution(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _convolution(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs
        self.downsample: nn.Sequential | None = None
        if projection and (stride != 1 or self.added):
            self.downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride > 1 or self.added:  # He et al.'s option A: subsample, and fill the new channels with zeros
            zeros = (0, 0, 0, 0, self.added // 2, self.added - self.added // 2)
            x = F.pad(x[:, :, :: self.stride, :: self.stride], zeros)
        out = out + x
        return F.relu(out, inplace=True) if self.relu else out


class ResNet(Foldable):
    """He et al.'s residual network of basic blocks. Parameter names are torchvision's, without its `fc`."""

    def __init__(
        self,
        stem: nn.Conv2d,
        pooling: nn.Module,
        widths: tuple[int, ...],
        blocks: int,
        projection: bool,
        last_relu: bool,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1, self.maxpool = stem, nn.BatchNorm2d(widths[0]), pooling
        self.stages = [f"layer{number + 1}" for number in range(len(widths))]
        inputs = widths[0]
        for name, width in zip(self.stages, widths, strict=True):
            relus = [True] * (blocks - 1) + [last_relu or name != self.stages[-1]]
            stage = nn.Sequential()
            for relu in relus:
                stage.append(BasicBlock(inputs, width, 1 if inputs == width else 2, projection=projection, relu=relu))
                inputs = width
            self.add_module(name, stage)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return x.mean((2, 3))  # type: ignore[no-any-return]


def resnet32(channels: int = 3, *, last_relu: bool = True) -> ResNet:
    """ResNet-32 for 32×32 images: d = 64."""
    return ResNet(_convolution(channels, 16, 3), nn.Identity(), (16, 32, 64), 5, False, last_relu)


def resnet18(channels: int = 3, *, small: bool = False, last_relu: bool = True) -> ResNet:
    """ResNet-18: d = 512. `small` is a stem for small images: one 3×3 convolution, no pooling."""
    stem = _convolution(channels, 64, 3) if small else _convolution(channels, 64, 7, 2)
    pooling = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
    return ResNet(stem, pooling, (64, 128, 256, 512), 2, True, last_relu)


class SmallCNN(Foldable):
    """Three convolutions for images of a few pixels, such as the 8×8 digits: d = 64."""

    def __init__(self, channels: int = 1, *, last_relu: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(_convolution(channels, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
            *(_convolution(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(_convolution(64, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True) if last_relu else nn.Identity()),
        )
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).mean((2, 3))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two hidden layers for vectors: d = 64. It has no batch norms, so one sample is enough to train on."""

    def __init__(self, inputs: int, hidden: int = 128, outputs: int = 64, *, last_relu: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.ReLU()),
            *(nn.Linear(hidden, outputs), nn.ReLU() if last_relu else nn.Identity()),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers(vectors)  # type: ignore[no-any-return]


class PaddedVectors(nn.Module):
    """Vectors (n, d) as features, with a constant appended if d < 32, and zeros up to a multiple of 8.

    Features are scaled to unit length. In few dimensions the length may separate classes, and the constant preserves
    it. Zeros up to a multiple of 8 make scores independent of a sample's place in its batch, since matrix products
    round rows of other lengths differently; product quantisation needs them too.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        # Standardised columns have a deviation of about 1, so the length of a vector is about √d.
        self.constant = 3 * inputs**0.5 if inputs < 32 else None
        self.zeros = -(inputs + (self.constant is not None)) % 8

    def forward(self, vectors: Tensor) -> Tensor:
        if self.constant is not None:
            vectors = F.pad(vectors, (0, 1), value=self.constant)
        return F.pad(vectors, (0, self.zeros))


# By name


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
    try:
        copy.deepcopy(extractor).load_state_dict(found)  # an error leaves the extractor as it was
        extractor.load_state_dict(found)
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:200]
        raise DataError(f"{printable(path)} does not fit {type(extractor).__name__}: {problem}") from error
    return (statistics["mean"], statistics["std"]) if statistics.keys() >= {"mean", "std"} else None


def extractor_for_weights(path: Path) -> str:
    """The name of the network, for colour images, that a weights file fits."""
    found, _ = _read_weights(path)
    for name in ("resnet18", "resnet18-small", "resnet32", "small"):
        with suppress(RuntimeError):  # another network's
            NETWORKS[name].without_values().load_state_dict(found, assign=True)
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
