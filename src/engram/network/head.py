"""Heads g_W: from a feature vector to a score per class, growing as classes come."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import unknown


class CosineHead(nn.Module):
    """Scores are cosines between feature and class weights, times a learned scale (§4.1)."""

    def __init__(self, dimension: int, scale: float = 16.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dimension))  # (K, d)
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def grow(self, classes: int) -> None:
        """Add rows for new classes; the old rows, and so the old scores, stay."""
        new = torch.empty(classes, self.weight.shape[1], device=self.weight.device)
        nn.init.normal_(new)  # a row's length does not matter, only its direction
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), F.normalize(new)]))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(features), F.normalize(self.weight))  # (n, K)


class LinearHead(nn.Module):
    """Scores are plain dot products plus a bias."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dimension))  # (K, d)
        self.bias = nn.Parameter(torch.empty(0))  # (K,)

    def grow(self, classes: int) -> None:
        """Add rows for new classes; the old rows, and so the old scores, stay."""
        dimension = self.weight.shape[1]
        new = torch.empty(classes, dimension, device=self.weight.device)
        nn.init.uniform_(new, -(dimension**-0.5), dimension**-0.5)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), new]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), new.new_zeros(classes)]))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)  # (n, K)


Head = CosineHead | LinearHead
HEADS = ("cosine", "linear")


def make_head(name: str, dimension: int, scale: float) -> Head:
    """A head of this kind with no classes yet; `scale` is where a cosine head's begins."""
    if name not in HEADS:
        raise unknown("head", name, HEADS)
    return CosineHead(dimension, scale) if name == "cosine" else LinearHead(dimension)
