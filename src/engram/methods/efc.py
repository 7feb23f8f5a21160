"""Elastic feature consolidation (Magistri et al., ICLR 2024): features may drift where the scores do not notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from engram.methods.objectives import Distillation, TrainingContext
from engram.network import Carried, Network, parallel
from engram.network.losses import fine

BATCH = 256


@dataclass(frozen=True, kw_only=True)
class FeatureConsolidation(Distillation):
    """(L_CE + λ L_KD + Δᵀ (elastic E + rigid I) Δ) / K, where Δ is the drift of an image's features (Eq. 11).

    E, the empirical feature matrix (d, d), is carried from the last task. In place of λ L_KD its authors replay
    prototypes.
    """

    name: ClassVar = "efc"
    carries: ClassVar = True
    of_later_tasks: ClassVar = Distillation.of_later_tasks | {"elastic", "rigid"}

    feature_distillation: NonNegativeFloat = 0.0  # has no effect: the penalty on drift is another
    elastic: NonNegativeFloat = 10.0  # λ_EFM, §4.2
    rigid: NonNegativeFloat = 0.1  # η, §4.2

    def drift_penalty(self, context: TrainingContext) -> Callable[[Tensor, Tensor], Tensor]:
        device, carried = context.student.mean.device, context.student.carried.tensors()
        metric = self.rigid * torch.eye(context.student.dimension, device=device)
        if "feature_matrix" in carried:  # not if another objective trained the teacher
            metric = metric + self.elastic * carried["feature_matrix"].to(device)

        def penalty(features: Tensor, before: Tensor) -> Tensor:
            drift = fine(features) - fine(before)  # (n, d)
            return ((drift @ metric) * drift).sum(1).mean() / self.expected_classes

        return penalty

    def finish(self, context: TrainingContext) -> None:
        context.student.carried = Carried({"feature_matrix": parallel.broadcast(lambda: feature_matrix(context))})

    def carried_bytes(self, network: Network) -> int:
        return 4 * network.dimension**2


def feature_matrix(context: TrainingContext) -> Tensor:
    """E (d, d), Eq. 8: the mean over the task's images of the Fisher information that the scores have of the features.

    It is Jᵀ (diag(p) − p pᵀ) J, where p (K,) are the probabilities and J (K, d) the derivatives of the scores.
    """
    network = context.student.eval()
    head, total = network.head, torch.zeros(network.dimension, network.dimension, device=network.mean.device)
    derivatives = torch.func.vmap(torch.func.jacrev(lambda feature: head(feature[None])[0]))
    for positions in context.arrived.split(BATCH):
        with torch.no_grad():
            features = network.features(context.samples.batch(positions).to(total.device))  # (n, d)
            probabilities = head(features).softmax(1)[:, :, None]  # (n, K, 1)
            jacobian = derivatives(features)  # (n, K, d)
            centred = probabilities.sqrt() * (jacobian - (probabilities * jacobian).sum(1, keepdim=True))
            total += torch.einsum("nkd,nke->de", centred, centred)
    return total / max(1, len(context.arrived))
