"""The losses, one function per equation of the paper: a sum over classes, a mean over the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.network import parallel


def sigmoid_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of scores and targets, both (n, k): Eq. 2 for one-hot targets, Eq. 3 for a teacher's."""
    return F.binary_cross_entropy_with_logits(fine(scores), fine(targets), reduction="sum") / len(scores)


def softmax_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2 with a softmax: scores (n, K), class indices (n,)."""
    return F.cross_entropy(scores, labels)


def softmax_distillation(scores: Tensor, teacher_scores: Tensor, temperature: float = 1.0) -> Tensor:
    """Eq. 3 with a softmax over the old classes, (n, K_old) both: the teacher's probabilities as soft targets."""
    return F.cross_entropy(scores / temperature, (teacher_scores / temperature).softmax(1))


def margin_ranking(cosines: Tensor, class_indices: Tensor, new: Tensor, *, top_k: int, margin: float) -> Tensor:
    """LUCIR's Eq. 8: samples of old classes have a larger cosine with their class than with new ones, by a margin.

    `cosines` is (n, K); `new` (bool, (K,)) are the new classes. A mean over the samples of old classes and, for each,
    the `top_k` new classes of largest cosine.
    """
    old = ~new[class_indices]  # (n,)
    top_k = min(top_k, int(new.sum()))
    weight = parallel.mean_weight(old)  # a collective operation, so before any return
    if not top_k or not bool(old.any()):
        return cosines.new_zeros(())
    own = cosines[old].gather(1, class_indices[old, None])  # (m, 1)
    return weight * (margin - own + cosines[old][:, new].topk(top_k).values).clamp(min=0).mean()


def feature_distillation(features: Tensor, teacher_features: Tensor) -> Tensor:
    """Eq. 5: one minus the cosine between new and old features (n, d); also L_sim of the adapter."""
    return (1 - F.cosine_similarity(fine(features), fine(teacher_features))).mean()


def fine(tensor: Tensor) -> Tensor:
    """At least float32: in bfloat16 a difference of similar values is mostly rounding."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
