"""Adapters φ: what carries a stored vector over from the old network's feature space into the new one's (§4.2).

An adapter is learned from pairs (v̄, v): the features of the same images in the old network and in the new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import TrainingError
from engram.progress import SILENT, Progress
from engram.randomness import generator, seeded

Adapter = Callable[[Tensor], Tensor]  # unit vectors (n, d) of the old space -> unit vectors (n, d) of the new


@dataclass(frozen=True, eq=False)
class Pairs:
    """Features of the same images before and after training, and their classes, on the device to learn on."""

    old: Tensor  # (n, d): v̄ = h_{t−1}(x)
    new: Tensor  # (n, d): v = h_t(x)
    columns: Tensor  # int64 (n,)


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How stored vectors are carried over. The optimiser is ours; the paper gives none."""

    adapter: Literal["mlp", "ridge", "identity"] = "mlp"  # mlp: the paper's φ; identity leaves vectors as they are
    alpha: NonNegativeFloat = 100.0  # α, Eq. 7: the weight of similarity against classification
    adapter_width: PositiveInt | None = None  # d', §5.1; None: 16 d
    adapter_depth: PositiveInt = 2  # hidden layers, §5.4
    adapter_steps: PositiveInt = 1600  # 40 epochs of CIFAR-100's 5,000 pairs; fewer pairs need as many steps
    adapter_batch: PositiveInt = 128
    adapter_rate: PositiveFloat = 1e-3  # Adam's, falling to zero along a cosine
    adapter_penalty: PositiveFloat = 1e-3  # of ridge, relative to the mean of the pairs' covariance

    def fit(
        self,
        pairs: Pairs,
        classification: Callable[[Tensor, Tensor], Tensor],
        *,
        seed: int,
        task: int,
        progress: Progress = SILENT,
    ) -> Adapter:
        """Learn an adapter; `classification(features, columns)` is L_cls, through the new network's fixed head."""
        if self.adapter == "identity":
            return lambda vectors: vectors
        if self.adapter == "ridge":
            return fit_ridge(pairs, self.adapter_penalty)
        return self._fit_mlp(pairs, classification, seed, task, progress)

    def _fit_mlp(
        self, pairs: Pairs, classification: Callable[[Tensor, Tensor], Tensor], seed: int, task: int, progress: Progress
    ) -> Adapter:
        dimension = pairs.old.shape[1]
        with seeded(seed, "adapter", task):
            adapter = MLPAdapter(dimension, self.adapter_width or 16 * dimension, self.adapter_depth)
        adapter.to(pairs.old.device)
        optimiser = torch.optim.Adam(adapter.parameters(), self.adapter_rate, fused=True)
        old, norms = F.normalize(pairs.old), pairs.new.norm(dim=1, keepdim=True)
        with progress.phase("adapt", self.adapter_steps) as phase:
            for step, batch in enumerate(self._batches(len(old), seed, task)):
                share = step / self.adapter_steps
                optimiser.param_groups[0]["lr"] = self.adapter_rate * (1 + math.cos(math.pi * share)) / 2
                carried = adapter(old[batch])  # (b, d), unit
                similarity = (1 - F.cosine_similarity(carried, pairs.new[batch])).mean()
                # A plain head scores by length too, so what it sees has the length the new network gives.
                loss = self.alpha * similarity + classification(carried * norms[batch], pairs.columns[batch])
                if not math.isfinite(loss.item()):
                    raise TrainingError("The adapter's loss is not finite. Nothing of this task was kept.")
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                phase.advance(note=f"cosine {1 - similarity.item():.3f}")
        return adapter.requires_grad_(False)

    def _batches(self, pairs: int, seed: int, task: int) -> Iterator[Tensor]:
        """Positions of each step's pairs: all of them once, in random order, then all of them again."""
        per_epoch = -(-pairs // self.adapter_batch)
        for epoch in range(-(-self.adapter_steps // per_epoch)):
            order = torch.randperm(pairs, generator=generator(seed, "pairs", task, epoch))
            yield from order.tensor_split(per_epoch)[: self.adapter_steps - epoch * per_epoch]


class MLPAdapter(nn.Module):
    """The paper's φ: `depth` hidden layers of `width` units with ReLU, d numbers in and out."""

    def __init__(self, dimension: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [dimension, *[width] * depth]
        hidden = [layer for i in range(depth) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, dimension))

    def forward(self, vectors: Tensor) -> Tensor:
        # The numbers of a unit vector are of size 1/√d; the initialisation expects 1.
        return F.normalize(self.layers(vectors * vectors.shape[1] ** 0.5))


def fit_ridge(pairs: Pairs, penalty: float) -> Adapter:
    """A linear map with intercept, in closed form, shrunk towards leaving vectors as they are."""
    # On the CPU, for not every device has float64.
    old, new = F.normalize(pairs.old.cpu().double()), F.normalize(pairs.new.cpu().double())
    centre_old, centre_new = old.mean(0), new.mean(0)
    x, residual = old - centre_old, (new - centre_new) - (old - centre_old)
    covariance = x.T @ x / len(x)  # (d, d)
    ridge = penalty * covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(len(covariance), dtype=torch.float64)
    change = torch.linalg.solve(covariance + ridge, x.T @ residual / len(x))  # (d, d)
    if not bool(torch.isfinite(change).all()):
        raise TrainingError("The adapter's solution is not finite. Nothing of this task was kept.")

    def adapter(vectors: Tensor) -> Tensor:
        shifted = vectors.cpu().double() - centre_old
        return F.normalize(shifted + shifted @ change + centre_new).float().to(vectors.device)

    return adapter
