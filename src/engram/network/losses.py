"""The losses, one function per equation of the paper: a sum over classes, a mean over the batch.

σ is a sigmoid (the paper's choice), where each class is a yes-or-no question of its own, or a softmax.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def sigmoid_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of scores against targets, both (n, k): Eq. 2 of one-hot ones, Eq. 3 of a teacher's."""
    return F.binary_cross_entropy_with_logits(scores, targets, reduction="sum") / len(scores)


def softmax_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2 with a softmax: scores (n, K), columns (n,)."""
    return F.cross_entropy(scores, labels)


def softmax_distillation(scores: Tensor, teacher_scores: Tensor, temperature: float = 1.0) -> Tensor:
    """Eq. 3 with a softmax over the old classes, (n, K_old) both: the teacher's probabilities as soft targets."""
    return F.cross_entropy(scores / temperature, (teacher_scores / temperature).softmax(1))


def feature_distillation(features: Tensor, teacher_features: Tensor) -> Tensor:
    """Eq. 5: one minus the cosine between new and old features (n, d); also L_sim of the adapter."""
    return (1 - F.cosine_similarity(features, teacher_features)).mean()
