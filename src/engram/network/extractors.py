"""Feature extractors h_θ: what maps an image, or a vector, to a feature vector of d numbers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval as fuse  # a batch norm in evaluation mode into a convolution

from engram.errors import DataError, UsageError, unknown
from engram.storage import load_tensors

SMALL_SIDE = 24  # pixels: images below are for the small network, and one thread does them


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut (He et al., 2016). Parameter names are torchvision's."""

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
        out = out + self._shortcut(x)
        return F.relu(out, inplace=True) if self.relu else out

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            return self.downsample(x)  # type: ignore[no-any-return]
        if self.stride == 1 and not self.added:
            return x
        # He et al.'s option A, for CIFAR: subsample, and fill the new channels with zeros.
        return F.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added - self.added // 2)
        )


def _stage(
    inputs: int, outputs: int, blocks: int, stride: int, *, projection: bool, last_relu: bool = True
) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(inputs, outputs, stride, projection=projection),
        *(BasicBlock(outputs, outputs, 1, projection=projection) for _ in range(blocks - 2)),
        BasicBlock(outputs, outputs, 1, projection=projection, relu=last_relu),
    )


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet32(nn.Module):
    """He et al.'s ResNet-32 for 32×32 images: d = 64."""

    def __init__(self, channels: int = 3, *, last_relu: bool = True) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, 16, 3)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, 5, 1, projection=False)
        self.layer2 = _stage(16, 32, 5, 2, projection=False)
        self.layer3 = _stage(32, 64, 5, 2, projection=False, last_relu=last_relu)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))  # (n, 64, h/4, w/4)
        return x.mean((2, 3))  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """He et al.'s ResNet-18: d = 512. Parameters are named as torchvision names them, without its `fc`.

    `small` gives it a stem for small images: one 3×3 convolution, no pooling.
    """

    def __init__(self, channels: int = 3, *, small: bool = False, last_relu: bool = True) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, 64, 3) if small else _convolution(channels, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, 2, 1, projection=True)
        self.layer2 = _stage(64, 128, 2, 2, projection=True)
        self.layer3 = _stage(128, 256, 2, 2, projection=True)
        self.layer4 = _stage(256, 512, 2, 2, projection=True, last_relu=last_relu)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (n, 512, h/32, w/32), of the small stem h/8, w/8
        return x.mean((2, 3))  # type: ignore[no-any-return]


class SmallCNN(nn.Module):
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
    """Two hidden layers for inputs that are vectors: d = 64. No batch norm, so that a single sample will do."""

    def __init__(self, inputs: int, hidden: int = 128, outputs: int = 64, *, last_relu: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.ReLU()),
            *(nn.Linear(hidden, outputs), nn.ReLU() if last_relu else nn.Identity()),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers(vectors)  # type: ignore[no-any-return]


# Each is made for the number of channels of its images or, where inputs are vectors, of their numbers; without its
# last ReLU its features have both signs (LUCIR).
EXTRACTORS: dict[str, Callable[..., nn.Module]] = {
    "resnet32": ResNet32,
    "resnet18": ResNet18,
    "resnet18-small": functools.partial(ResNet18, small=True),
    "small": SmallCNN,
    "mlp": MLP,
}


def choose_extractor(shape: tuple[int, ...]) -> str:
    """The name of a sensible extractor for inputs of this shape, (h, w, c) or (d,)."""
    if len(shape) == 1:
        return "mlp"
    side = min(shape[:2])
    return "small" if side < SMALL_SIDE else "resnet32" if side < 64 else "resnet18"


def check_name(network: str) -> None:
    """Refuse a network that there is not."""
    if network not in (*EXTRACTORS, "auto"):
        raise unknown("network", network, [*EXTRACTORS, "auto"])


def make_extractor(network: str | nn.Module, shape: tuple[int, ...], *, last_relu: bool = True) -> nn.Module:
    """The extractor called `network` for inputs of this shape, or a copy of one's own module, which ends as it ends."""
    if isinstance(network, nn.Module):
        return copy.deepcopy(network)
    check_name(network)
    name = choose_extractor(shape) if network == "auto" else network
    if (name == "mlp") != (len(shape) == 1):
        kind = "vectors" if len(shape) == 1 else "images"
        raise UsageError(f"The network '{name}' does not take {kind} of shape {shape}. Try --network auto.")
    return EXTRACTORS[name](shape[-1], last_relu=last_relu)


def fold_batch_norms(extractor: nn.Module) -> nn.Module:
    """Put what batch norms do in evaluation into the convolutions before them: the same features, a fifth faster.

    Only in modules of this file: in others a batch norm need not belong to the convolution it is named like.
    """
    extractor.eval()
    for module in extractor.modules():
        if isinstance(module, BasicBlock | ResNet32 | ResNet18):
            module.conv1, module.bn1 = fuse(module.conv1, module.bn1), nn.Identity()  # type: ignore[assignment]
        if isinstance(module, BasicBlock):
            module.conv2, module.bn2 = fuse(module.conv2, module.bn2), nn.Identity()  # type: ignore[assignment]
            module.downsample = _folded(module.downsample) if module.downsample is not None else None
        if isinstance(module, SmallCNN):
            module.layers = _folded(module.layers)
    return extractor.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _folded(layers: nn.Sequential) -> nn.Sequential:
    kept: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d) and kept and isinstance(kept[-1], nn.Conv2d):
            kept[-1] = fuse(kept[-1], layer)
        else:
            kept.append(layer)
    return nn.Sequential(*kept)


def load_weights(extractor: nn.Module, path: Path) -> None:
    """Load published weights into an extractor: a safetensors file with torchvision's names, whose `fc` is left out."""
    wanted, found = extractor.state_dict(), _weights(path)
    problem = _misfit(wanted, found)
    if problem:
        raise DataError(f"{path} does not fit {type(extractor).__name__}: {problem}.")
    extractor.load_state_dict(found, strict=False)


def extractor_for_weights(path: Path) -> str:
    """The name of the extractor, for pictures in colour, that published weights are of."""
    found = _weights(path)
    for name in ("resnet18", "resnet18-small", "resnet32", "small"):
        if not _misfit(EXTRACTORS[name](3).state_dict(), found):
            return name
    raise DataError(
        f"{path} holds the weights of no network that engram has. It has: {', '.join(EXTRACTORS)}; "
        "those of resnet18 are named as torchvision names them."
    )


def published_statistics(path: Path) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the inputs that weights were trained with, where their file says so: engram's own do."""
    tensors = load_tensors(path)
    return (tensors["input.mean"], tensors["input.std"]) if {"input.mean", "input.std"} <= set(tensors) else None


def _weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in load_tensors(path).items() if not name.startswith(("fc.", "input."))}


def _misfit(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Why weights do not fit, or nothing."""
    # Counters of batches seen are absent from many published files and mean nothing for weights that are loaded.
    missing = {name for name in wanted if not name.endswith("num_batches_tracked")} - set(found)
    if missing or set(found) - set(wanted):
        return f"{min(missing or set(found) - set(wanted))} is on one side only"
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            return f"{name} is {tuple(tensor.shape)}, this network's {tuple(wanted[name].shape)}"
    return ""


def feature_dimension(extractor: nn.Module, sample: Tensor) -> int:
    """d, found by passing one sample through; what does not give one vector per sample is refused."""
    was_training = extractor.training
    with torch.no_grad():
        features = extractor.eval()(sample)
    extractor.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(sample):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UsageError(f"The network must give features (n, d); {type(extractor).__name__} gave {shape}.")
    return features.shape[1]
