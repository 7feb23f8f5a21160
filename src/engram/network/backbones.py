"""Feature extractors h_θ that are trained from scratch: they map an image, or a vector, to a feature vector (d,)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval


class Pretrained(nn.Module):
    """A feature extractor with published weights: normalised images (n, 3, s, s) to features (n, d).

    Images are resized to `input_size` pixels and normalised as (x / 255 − mean) / std per channel.
    """

    input_size: int
    input_mean: tuple[float, float, float]
    input_std: tuple[float, float, float]

    def fuse(self) -> None:
        """Prepare for faster inference, once batch norms are folded; features may change by rounding."""


def fold_batch_norms(extractor: nn.Module) -> nn.Module:
    """Fold batch norms into the convolutions before them: the same features in evaluation, faster.

    Only in engram's own networks, where a batch norm always normalises the convolution registered before it.
    """
    extractor.eval()
    networks = [module for module in extractor.modules() if isinstance(module, Foldable)]
    for module in {inner for network in networks for inner in network.modules()}:
        for (name, convolution), (norm_name, norm) in pairwise(list(module.named_children())):
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(convolution, norm))
                setattr(module, norm_name, nn.Identity())
    return extractor.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


class Foldable(nn.Module):
    """A network in which every batch norm is registered directly after the convolution that it normalises."""


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
        out = out + self._shortcut(x)
        return F.relu(out, inplace=True) if self.relu else out

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            return self.downsample(x)  # type: ignore[no-any-return]
        if self.stride == 1 and not self.added:
            return x
        # He et al.'s option A, for CIFAR: subsample, and fill the new channels with zeros.
        added = (0, 0, 0, 0, self.added // 2, self.added - self.added // 2)
        return F.pad(x[:, :, :: self.stride, :: self.stride], added)


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
