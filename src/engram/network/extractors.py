"""Feature extractors h_θ: what maps an image, or a vector, to a feature vector of d numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval as fuse  # a batch norm in evaluation mode into a convolution

from engram.errors import UsageError
from engram.network.efficientnet import ConvNorm

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


class PaddedVectors(nn.Module):
    """Vectors (n, d) as features, with a constant appended if they are short, and zeros up to a multiple of 8.

    Features are scaled to unit length. In many dimensions the length tells little, but in a few it may be what tells
    classes apart, such as size: the constant keeps it. The multiple of 8 makes scores independent of a sample's place
    in its batch, since matrix products round rows of other lengths differently, and allows product quantisation.
    """

    short = 31  # dimensions, at most, of vectors that get a constant
    multiple = 8

    def __init__(self, inputs: int) -> None:
        super().__init__()
        # Standardised columns have a deviation of about 1, so the length of a vector is about √d.
        self.constant = 3 * inputs**0.5 if inputs <= self.short else None
        self.zeros = -(inputs + (self.constant is not None)) % self.multiple

    def forward(self, vectors: Tensor) -> Tensor:
        if self.constant is not None:
            vectors = F.pad(vectors, (0, 1), value=self.constant)
        return F.pad(vectors, (0, self.zeros))


def fold_batch_norms(extractor: nn.Module) -> nn.Module:
    """Fold batch norms, as they act in evaluation, into the convolutions before them: the same features, faster.

    Only in our own modules: in others a batch norm need not belong to the convolution it is named like.
    """
    extractor.eval()
    for module in list(extractor.modules()):
        if isinstance(module, ConvNorm):
            module.fold()
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
