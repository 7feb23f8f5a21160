"""Adapters φ: what carries a stored vector over from the old network's feature space into the new one's (§4.2).

An adapter is learned from pairs (v̄, v): the features of the same images in the old network and in the new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import TrainingError
from engram.network import Cache, parallel
from engram.network.losses import feature_distillation
from engram.network.optimisers import uncompiled
from engram.progress import SILENT, Progress
from engram.randomness import generator, seeded

START_PAIRS = 32_768  # that it is found from at the most: their hidden units, 16 d numbers each, are all in memory
CHOOSING_STEPS = 240  # of the MLP that is held against a linear map
LEAST_SPREAD = 1e-3  # of pairs that tell how space turns, out of 1; others, such as a single one, tell where it went
CARRIED = 4096  # vectors that are carried over at a time: their hidden units, too, are in memory
START_PENALTY = 0.1  # of the least squares an adapter begins with: the hidden layers are random, so not to be trusted

Kind = Literal["mlp", "ridge"]
Adapter = Callable[[Tensor], Tensor]  # unit vectors (n, d) of the old space -> unit vectors (n, d) of the new


@dataclass(frozen=True, eq=False)
class Pairs:
    """Features of the same images before and after training, and their classes, on the device to learn on."""

    old: Tensor  # (n, d): v̄ = h_{t−1}(x)
    new: Tensor  # (n, d): v = h_t(x)
    class_indices: Tensor  # int64 (n,); negative, of images of no class, which tell how the network has moved as well


@dataclass(frozen=True, eq=False)
class _Source:
    """All that one adapter is learned from, and what is drawn for it."""

    pairs: Pairs
    classification: Callable[[Tensor, Tensor], Tensor]
    seed: int
    task: int
    known: Sequence[object] | None  # of the classification
    cache: Cache | None


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How stored vectors are carried over. How the adapter is fitted is ours; the paper does not say."""

    # mlp: the paper's φ; identity leaves vectors as they are; auto: mlp or ridge, see `_better`.
    adapter: Literal["mlp", "ridge", "auto", "identity"] = "mlp"
    alpha: NonNegativeFloat = 100.0  # α, Eq. 7: the weight of similarity against classification
    adapter_width: PositiveInt | None = None  # d', §5.1; None: 16 d
    adapter_depth: PositiveInt = 2  # hidden layers, §5.4
    adapter_init: Literal["least-squares", "random"] = "least-squares"  # what the first step finds; see `start_at`
    adapter_steps: PositiveInt | None = None  # None: 720, 18 epochs of CIFAR-100's pairs; from a random start 1600
    adapter_batch: PositiveInt = 128
    adapter_learning_rate: PositiveFloat = 2e-3  # Adam's, falling to zero along a cosine
    adapter_penalty: PositiveFloat = 1e-3  # of ridge, relative to the mean of the pairs' covariance

    @property
    def steps(self) -> int:
        """How many steps an adapter is trained for."""
        return self.adapter_steps or (720 if self.adapter_init == "least-squares" else 1600)

    @property
    def steps_in_all(self) -> int:
        """How many steps of an MLP one adaptation takes at the most: those that choose the adapter too."""
        if self.adapter in ("identity", "ridge"):
            return 0
        return self.steps + (self._choosing_steps if self.adapter == "auto" else 0)

    @property
    def _choosing_steps(self) -> int:
        return min(self.steps, CHOOSING_STEPS)

    def fit(
        self,
        pairs: Pairs,
        classification: Callable[[Tensor, Tensor], Tensor],
        *,
        seed: int,
        task: int,
        progress: Progress = SILENT,
        known: Sequence[object] | None = None,
        cache: Cache | None = None,
    ) -> Adapter:
        """Learn an adapter; `classification(features, class_indices)` is L_cls, through the new network's fixed head.

        With a `cache` and all that L_cls depends on (`known`), an adapter that was fitted before is read.
        """
        if self.adapter == "identity":
            return lambda vectors: vectors
        if not bool(pairs.old.isfinite().all() & pairs.new.isfinite().all()):
            raise TrainingError("The adapter met features that are not finite. Nothing of this task was kept.")
        source = _Source(pairs, classification, seed, task, known, cache)
        if self.adapter != "ridge" and _are_alike(pairs):
            chosen = "ridge"  # which moves all vectors alike, where an MLP would make them all the same
        else:
            chosen = self._better(source, progress) if self.adapter == "auto" else self.adapter
        if chosen == "ridge":
            with progress.phase("adapt"):
                return fit_ridge(pairs, self.adapter_penalty)
        return self._fit_mlp(source, progress)

    def _better(self, source: _Source, progress: Progress) -> Kind:
        """Which adapter brings the means of classes nearer that it has not seen: such are those it is for.

        A fifth of the classes are left out. Single pairs that are left out say nothing: either adapter does well on
        classes it has seen. An MLP of few steps is enough to tell, and where there is but one class, none is trusted.
        """
        pairs = source.pairs
        classes = pairs.class_indices[pairs.class_indices >= 0].unique()
        if len(classes) < 2:
            return "ridge"
        held_out = torch.isin(pairs.class_indices, classes[: max(1, len(classes) // 5)])
        seen = Pairs(pairs.old[~held_out], pairs.new[~held_out], pairs.class_indices[~held_out])
        if _are_alike(seen):
            return "ridge"
        few = replace(self, adapter_steps=self._choosing_steps)
        mlp = few._fit_mlp(replace(source, pairs=seen), progress)
        with progress.phase("adapt"):
            ridge = fit_ridge(seen, self.adapter_penalty)
            old, new = F.normalize(pairs.old[held_out]), F.normalize(pairs.new[held_out])
            errors = [_error_of_means(adapter(old), new, pairs.class_indices[held_out]) for adapter in (mlp, ridge)]
        # Of several processes one decides: their machines may round differently.
        return parallel.broadcast(lambda: "mlp" if errors[0] < errors[1] else "ridge")

    def _fit_mlp(self, source: _Source, progress: Progress) -> Adapter:
        pairs, dimension = source.pairs, source.pairs.old.shape[1]
        with seeded(source.seed, "adapter", source.task):
            adapter = MLPAdapter(dimension, self.adapter_width or 16 * dimension, self.adapter_depth)
        adapter.to(pairs.old.device)

        def learned() -> dict[str, Tensor]:
            parallel.on_main(lambda: self._train(adapter, source, progress))
            parallel.broadcast_module(adapter)
            return adapter.state_dict()

        if source.cache is None or source.known is None:
            learned()
        else:
            how = replace(self, adapter="mlp", adapter_steps=self.steps)
            drawn = (source.seed, source.task, pairs.old.device.type)
            key = (how, *drawn, pairs.old, pairs.new, pairs.class_indices, *source.known)
            adapter.load_state_dict(source.cache.get("adapter", key, learned))
        return adapter.requires_grad_(False)

    def _train(self, adapter: MLPAdapter, source: _Source, progress: Progress) -> None:
        pairs = source.pairs
        old, norms = F.normalize(pairs.old), pairs.new.norm(dim=1, keepdim=True)
        if self.adapter_init == "least-squares":
            some = slice(None, None, -(-len(old) // START_PAIRS))  # spread over all
            adapter.start_at(old[some], F.normalize(pairs.new[some]))
        any_unlabelled = bool((pairs.class_indices < 0).any())
        optimiser = uncompiled(torch.optim.Adam)(adapter.parameters(), self.adapter_learning_rate, fused=True)
        with progress.phase("adapt", self.steps) as phase:
            for step, batch in enumerate(self._batches(len(old), source)):
                share = step / self.steps
                optimiser.param_groups[0]["lr"] = self.adapter_learning_rate * (1 + math.cos(math.pi * share)) / 2
                carried = adapter(old[batch])  # (b, d), unit
                similarity = feature_distillation(carried, pairs.new[batch])
                # A plain head scores by length too, so what it sees has the length the new network gives.
                scored, class_indices = carried * norms[batch], pairs.class_indices[batch]
                if any_unlabelled:
                    scored, class_indices = scored[class_indices >= 0], class_indices[class_indices >= 0]
                loss = self.alpha * similarity
                if len(class_indices):
                    loss = loss + source.classification(scored, class_indices)
                if not math.isfinite(loss.item()):
                    raise TrainingError("The adapter's loss is not finite. Nothing of this task was kept.")
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                phase.advance(note=f"cosine {1 - similarity.item():.3f}")

    def _batches(self, pairs: int, source: _Source) -> Iterator[Tensor]:
        """Positions of each step's pairs: all of them once, in random order, then all of them again."""
        per_epoch = -(-pairs // self.adapter_batch)
        for epoch in range(-(-self.steps // per_epoch)):
            order = torch.randperm(pairs, generator=generator(source.seed, "pairs", source.task, epoch))
            yield from order.tensor_split(per_epoch)[: self.steps - epoch * per_epoch]


class MLPAdapter(nn.Module):
    """The paper's φ: `depth` hidden layers of `width` units with ReLU, d numbers in and out."""

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
    def start_at(self, old: Tensor, new: Tensor) -> None:
        """Begin near the end: inputs whitened, the last layer solved, with the hidden ones as they were drawn.

        Adam has then a few hundred steps to go instead of thousands. What φ can represent stays what it was.
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
        weight = _ridge(outputs.sub_(centre_outputs), new - centre_new, START_PENALTY)  # (width, d)
        last.weight.copy_(weight.T)
        last.bias.copy_(centre_new - centre_outputs @ weight)


def _are_alike(pairs: Pairs) -> bool:
    """Whether pairs lie so close together that they only tell where space went; of several processes, one decides."""
    return parallel.broadcast(lambda: float(F.normalize(pairs.old).var(0, correction=0).sum()) < LEAST_SPREAD)


def kind_of(adapter: Adapter) -> Kind:
    """Of which kind an adapter is that was learned: where it was to be chosen, what was chosen."""
    return "mlp" if isinstance(adapter, MLPAdapter) else "ridge"


def _error_of_means(carried: Tensor, true: Tensor, class_indices: Tensor) -> float:
    """The squared distance between the means of carried and true vectors (n, d), a mean over their classes."""
    means = [
        (carried[class_indices == class_index] - true[class_indices == class_index]).mean(0)
        for class_index in class_indices.unique()
    ]
    return float(torch.stack(means).square().sum(dim=1).mean())


def adapt(adapter: Adapter, vectors: Tensor, device: torch.device) -> Tensor:
    """Vectors (n, d) as the adapter carries them over, computed on `device`; of several processes, a part by each."""
    own = vectors[parallel.part(len(vectors))]
    return parallel.all_gather(torch.cat([adapter(some.to(device)).cpu() for some in own.split(CARRIED)]))


def fit_ridge(pairs: Pairs, penalty: float) -> Adapter:
    """A linear map with intercept, in closed form, shrunk towards leaving vectors as they are."""
    centre_old, change, centre_new = parallel.broadcast(lambda: _ridge_of_pairs(pairs, penalty))

    def adapter(vectors: Tensor) -> Tensor:
        shifted = vectors.cpu().double() - centre_old
        return F.normalize(shifted + shifted @ change + centre_new).float().to(vectors.device)

    return adapter


def _ridge_of_pairs(pairs: Pairs, penalty: float) -> tuple[Tensor, Tensor, Tensor]:
    """The old vectors' centre (d,), what is added to the identity (d, d), and the new vectors' centre."""
    # On the CPU, for not every device has float64.
    old, new = F.normalize(pairs.old.cpu().double()), F.normalize(pairs.new.cpu().double())
    centre_old, centre_new = old.mean(0), new.mean(0)
    x = old - centre_old
    change = _ridge(x, (new - centre_new) - x, penalty)  # (d, d)
    if not bool(torch.isfinite(change).all()):
        raise TrainingError("The adapter's solution is not finite. Nothing of this task was kept.")
    return centre_old, change, centre_new


def _ridge(inputs: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """The map (k, d) of inputs (n, k) to targets (n, d), least squares with a penalty relative to the inputs' size."""
    samples, numbers = inputs.shape
    # Of the two ways to write the solution, the one with the smaller matrix.
    dual = samples < numbers
    gram = inputs @ inputs.T if dual else inputs.T @ inputs
    gram.diagonal().add_(penalty * (gram.trace() / numbers).clamp(min=1e-12))
    solved: Tensor = torch.linalg.solve(gram, targets if dual else inputs.T @ targets)
    return inputs.T @ solved if dual else solved
