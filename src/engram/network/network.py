"""`Network`: f = g_W ∘ h_θ, from raw inputs to features and scores."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.data import Samples
from engram.data.augment import center_crop
from engram.data.samples import LazyImages
from engram.errors import DataError, EngramError, TrainingError, UsageError, unknown
from engram.network import parallel
from engram.network.cache import Cache
from engram.network.pretrained import IMAGENET_MEAN, IMAGENET_STD, Pretrained, fold_batch_norms
from engram.network.registry import IDENTITY, feature_dimension, load_weights, make_extractor, restore_extractor
from engram.progress import SILENT, Progress
from engram.randomness import seeded
from engram.storage import tensors_of
from engram.text import printable

# For vectors that are used as features; measured on embeddings of photos, digits and tables (tests/estimator).
SHIFT = 1.0  # standard deviations by which every column is moved away from 0
PRIOR = 0.1  # samples per dimension that weigh as much as the assumption that all columns have one deviation
MAX_DEVIATIONS = 4.0  # between a value and its mean

BATCH = 500  # samples of which features are extracted at once: enough for every core, and for the processor's cache
PIXELS = BATCH * 96 * 96  # of such a batch, at most: activations of more would fill the memory
PRETRAINED_BATCH = 8  # for images of about 224 pixels, as activations of more do not fit the processor's cache

NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
Groups = Sequence[Sequence[int]]  # of class indices: each group becomes one class; the others are dropped
TrainableWeights = Literal["all", "norms", "head"]  # of the whole network, of norm layers and head, or of the head


# Heads g_W: from a feature vector to a score per class; they grow with the classes


class CosineHead(nn.Module):
    """Scores are cosines between feature and class weights, times a learned scale (§4.1)."""

    def __init__(self, dimension: int, scale: float = 16.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dimension))  # (K, d)
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def grow(self, classes: int) -> None:
        """Add rows for new classes; the old scores stay the same."""
        new = torch.empty(classes, self.weight.shape[1], device=self.weight.device)
        nn.init.normal_(new)  # a row's length does not matter, only its direction
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), F.normalize(new)]))

    def regroup(self, groups: Groups) -> None:
        """Replace each group of rows by the direction of their mean."""
        unit = F.normalize(self.weight.detach())
        self.weight = nn.Parameter(F.normalize(_means(unit, groups)))

    def cosines(self, features: Tensor, fixed: int = 0) -> Tensor:
        """The cosines (n, K) without the scale; the first `fixed` rows of the weight get no gradient."""
        weight = torch.cat([self.weight[:fixed].detach(), self.weight[fixed:]]) if fixed else self.weight
        return F.linear(F.normalize(features), F.normalize(weight))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * self.cosines(features)  # (n, K)


class LinearHead(nn.Module):
    """Scores are dot products plus a bias."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dimension))  # (K, d)
        self.bias = nn.Parameter(torch.empty(0))  # (K,)

    def grow(self, classes: int) -> None:
        dimension = self.weight.shape[1]
        new = torch.empty(classes, dimension, device=self.weight.device)
        nn.init.uniform_(new, -(dimension**-0.5), dimension**-0.5)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), new]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), new.new_zeros(classes)]))

    def regroup(self, groups: Groups) -> None:
        """Replace each group of rows by their mean, with the sum of their odds."""
        self.weight = nn.Parameter(_means(self.weight.detach(), groups))
        sizes = self.bias.new_tensor([float(len(group)) for group in groups])
        self.bias = nn.Parameter(_means(self.bias.detach(), groups) + sizes.log())  # exact if the rows are equal

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)  # (n, K)


class CorrectedHead(LinearHead):
    """A linear head whose scores of the newest classes pass through α s + β (BiC, Eq. 4).

    The correction is for the classes of one task, and is dropped when the head grows for the next.
    """

    alpha: Tensor
    beta: Tensor
    newest: Tensor

    def __init__(self, dimension: int) -> None:
        super().__init__(dimension)
        self.register_buffer("alpha", torch.tensor(1.0))
        self.register_buffer("beta", torch.tensor(0.0))
        self.register_buffer("newest", torch.empty(0, dtype=torch.bool))  # (K,): the classes that are corrected

    def grow(self, classes: int) -> None:
        super().grow(classes)
        self.correct(1.0, 0.0, torch.zeros(len(self.weight), dtype=torch.bool))

    def regroup(self, groups: Groups) -> None:
        """As a linear head does; before rows are merged, the correction is applied to them."""
        if any(len(group) > 1 for group in groups):
            alpha, beta = torch.where(self.newest, self.alpha, 1.0), torch.where(self.newest, self.beta, 0.0)  # (K,)
            self.weight = nn.Parameter(self.weight.detach() * alpha[:, None])
            self.bias = nn.Parameter(self.bias.detach() * alpha + beta)
            self.correct(1.0, 0.0, torch.zeros_like(self.newest))
        super().regroup(groups)
        self.newest = self.newest[[group[0] for group in groups]]

    def correct(self, alpha: float, beta: float, newest: Tensor) -> None:
        """Correct the scores of the classes `newest` (bool, (K,)) from now on."""
        self.alpha, self.beta = self.weight.new_tensor(alpha), self.weight.new_tensor(beta)
        self.newest = newest.to(self.weight.device)

    def uncorrected(self, features: Tensor) -> Tensor:
        """The scores (n, K) before the correction."""
        return super().forward(features)

    def forward(self, features: Tensor) -> Tensor:
        scores = self.uncorrected(features)
        return torch.where(self.newest, self.alpha * scores + self.beta, scores)  # (n, K)


class ShiftedHead(LinearHead):
    """A linear head that adds a shift per class to the scores of inputs whose best class is one of `preferred`.

    The shift is dropped when the head grows. The mean score of each class in its first task, and the mean confidence of
    the network then, stay.
    """

    shift: Tensor
    preferred: Tensor
    first_score: Tensor
    first_confidence: Tensor

    def __init__(self, dimension: int) -> None:
        super().__init__(dimension)
        for name in ("shift", "first_score", "first_confidence"):  # (K,); 0 in the last two if nothing is known
            self.register_buffer(name, torch.empty(0))
        self.register_buffer("preferred", torch.empty(0, dtype=torch.bool))  # (K,): scores are shifted if one of these

    def grow(self, classes: int) -> None:
        super().grow(classes)
        more = self.bias.new_zeros(classes)
        self.first_score = torch.cat([self.first_score, more])
        self.first_confidence = torch.cat([self.first_confidence, more])
        self.set_shift(torch.zeros_like(self.bias.detach()), torch.zeros(len(self.bias), dtype=torch.bool))

    def regroup(self, groups: Groups) -> None:
        """As a linear head does; the numbers of merged classes become their mean."""
        super().regroup(groups)
        for name in ("shift", "first_score", "first_confidence"):
            setattr(self, name, _means(getattr(self, name), groups))
        self.preferred = self.preferred[[group[0] for group in groups]]

    def set_shift(self, shift: Tensor, preferred: Tensor) -> None:
        """From now on add `shift` (K,) where the highest score is of one of the classes `preferred` (bool, (K,))."""
        self.shift, self.preferred = shift.to(self.weight), preferred.to(self.weight.device)

    def forward(self, features: Tensor) -> Tensor:
        scores = super().forward(features)
        return scores + self.shift * self.preferred[scores.argmax(1)][:, None]  # (n, K)


Head = CosineHead | LinearHead
HEADS: dict[str, type[Head]] = {
    "cosine": CosineHead,
    "linear": LinearHead,
    "corrected": CorrectedHead,
    "shifted": ShiftedHead,
}


def _means(rows: Tensor, groups: Groups) -> Tensor:
    return torch.stack([rows[list(group)].mean(0) for group in groups])


def make_head(name: str, dimension: int, scale: float) -> Head:
    """A head of this kind without classes; `scale` is the initial one of a cosine head."""
    if name not in HEADS:
        raise unknown("head", name, HEADS)
    return CosineHead(dimension, scale) if name == "cosine" else HEADS[name](dimension)


# The network


def normalise(inputs: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Vectors (n, d), or images (n, h, w, c) of 0..255 as (n, c, h, w) in channels-last memory, standardised."""
    inputs = inputs.to(mean.device)
    if inputs.ndim == 2:
        return (inputs - mean) / std
    return (inputs.float() * (1 / (255 * std)) - mean / std).permute(0, 3, 1, 2)


def resize(images: Tensor, size: int) -> Tensor:
    """Images (n, h, w, c) for a pretrained network: (n, size, size, 3), floats in 0..255; grey becomes colour."""
    pixels = images.permute(0, 3, 1, 2).float()  # (n, c, h, w)
    if pixels.shape[2:] != (size, size):
        smaller = max(pixels.shape[2:]) > size
        pixels = F.interpolate(pixels, (size, size), mode="bicubic", antialias=smaller).clamp(0, 255)
    return pixels.permute(0, 2, 3, 1).expand(-1, -1, -1, 3)


def channels_last(module: nn.Module) -> nn.Module:
    """The module in channels-last memory, in which convolutions on a CPU are fastest."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16; others emulate it slowly."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("avx512_bf16"))


class Carried(nn.Module):
    """Tensors by name, as buffers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor)  # the name of a buffer has no dots

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.buffers())

    def tensors(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}


class Network(nn.Module):
    """A feature extractor and a head, for uint8 images (n, h, w, c) or float vectors (n, d), as `Samples` hold them.

    Inputs are normalised; images are cropped to their centre if `crop` is set, and resized for a pretrained extractor.
    """

    mean: Tensor
    std: Tensor
    is_frozen = False
    is_bfloat16 = False  # whether the extractor computes in bfloat16
    trainable: TrainableWeights = "all"

    def __init__(self, extractor: nn.Module, head: Head, mean: Tensor, std: Tensor, crop: int | None = None) -> None:
        super().__init__()
        self.crop = crop
        self.extractor = extractor
        self.fixed = frozenset(name for name, each in extractor.named_parameters() if not each.requires_grad)
        self.head = head
        self.register_buffer("mean", mean)  # (c,) of images in 0..1, or (d,) of vectors
        self.register_buffer("std", std)
        self.carried = Carried({})  # what an objective carries from task to task; saved with the network
        self.auxiliary = nn.ModuleDict()  # trained with the network, and dropped when training ends

    def features(self, inputs: Tensor) -> Tensor:
        """h_θ(x), (n, d), not normalised."""
        if self.crop is not None and inputs.ndim == 4:
            inputs = center_crop(inputs, self.crop)
        if isinstance(self.extractor, Pretrained):
            inputs = resize(inputs.to(self.mean.device), self.extractor.input_size)
        inputs = normalise(inputs, self.mean, self.std)
        if self.is_bfloat16:
            return self.extractor(inputs.to(torch.bfloat16)).float()  # type: ignore[no-any-return]
        return self.extractor(inputs)  # type: ignore[no-any-return]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(inputs)
        return features, self.head(features)

    def train(self, mode: bool = True) -> Network:
        """As for any module, except that batch norms keep their running statistics unless all weights are trained."""
        super().train(mode)
        if mode and self.trainable != "all":
            for module in self.extractor.modules():
                if isinstance(module, NORM_LAYERS[0]):
                    module.eval()
        return self

    @property
    def classes(self) -> int:
        """K, the number of classes of the head."""
        return len(self.head.weight)

    @property
    def dimension(self) -> int:
        """d, the length of a feature vector."""
        return self.head.weight.shape[1]

    def frozen(self, *, exact: bool = False) -> Network:
        """A copy for inference with folded batch norms; a frozen network returns itself.

        Unless `exact` is set, a pretrained extractor computes in bfloat16 if the device does, and fuses operations.
        """
        if self.is_frozen:
            return self
        frozen = copy.deepcopy(self).eval()
        frozen.carried = Carried({})
        fold_batch_norms(frozen.extractor)
        frozen.extractor = channels_last(frozen.extractor)
        if isinstance(frozen.extractor, Pretrained) and not exact:
            frozen.extractor.fuse()
            frozen.is_bfloat16 = has_bfloat16(self.mean.device)
            frozen.extractor.to(torch.bfloat16 if frozen.is_bfloat16 else torch.float32)
        frozen.is_frozen = True
        return frozen.requires_grad_(False)

    def grown(self, classes: int, *purpose: object, trainable: TrainableWeights = "all") -> Network:
        """A copy for training with `classes` more classes, whose weights are drawn for this purpose (seed first)."""
        student = copy.deepcopy(self).requires_grad_(True)
        student.trainable = trainable
        for name, parameter in student.extractor.named_parameters():
            layer = student.extractor.get_submodule(name.rpartition(".")[0])
            trains = trainable == "all" or (trainable == "norms" and isinstance(layer, NORM_LAYERS))
            # Weights that are frozen in a user's own module stay frozen.
            parameter.requires_grad_(trains and name not in self.fixed)
        with seeded(*purpose):  # type: ignore[arg-type]
            student.head.grow(classes)
        return student

    def extracts_like(self, other: Network) -> bool:
        """Whether both extractors have the same weights, and so give the same features."""
        theirs = other.extractor.state_dict()
        return all(torch.equal(tensor, theirs[name]) for name, tensor in self.extractor.state_dict().items())

    @torch.no_grad()
    def average_with(self, other: Network, share: float) -> None:
        """Weight averaging: move weights and batch-norm statistics of the extractor by this share towards another's.

        Statistics that are re-estimated on the images at hand would forget those of the old classes: on digits (six
        seeds, share .3) accuracy falls by .025.
        """
        others = other.extractor.state_dict()
        for name, own in self.extractor.state_dict().items():
            if own.is_floating_point():  # not the batch counters
                own.lerp_(others[name].to(own), share)


@contextmanager
def unchanged_statistics(network: nn.Module) -> Iterator[None]:
    """Inside, batch norms in training do not update their running statistics."""
    norms = [module for module in network.modules() if isinstance(module, NORM_LAYERS[0])]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def make_network(
    network: str | nn.Module,
    head: str,
    samples: Samples,
    *,
    seed: int,
    scale: float = 16.0,
    last_relu: bool = True,
    weights: str | None = None,
    crop: int | None = None,
    progress: Progress = SILENT,
) -> Network:
    """A new network without classes for samples like these, its weights drawn from `seed` or read from a file."""
    shape = _cropped_shape(samples.shape, crop)
    with seeded(seed, "weights"):
        extractor = make_extractor(network, shape, last_relu=last_relu, progress=progress)
    published = None if weights is None else load_weights(extractor, Path(weights))
    if any(each.dtype != torch.float32 or each.shape != shape[-1:] for each in published or ()):
        raise DataError(f"{printable(weights)} states the mean or deviation of inputs other than {tuple(shape)}.")
    extractor = channels_last(extractor)
    one = torch.zeros(1, *shape, dtype=samples.inputs.dtype)
    if isinstance(extractor, Pretrained):
        mean, std = torch.tensor(extractor.input_mean), torch.tensor(extractor.input_std)
        one = resize(one, extractor.input_size)
    elif network == IDENTITY:
        mean, std = _vector_statistics(samples)
    elif weights is not None and len(shape) == 3 and shape[-1] == 3:
        mean, std = published or (torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD))
    else:
        mean, std = published or _statistics(samples)
    dimension = feature_dimension(extractor, normalise(one, mean, std))
    return Network(extractor, make_head(head, dimension, scale), mean, std, crop)


def restore_network(
    network: str | nn.Module,
    head: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    *,
    last_relu: bool = True,
    crop: int | None = None,
) -> Network:
    """The network with the state dict `tensors`, for samples of this shape."""
    classes, dimension = tensors["head.weight"].shape
    saved = tensors_of(tensors, "extractor")
    extractor = channels_last(restore_extractor(network, _cropped_shape(shape, crop), saved, last_relu=last_relu))
    restored = Network(extractor, make_head(head, dimension, scale=1.0), tensors["mean"], tensors["std"], crop)
    restored.head.grow(classes)
    restored.carried = Carried(tensors_of(tensors, "carried"))
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("extractor.")}
    restored.load_state_dict(rest | {f"extractor.{name}": tensor for name, tensor in extractor.state_dict().items()})
    return restored.eval()


def _cropped_shape(shape: tuple[int, ...], crop: int | None) -> tuple[int, ...]:
    if crop is None or len(shape) == 1:
        return shape
    if crop > min(shape[:2]):
        raise UsageError(f"Images of {shape[0]} x {shape[1]} pixels cannot be cropped to {crop}. Lower crop.")
    return crop, crop, shape[2]


def _statistics(samples: Samples) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, or per dimension of vectors, for the normalisation of inputs.

    They are those of up to 10,000 samples, or of 1,000 that must be decoded first.
    """
    limit = 1_000 if isinstance(samples.inputs, LazyImages) else 10_000
    some = torch.arange(0, len(samples), max(1, -(-len(samples) // limit)))
    if len(samples.shape) == 3:
        return _image_statistics(samples, some)
    values = samples.batch(some).double()
    std = values.std(0, correction=0)
    varies = std > 1e-9 * values.abs().amax(0)  # the deviation of a constant column is rounding
    return values.mean(0).float(), torch.where(varies, std, torch.ones_like(std)).float()


def _image_statistics(samples: Samples, some: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel of images in 0..1, from exact integer sums, 32 images at a time."""
    channels = samples.shape[-1]
    total, squares, count = torch.zeros(channels).long(), torch.zeros(channels).long(), 0
    for few in some.split(32):
        values = samples.batch(few).flatten(0, -2).int()  # (pixels, c)
        total, squares, count = total + values.sum(0), squares + values.square().sum(0), count + len(values)
    mean = total.double() / count
    variance = (squares.double() / count - mean.square()).clamp(min=0)
    std = torch.where(variance > 0, variance.sqrt() / 255, torch.ones(()).double())
    return (mean / 255).float(), std.float()


def _vector_statistics(samples: Samples) -> tuple[Tensor, Tensor]:
    """Shift and scale (d,) for vectors that are used as features.

    Features are scaled to unit length, so only directions count. Each column is divided by its within-class deviation
    and moved `SHIFT` deviations away from 0: then most of the length is the same for all vectors, also of later
    classes. Log deviations shrink towards their mean over the columns, the more so the fewer samples there are per
    dimension: columns of a table have units of their own, but deviations of an embedding's hundreds of dimensions are
    mostly noise. If no class has two samples, vectors are only divided by one number.
    """
    some = torch.arange(0, len(samples), -(-len(samples) // 10_000))  # spread over all classes
    values, members = samples.batch(some).double(), samples.labels[some].unique(return_inverse=True)[1]  # (n, d), (n,)
    counts = torch.bincount(members)  # (K,)
    freedom = len(values) - len(counts)
    if not freedom:
        size = values.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        return torch.zeros(samples.shape), torch.full(samples.shape, float(size))
    means = values.new_zeros(len(counts), values.shape[1]).index_add_(0, members, values) / counts[:, None]  # (K, d)
    deviation = ((values - means[members]).square().sum(0) / freedom).sqrt()  # (d,)
    varies = deviation > 1e-6 * values.abs().amax(0)  # otherwise it is rounding
    centre = values.mean(0)
    # An almost constant column would have outliers of many deviations.
    logs = torch.maximum(deviation, (values - centre).abs().amax(0) / MAX_DEVIATIONS).clamp(min=1e-300).log()
    common = logs[varies].mean() if bool(varies.any()) else values.square().mean().sqrt().clamp(min=1e-30).log()
    share = freedom / (freedom + PRIOR * values.shape[1])
    scale = torch.where(varies, share * logs + (1 - share) * common, common).exp()
    return (centre - SHIFT * scale).float(), scale.float()


def choose_device(device: str) -> torch.device:
    """The device of this name; "auto": the fastest there is. Under torchrun each process has a GPU of its own."""
    if device != "auto":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise EngramError(f"The device '{device}' cannot be used here. Try --device auto.") from error
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() and not parallel.is_distributed() else "cpu")


def extract(
    network: Network,
    samples: Samples,
    progress: Progress = SILENT,
    phase: str = "extract",
    *,
    cache: Cache | None = None,
) -> Tensor:
    """h_θ of all samples, float32 (n, d) on the CPU, not normalised; computed in evaluation mode."""
    network = network.frozen()
    if cache is None:
        return _extract(network, samples, progress, phase)
    key = _key(network, samples)
    return cache.get("features", key, lambda: {"features": _extract(network, samples, progress, phase)})["features"]


def _key(network: Network, samples: Samples) -> Iterator[object]:
    """Everything that features depend on; the head is not part of it."""
    yield from (network.extractor, network.crop, network.mean.device.type, network.is_bfloat16)
    for name, tensor in network.state_dict().items():
        if not name.startswith("head."):
            yield from (name, tensor)
    yield samples.fingerprint()


def _extract(network: Network, samples: Samples, progress: Progress, phase: str) -> Tensor:
    size = PRETRAINED_BATCH if isinstance(network.extractor, Pretrained) else batch_size(samples.shape)
    batches = torch.arange(len(samples)).split(size)
    own = batches[parallel.part(len(batches))]  # of this rank; the batches do not depend on the number of ranks
    features, done = torch.empty(sum(map(len, own)), network.dimension), 0
    with torch.no_grad(), progress.phase(phase, len(features)) as running, closing(samples.batches(own)) as loaded:
        for inputs in loaded:
            features[done : done + len(inputs)] = network.features(inputs).cpu()
            done += len(inputs)
            running.advance(len(inputs))
    features = parallel.all_gather(features)
    if not bool(torch.isfinite(features).all()):
        raise TrainingError("The network gives features that are not finite. The task was not committed.")
    return features


def batch_size(shape: tuple[int, ...]) -> int:
    """The number of samples of this shape in a batch."""
    return BATCH if len(shape) == 1 else max(1, min(BATCH, PIXELS // (shape[0] * shape[1])))
