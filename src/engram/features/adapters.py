"""Adapters φ map stored vectors from the old network's feature space to the new one's (§4.2).

An adapter is fitted to pairs (v̄, v): the features of the same images in the old network and in the new one. To add one,
subclass `Adapter` as a dataclass whose fields are its settings, and enter it in `ADAPTERS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import TrainingError
from engram.features.classifiers.base import Classifier, positions
from engram.features.classifiers.linear import NearestMean
from engram.network import Cache, parallel
from engram.network.losses import feature_distillation
from engram.network.training import uncompiled
from engram.progress import SILENT, Progress
from engram.randomness import generator, seeded
from engram.settings import flatten

INIT_PAIRS = 32_768  # most pairs for the least-squares start: their hidden units, 16 d numbers each, are all in memory
INIT_PENALTY = 0.1  # of the least-squares start: the hidden layers are random, so their outputs are noisy
TRIALS, CHOOSING_STEPS = 2, 240  # of the MLP that `auto` compares with ridge
SMALLEST_VARIANCE = 1e-3  # of the old vectors of pairs, out of 1: below, they only show a translation

ClassificationLoss = Callable[[Tensor, Tensor], Tensor]  # features (n, d) and class_indices (n,) -> L_cls


@dataclass(frozen=True, eq=False)
class Pairs:
    """Features of the same images in the old and the new network, on the device to learn on."""

    old: Tensor  # (n, d): v̄ = h_{t−1}(x)
    new: Tensor  # (n, d): v = h_t(x)
    class_indices: Tensor  # int64 (n,); negative for unlabelled images, which are left out of L_cls
    classification: ClassificationLoss | None = None  # L_cls, Eq. 7, through the new network's fixed head
    cache_key: Sequence[object] | None = None  # all that L_cls depends on; without it, nothing is cached
    make_classifier: Callable[[], Classifier] = NearestMean  # of the kind that adapted vectors are for

    def select(self, rows: Tensor) -> Pairs:
        return replace(self, old=self.old[rows], new=self.new[rows], class_indices=self.class_indices[rows])


class Run(NamedTuple):
    """What a fit depends on besides settings and pairs."""

    seed: int
    task: int
    progress: Progress
    cache: Cache | None


@dataclass(kw_only=True, eq=False)
class Adapter(ABC):
    """Maps unit vectors (n, d) of the old feature space to unit vectors (n, d) of the new one, once it is fitted."""

    name: ClassVar[str]  # its key in ADAPTERS; `auto` returns another adapter when it is fitted
    needs_pairs: ClassVar[bool] = True  # extracting them is the costly part

    @property
    def most_steps(self) -> int:
        """Gradient steps that one `fit` takes at most, including those of choosing between adapters."""
        return 0

    def resolved_settings(self, dimension: int) -> dict[str, Any]:
        """The values that automatic settings stand for with vectors of this dimension."""
        return {}

    def try_steps(self, steps: int, dimension: int, pairs: int | None) -> None:  # noqa: B027 (most take none)
        """Take so many gradient steps, as with this number of pairs, to time them."""

    def fit(
        self, pairs: Pairs, *, seed: int = 0, task: int = 0, progress: Progress = SILENT, cache: Cache | None = None
    ) -> Adapter:
        """Return the fitted adapter: this one or, where another suits the pairs better, that one."""
        if not bool(pairs.old.isfinite().all() & pairs.new.isfinite().all()):
            raise TrainingError("The features of pairs contain NaN or infinity. The task was not committed.")
        return self._fit(pairs, Run(seed, task, progress, cache))

    @abstractmethod
    def _fit(self, pairs: Pairs, run: Run) -> Adapter:
        """Fit to finite pairs."""

    @abstractmethod
    def __call__(self, vectors: Tensor) -> Tensor:
        """Adapt unit vectors (n, d)."""


@dataclass(kw_only=True, eq=False)
class IdentityAdapter(Adapter):
    """Leaves stored vectors as they are."""

    name: ClassVar = "identity"
    needs_pairs: ClassVar = False

    def _fit(self, pairs: Pairs, run: Run) -> Adapter:
        return self

    def __call__(self, vectors: Tensor) -> Tensor:
        return vectors


@dataclass(kw_only=True, eq=False)
class RidgeAdapter(Adapter):
    """A linear map with intercept, in closed form, shrunk towards leaving vectors as they are."""

    name: ClassVar = "ridge"

    adapter_penalty: PositiveFloat = 1e-3  # of ridge, relative to the mean of the pairs' covariance

    centre_old_: Tensor = field(init=False, repr=False)  # float64 (d,)
    centre_new_: Tensor = field(init=False, repr=False)  # float64 (d,)
    change_: Tensor = field(init=False, repr=False)  # float64 (d, d): added to the identity

    def _fit(self, pairs: Pairs, run: Run) -> Adapter:
        with run.progress.phase("adapt"):
            self.centre_old_, self.centre_new_, self.change_ = parallel.broadcast(lambda: self._solution(pairs))
        return self

    def _solution(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        # On the CPU, because not every device has float64.
        old, new = F.normalize(pairs.old.cpu().double()), F.normalize(pairs.new.cpu().double())
        centre_old, centre_new, change = affine_ridge(old, new, self.adapter_penalty)
        if not bool(torch.isfinite(change).all()):
            raise TrainingError("The solution of the ridge adapter is not finite. The task was not committed.")
        return centre_old, centre_new, change

    def __call__(self, vectors: Tensor) -> Tensor:
        centred = vectors.cpu().double() - self.centre_old_
        return F.normalize(centred + centred @ self.change_ + self.centre_new_).float().to(vectors.device)


@dataclass(kw_only=True, eq=False)
class MLPAdapter(Adapter):
    """The paper's φ, an MLP. How it is trained is ours: the paper does not say.

    Pairs with almost no variance only show a translation, and an MLP would map all vectors to the same one: then the
    ridge adapter is used.
    """

    name: ClassVar = "mlp"

    alpha: NonNegativeFloat = 100.0  # α, Eq. 7: the weight of similarity against classification
    adapter_width: PositiveInt | None = None  # d', §5.1; None: 16 d
    adapter_depth: PositiveInt = 2  # hidden layers, §5.4
    adapter_init: Literal["least-squares", "random"] = "least-squares"  # of the last layer
    adapter_steps: PositiveInt | None = None  # None: 720, 18 epochs of CIFAR-100's pairs; from a random start 1600
    adapter_batch: PositiveInt = 128
    adapter_learning_rate: PositiveFloat = 2e-3  # Adam's, falling to zero along a cosine
    adapter_penalty: PositiveFloat = 1e-3  # of ridge, relative to the mean of the pairs' covariance

    network_: AdapterNetwork = field(init=False, repr=False)

    @property
    def steps(self) -> int:
        return self.adapter_steps or (720 if self.adapter_init == "least-squares" else 1600)

    @property
    def most_steps(self) -> int:
        return self.steps

    def resolved_settings(self, dimension: int) -> dict[str, Any]:
        return {"adapter_width": self.adapter_width or 16 * dimension, "adapter_steps": self.steps}

    def try_steps(self, steps: int, dimension: int, pairs: int | None) -> None:
        vectors = torch.randn(self.adapter_batch if pairs is None else min(self.adapter_batch, pairs), dimension)
        class_indices = torch.zeros(len(vectors), dtype=torch.int64)
        drawn = Pairs(vectors, vectors, class_indices, classification=lambda adapted, _: adapted.sum())
        # From a random start: the least-squares start is computed once, not in every step.
        self._mlp(adapter_init="random", adapter_steps=steps).fit(drawn)

    def _mlp(self, **changed: Any) -> MLPAdapter:
        return MLPAdapter(**{**flatten(self), **changed})

    def _fit(self, pairs: Pairs, run: Run) -> Adapter:
        # One process decides for all: their machines may round differently.
        if parallel.broadcast(lambda: float(F.normalize(pairs.old).var(0, correction=0).sum()) < SMALLEST_VARIANCE):
            return RidgeAdapter(adapter_penalty=self.adapter_penalty)._fit(pairs, run)
        dimension, device = pairs.old.shape[1], pairs.old.device
        width = self.resolved_settings(dimension)["adapter_width"]
        with seeded(run.seed, "adapter", run.task):
            network = AdapterNetwork(dimension, width, self.adapter_depth)
        self.network_ = network.to(device)

        def trained() -> dict[str, Tensor]:
            parallel.on_main(lambda: self._train(pairs, run))
            parallel.broadcast_module(self.network_)
            return self.network_.state_dict()

        if run.cache is None or pairs.cache_key is None:
            trained()
        else:
            settings = {**flatten(self), "adapter_steps": self.steps}
            tensors = (pairs.old, pairs.new, pairs.class_indices)
            key = (settings, run.seed, run.task, device.type, *tensors, *pairs.cache_key)
            self.network_.load_state_dict(run.cache.get("adapter", key, trained))
        self.network_.requires_grad_(False)
        return self

    def __call__(self, vectors: Tensor) -> Tensor:
        return self.network_(vectors)  # type: ignore[no-any-return]

    def _train(self, pairs: Pairs, run: Run) -> None:
        old, norms = F.normalize(pairs.old), pairs.new.norm(dim=1, keepdim=True)
        if self.adapter_init == "least-squares":
            some = slice(None, None, -(-len(old) // INIT_PAIRS))  # spread over all
            self.network_.initialise(old[some], F.normalize(pairs.new[some]))
        any_unlabelled = bool((pairs.class_indices < 0).any())
        optimiser = uncompiled(torch.optim.Adam)(self.network_.parameters(), self.adapter_learning_rate, fused=True)
        with run.progress.phase("adapt", self.steps) as phase:
            for step, batch in enumerate(self._batches(len(old), run)):
                decay = (1 + math.cos(math.pi * (step / self.steps))) / 2
                optimiser.param_groups[0]["lr"] = self.adapter_learning_rate * decay
                adapted = self.network_(old[batch])  # (b, d), unit
                similarity = feature_distillation(adapted, pairs.new[batch])
                loss = self.alpha * similarity
                # A linear head scores by length too, so it gets vectors of the length that the new network gives.
                scored, class_indices = adapted * norms[batch], pairs.class_indices[batch]
                if any_unlabelled:
                    scored, class_indices = scored[class_indices >= 0], class_indices[class_indices >= 0]
                if pairs.classification is not None and len(class_indices):
                    loss = loss + pairs.classification(scored, class_indices)
                if not math.isfinite(loss.item()):
                    raise TrainingError("The adapter's loss became NaN or infinite. The task was not committed.")
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                phase.advance(note=f"cosine {1 - similarity.item():.3f}")

    def _batches(self, pairs: int, run: Run) -> Iterator[Tensor]:
        """The indices of each step's pairs: every epoch goes through all pairs in a new random order."""
        per_epoch = -(-pairs // self.adapter_batch)
        for epoch in range(-(-self.steps // per_epoch)):
            order = torch.randperm(pairs, generator=generator(run.seed, "pairs", run.task, epoch))
            yield from order.tensor_split(per_epoch)[: self.steps - epoch * per_epoch]


@dataclass(kw_only=True, eq=False)
class AutoAdapter(MLPAdapter):
    """The MLP or ridge, whichever lets a classifier recognise more images when some classes have adapted vectors.

    A fifth of the classes are held out, and then another fifth: adapters are fitted without them, and a classifier on
    their adapted vectors and the true ones of the other classes, as it will be for old and new classes. Single held-out
    pairs would show nothing, because both adapters do well on classes that they were fitted to. An MLP of few steps is
    enough to tell. With equal accuracies, or a single class, ridge is used.
    """

    @property
    def most_steps(self) -> int:
        return self.steps + TRIALS * min(self.steps, CHOOSING_STEPS)

    def _fit(self, pairs: Pairs, run: Run) -> Adapter:
        if self._prefers_ridge(pairs, run):
            return RidgeAdapter(adapter_penalty=self.adapter_penalty)._fit(pairs, run)
        return super()._fit(pairs, run)

    def _prefers_ridge(self, pairs: Pairs, run: Run) -> bool:
        classes = pairs.class_indices[pairs.class_indices >= 0].unique()
        if len(classes) < 2:
            return True
        few, gain = self._mlp(adapter_steps=min(self.steps, CHOOSING_STEPS)), 0.0
        for trial in range(TRIALS):
            held_out = torch.isin(pairs.class_indices, classes[trial :: min(5, len(classes))])
            seen = pairs.select(~held_out)
            mlp = few._fit(seen, run)
            with run.progress.phase("adapt"):
                ridge = RidgeAdapter(adapter_penalty=self.adapter_penalty).fit(seen)
                gain += recognised(mlp, pairs, held_out) - recognised(ridge, pairs, held_out)
        return parallel.broadcast(lambda: not gain > 0)  # also if a class had too few samples to tell


def recognised(adapter: Adapter, pairs: Pairs, held_out: Tensor) -> float:
    """The accuracy of a classifier that is fitted on adapted vectors of the classes `held_out` (bool, (n,)).

    It is fitted on every other sample of each class, and classifies the rest. Held-out classes weigh as much as the
    others, as if half of all classes were old.
    """
    labelled = pairs.class_indices >= 0
    held_out, class_indices = held_out[labelled], pairs.class_indices[labelled]
    old, new = F.normalize(pairs.old[labelled]), F.normalize(pairs.new[labelled])
    fitted = positions(class_indices) % 2 == 0
    rows = torch.where(held_out[:, None], adapter(old), new)
    classifier = pairs.make_classifier().fit(rows[fitted], class_indices[fitted])
    right = (classifier.classes_[classifier.scores(new[~fitted]).argmax(1)] == class_indices[~fitted]).float()
    return float(right[held_out[~fitted]].mean() + right[~held_out[~fitted]].mean()) / 2


class AdapterNetwork(nn.Module):
    """`depth` hidden layers of `width` units with ReLU, d numbers in and out."""

    centre: Tensor
    scaling: Tensor

    def __init__(self, dimension: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [dimension, *[width] * depth]
        hidden = [layer for i in range(depth) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, dimension))
        self.register_buffer("centre", torch.zeros(dimension))
        # The numbers of a unit vector are of size 1/√d; the initialisation expects 1.
        self.register_buffer("scaling", dimension**0.5 * torch.eye(dimension))

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(self.layers(self._scaled(vectors)))

    def _scaled(self, vectors: Tensor) -> Tensor:
        return (vectors - self.centre) @ self.scaling

    @torch.no_grad()
    def initialise(self, old: Tensor, new: Tensor) -> None:
        """Whiten the inputs and solve the last layer by least squares; the hidden layers stay random.

        Adam then needs hundreds of steps instead of thousands. What φ can represent does not change.
        """
        self.centre.copy_(old.mean(0))
        covariance = torch.cov(old.T.cpu().double(), correction=0)  # (d, d)
        sizes, directions = torch.linalg.eigh(covariance)
        shrunk = sizes.clamp(min=0) + sizes.mean()  # half-way to white: small directions are noise
        self.scaling.copy_((directions * shrunk.rsqrt()) @ directions.T)
        *hidden, last = self.layers
        assert isinstance(last, nn.Linear)
        outputs: Tensor = nn.Sequential(*hidden)(self._scaled(old))  # (n, width)
        centre_outputs, centre_new = outputs.mean(0), new.mean(0)
        weight = ridge_regression(outputs.sub_(centre_outputs), new - centre_new, INIT_PENALTY)  # (width, d)
        last.weight.copy_(weight.T)
        last.bias.copy_(centre_new - centre_outputs @ weight)


ADAPTERS: dict[str, type[Adapter]] = {
    "mlp": MLPAdapter,
    "ridge": RidgeAdapter,
    "auto": AutoAdapter,
    "identity": IdentityAdapter,
}


def affine_ridge(old: Tensor, new: Tensor, penalty: float) -> tuple[Tensor, Tensor, Tensor]:
    """The means m, m' (d,) and the change C (d, d) of the map (x − m) (I + C) + m' from `old` to `new`, (n, d) both.

    The penalty is on C: where pairs say nothing, vectors only move with the mean.
    """
    centre_old, centre_new = old.mean(0), new.mean(0)
    x = old - centre_old
    return centre_old, centre_new, ridge_regression(x, (new - centre_new) - x, penalty)


def ridge_regression(inputs: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Least squares (k, d) from inputs (n, k) to targets (n, d), the penalty relative to the inputs' mean square."""
    samples, width = inputs.shape
    dual = samples < width  # solve the smaller of the two equivalent systems
    gram = inputs @ inputs.T if dual else inputs.T @ inputs
    gram.diagonal().add_(penalty * (gram.trace() / width).clamp(min=1e-12))
    solution: Tensor = torch.linalg.solve(gram, targets if dual else inputs.T @ targets)
    return inputs.T @ solution if dual else solution
