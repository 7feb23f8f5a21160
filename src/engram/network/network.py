"""`Network`: f = g_W ∘ h_θ, from raw inputs to features and scores."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.data import Samples
from engram.data.augment import center_crop
from engram.data.lazy import LazyImages
from engram.errors import UsageError
from engram.network.catalogue import IDENTITY, empty_extractor, make_extractor
from engram.network.extractors import feature_dimension, fold_batch_norms
from engram.network.head import Head, make_head
from engram.network.pretrained import Pretrained
from engram.network.weights import load_weights, published_statistics
from engram.progress import SILENT, Progress
from engram.randomness import seeded

# For vectors that are used as features; measured on embeddings of photos, digits and tables (tests/estimator).
SHIFT = 1.0  # deviations that every column is moved away from 0
PRIOR = 0.1  # samples per dimension that weigh as much as the assumption that all columns have one deviation
FURTHEST = 4.0  # deviations that a value is at most away from its mean

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what published weights were trained with


NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
Tuned = Literal["all", "norms"]  # which weights training changes: all, or the scales and shifts of the norm layers


def normalise(inputs: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Raw inputs as an extractor wants them; images become (n, c, h, w), channels last in memory."""
    inputs = inputs.to(mean.device)
    if inputs.ndim == 2:
        return (inputs - mean) / std
    return (inputs.float() * (1 / (255 * std)) - mean / std).permute(0, 3, 1, 2)  # NHWC memory is channels-last


def resized(images: Tensor, size: int) -> Tensor:
    """Images (n, h, w, c) as those a pretrained network was trained with: (n, size, size, 3), floats in 0..255."""
    pixels = images.permute(0, 3, 1, 2).float()  # (n, c, h, w)
    if pixels.shape[2:] != (size, size):
        smaller = max(pixels.shape[2:]) > size
        pixels = F.interpolate(pixels, (size, size), mode="bicubic", antialias=smaller).clamp(0, 255)
    return pixels.permute(0, 2, 3, 1).expand(-1, -1, -1, 3)  # grey becomes colour


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has arithmetic for bfloat16; elsewhere it is emulated, and slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("avx512_bf16"))


class Network(nn.Module):
    """An extractor and a head behind the normalisation of their inputs.

    Takes uint8 images (n, h, w, c) or float vectors (n, d), as `Samples` hold them. Of images larger than `side` it
    sees the middle. A pretrained extractor sees them resized to its own input size.
    """

    mean: Tensor
    std: Tensor
    is_frozen = False
    tuned: Tuned = "all"
    coarse = False  # whether the extractor computes in bfloat16

    def __init__(self, extractor: nn.Module, head: Head, mean: Tensor, std: Tensor, side: int | None = None) -> None:
        super().__init__()
        self.side = side
        self.extractor = extractor
        self.held = frozenset(name for name, each in extractor.named_parameters() if not each.requires_grad)
        self.head = head
        self.register_buffer("mean", mean)  # (c,) of images in 0..1, or of vectors
        self.register_buffer("std", std)

    def features(self, inputs: Tensor) -> Tensor:
        """h_θ(x), (n, d), not normalised."""
        if self.side is not None and inputs.ndim == 4:
            inputs = center_crop(inputs, self.side)
        if isinstance(self.extractor, Pretrained):
            inputs = resized(inputs.to(self.mean.device), self.extractor.input_size)
        inputs = normalise(inputs, self.mean, self.std)
        if self.coarse:
            return self.extractor(inputs.to(torch.bfloat16)).float()  # type: ignore[no-any-return]
        return self.extractor(inputs)  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Network:
        """As for any module, but where only scales and shifts are trained, batch norms keep their statistics."""
        super().train(mode)
        if mode and self.tuned == "norms":
            for module in self.extractor.modules():
                if isinstance(module, NORMS[0]):
                    module.eval()
        return self

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, d) and scores (n, K)."""
        features = self.features(inputs)
        return features, self.head(features)

    @property
    def classes(self) -> int:
        """How many classes the head has."""
        return len(self.head.weight)

    @property
    def dimension(self) -> int:
        """d, the length of a feature vector."""
        return self.head.weight.shape[1]

    def frozen(self, *, exact: bool = False) -> Network:
        """A copy for inference, its batch norms folded, that cannot be trained; of a frozen network, itself.

        A pretrained extractor computes in bfloat16 on devices that have it, unless it is to be `exact`.
        """
        if self.is_frozen:
            return self
        answering = copy.deepcopy(self).eval()
        answering.extractor = fold_batch_norms(answering.extractor)
        if isinstance(self.extractor, Pretrained) and not exact and computes_in_bfloat16(self.mean.device):
            answering.coarse = True
            answering.extractor.to(torch.bfloat16)
        answering.is_frozen = True
        return answering.requires_grad_(False)

    def grown(self, classes: int, *purpose: object, tuned: Tuned | Literal["head"] = "all") -> Network:
        """A copy to be trained, with `classes` more of them, initialised for this purpose (seed first).

        `tuned` says which weights of the extractor training may change: all, those of the norm layers, or none.
        """
        student = copy.deepcopy(self).requires_grad_(True)
        student.tuned = "all" if tuned == "all" else "norms"
        trainable = _trainable(student.extractor, tuned)
        for name, parameter in student.extractor.named_parameters():
            # Weights that were frozen in a module of one's own stay frozen.
            parameter.requires_grad_(name in trainable and name not in self.held)
        with seeded(*purpose):  # type: ignore[arg-type]
            student.head.grow(classes)
        return student

    def extracts_like(self, other: Network) -> bool:
        """Whether the two give the same features: their extractors have the same weights."""
        theirs = other.extractor.state_dict()
        return all(torch.equal(tensor, theirs[name]) for name, tensor in self.extractor.state_dict().items())

    @torch.no_grad()
    def average_with(self, other: Network, share: float) -> None:
        """Move the extractor, the statistics of its batch norms too, by this share of the way to another's."""
        others = other.extractor.state_dict()
        for name, own in self.extractor.state_dict().items():
            if own.is_floating_point():  # batches that were seen are counted in integers
                own.lerp_(others[name].to(own), share)


def _trainable(extractor: nn.Module, tuned: str) -> set[str]:
    """The names of the parameters that training may change."""
    if tuned == "all":
        return {name for name, _ in extractor.named_parameters()}
    norms = [name for name, module in extractor.named_modules() if tuned == "norms" and isinstance(module, NORMS)]
    return {f"{name}.{each}" for name in norms for each in ("weight", "bias")}


def make_network(
    network: str | nn.Module,
    head: str,
    samples: Samples,
    *,
    seed: int,
    scale: float = 16.0,
    last_relu: bool = True,
    weights: str | None = None,
    side: int | None = None,
    progress: Progress = SILENT,
) -> Network:
    """A new network without classes for samples like these, initialised from `seed` or from published weights.

    With `side`, one that sees so many pixels of their width and height, the middle.
    """
    shape = _seen(samples.shape, side)
    with seeded(seed, "weights"):
        extractor = make_extractor(network, shape, last_relu=last_relu, progress=progress)
    if weights is not None:
        load_weights(extractor, Path(weights))
    extractor = _channels_last(extractor)
    one = torch.zeros(1, *shape, dtype=samples.inputs.dtype)
    if isinstance(extractor, Pretrained):
        mean, std = torch.tensor(extractor.input_mean), torch.tensor(extractor.input_std)
        one = resized(one, extractor.input_size)
    elif network == IDENTITY:
        mean, std = _vector_statistics(samples)
    else:
        mean, std = _statistics(samples, None if weights is None else Path(weights))
    dimension = feature_dimension(extractor, normalise(one, mean, std))
    return Network(extractor, make_head(head, dimension, scale), mean, std, side)


def restore_network(
    network: str | nn.Module,
    head: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    *,
    last_relu: bool = True,
    side: int | None = None,
) -> Network:
    """The network whose state dict `tensors` is, for samples of this shape, of which it sees `side` pixels."""
    classes, dimension = tensors["head.weight"].shape
    own = {name.removeprefix("extractor."): each for name, each in tensors.items() if name.startswith("extractor.")}
    extractor = _channels_last(empty_extractor(network, _seen(shape, side), own, last_relu=last_relu))
    restored = Network(extractor, make_head(head, dimension, scale=1.0), tensors["mean"], tensors["std"], side)
    restored.head.grow(classes)
    restored.load_state_dict(dict(tensors))
    return restored.eval()


def _seen(shape: tuple[int, ...], side: int | None) -> tuple[int, ...]:
    """The shape of what a network sees of samples of this shape."""
    if side is None or len(shape) == 1:
        return shape
    if side > min(shape[:2]):
        raise UsageError(f"Images are {shape[0]} x {shape[1]} pixels: no window of {side} can be cut out. Lower crop.")
    return side, side, shape[2]


def _channels_last(extractor: nn.Module) -> nn.Module:
    """The layout that the convolutions of a CPU are fastest in."""
    return extractor.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _statistics(samples: Samples, weights: Path | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel, or per dimension of vectors: those that weights were trained with, or our own.

    These are of at most 10,000 samples spread over the whole, or of 1,000 where each has to be made.
    """
    published = None if weights is None else published_statistics(weights)
    if published is not None:
        return published
    if weights is not None and len(samples.shape) == 3 and samples.shape[-1] == 3:
        return torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    some = torch.arange(
        0, len(samples), max(1, -(-len(samples) // (1_000 if isinstance(samples.inputs, LazyImages) else 10_000)))
    )
    if len(samples.shape) == 3:
        return _moments(samples, some)
    values = samples.batch(some).double()
    std = values.std(0, correction=0)
    # A constant dimension carries nothing but rounding; dividing by its deviation would carry that, or NaN.
    varies = std > 1e-9 * values.abs().amax(0)
    return values.mean(0).float(), torch.where(varies, std, torch.ones_like(std)).float()


def _vector_statistics(samples: Samples) -> tuple[Tensor, Tensor]:
    """What to subtract from vectors that are used as features, and what to divide them by: (d,) each.

    Features are scaled to unit length, so only directions count. Each column is therefore standardised by its
    within-class deviation and moved `SHIFT` deviations away from 0: then most of the length is the same for all
    vectors, also for classes that come later. The logarithm of a deviation is drawn towards the mean over all columns,
    by the more, the fewer samples there are per dimension: columns of a table have units of their own, but in the
    hundreds of dimensions of an embedding, deviations of a few samples are mostly noise. If no class has two samples,
    nothing is known of deviations, and the vectors are only divided by one number.
    """
    some = torch.arange(0, len(samples), -(-len(samples) // 10_000))  # spread over all classes
    values, members = samples.batch(some).double(), samples.labels[some].unique(return_inverse=True)[1]  # (n, d), (n,)
    counts = torch.bincount(members)
    freedom = len(values) - len(counts)
    if not freedom:
        size = values.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        return torch.zeros(samples.shape), torch.full(samples.shape, float(size))
    means = values.new_zeros(len(counts), values.shape[1]).index_add_(0, members, values) / counts[:, None]  # (K, d)
    deviation = ((values - means[members]).square().sum(0) / freedom).sqrt()  # (d,)
    varies = deviation > 1e-6 * values.abs().amax(0)  # otherwise it is rounding
    # A column that is almost always constant would have outliers of many deviations.
    centre = values.mean(0)
    logs = torch.maximum(deviation, (values - centre).abs().amax(0) / FURTHEST).clamp(min=1e-300).log()
    middle = logs[varies].mean() if bool(varies.any()) else values.square().mean().sqrt().clamp(min=1e-30).log()
    share = freedom / (freedom + PRIOR * values.shape[1])
    scale = torch.where(varies, share * logs + (1 - share) * middle, middle).exp()
    return (centre - SHIFT * scale).float(), scale.float()


def _moments(samples: Samples, some: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel of some images, from sums of whole numbers: a few are in memory at a time."""
    channels = samples.shape[-1]
    total, squares, count = torch.zeros(channels).long(), torch.zeros(channels).long(), 0
    for few in some.split(32):
        values = samples.batch(few).flatten(0, -2).int()  # (pixels, c)
        total, squares, count = total + values.sum(0), squares + values.square().sum(0), count + len(values)
    mean = total.double() / count
    variance = (squares.double() / count - mean.square()).clamp(min=0)
    std = torch.where(variance > 0, variance.sqrt() / 255, torch.ones(()).double())
    return (mean / 255).float(), std.float()
