"""Heads g_W: from a feature vector to a score per class; they grow with the classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import unknown

Groups = Sequence[Sequence[int]]  # of class indices: each group becomes one class; the others are dropped


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
