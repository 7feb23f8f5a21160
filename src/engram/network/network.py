"""`Network`: f = g_W ∘ h_θ, from raw inputs to features and scores."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from engram.data import Samples
from engram.data.crops import middle
from engram.data.lazy import Lazy
from engram.errors import UsageError
from engram.network.extractors import (
    feature_dimension,
    fold_batch_norms,
    load_weights,
    make_extractor,
    published_statistics,
)
from engram.network.head import Head, make_head
from engram.randomness import seeded

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what published weights were trained with


def normalise(inputs: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Raw inputs as an extractor wants them; images become (n, c, h, w), channels last in memory."""
    inputs = inputs.to(mean.device)
    if inputs.ndim == 2:
        return (inputs - mean) / std
    return (inputs.float() * (1 / (255 * std)) - mean / std).permute(0, 3, 1, 2)  # NHWC memory is channels-last


class Network(nn.Module):
    """An extractor and a head behind the normalisation of their inputs.

    Takes uint8 images (n, h, w, c) or float vectors (n, d), as `Samples` hold them. Of images larger than `side` it
    sees the middle.
    """

    mean: Tensor
    std: Tensor
    is_frozen = False

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
            inputs = middle(inputs, self.side)
        return self.extractor(normalise(inputs, self.mean, self.std))  # type: ignore[no-any-return]

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

    def frozen(self) -> Network:
        """A copy that only answers, its batch norms folded, so that nothing can train or grow it; of itself, itself."""
        if self.is_frozen:
            return self
        answering = copy.deepcopy(self).eval()
        answering.extractor = fold_batch_norms(answering.extractor)
        answering.is_frozen = True
        return answering.requires_grad_(False)

    def grown(self, classes: int, *purpose: object) -> Network:
        """A copy to be trained, with `classes` more of them, initialised for this purpose (seed first)."""
        student = copy.deepcopy(self).requires_grad_(True)
        for name, parameter in student.extractor.named_parameters():
            parameter.requires_grad_(name not in self.held)  # what was frozen in a module of one's own stays so
        with seeded(*purpose):  # type: ignore[arg-type]
            student.head.grow(classes)
        return student

    @torch.no_grad()
    def average_with(self, other: Network, share: float) -> None:
        """Move the extractor, the statistics of its batch norms too, by this share of the way to another's."""
        others = other.extractor.state_dict()
        for name, own in self.extractor.state_dict().items():
            if own.is_floating_point():  # batches that were seen are counted in integers
                own.lerp_(others[name].to(own), share)


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
) -> Network:
    """A new network without classes for samples like these, initialised from `seed` or from published weights.

    With `side`, one that sees so many pixels of their width and height, the middle.
    """
    shape = _seen(samples.shape, side)
    with seeded(seed, "weights"):
        extractor = make_extractor(network, shape, last_relu=last_relu)
    if weights is not None:
        load_weights(extractor, Path(weights))
    extractor = _channels_last(extractor)
    mean, std = _statistics(samples, None if weights is None else Path(weights))
    one = torch.zeros(1, *shape, dtype=samples.inputs.dtype)
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
    extractor = _channels_last(make_extractor(network, _seen(shape, side), last_relu=last_relu))
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
        0, len(samples), max(1, -(-len(samples) // (1_000 if isinstance(samples.inputs, Lazy) else 10_000)))
    )
    if len(samples.shape) == 3:
        return _moments(samples, some)
    values = samples.batch(some).double()
    std = values.std(0, correction=0)
    # A constant dimension carries nothing but rounding; dividing by its deviation would carry that, or NaN.
    varies = std > 1e-9 * values.abs().amax(0)
    return values.mean(0).float(), torch.where(varies, std, torch.ones_like(std)).float()


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
