"""Unit features for the tests of the classifiers."""

import torch
from torch import Tensor


def overlapping(sizes: list[int], width: int, noise: float = 1.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit features around one random direction per class, in random order, with labels 3, 6, 9, ..."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(len(sizes), width, generator=generator))
    members = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    members = members[torch.randperm(len(members), generator=generator)]
    spread = noise / width**0.5 * torch.randn(len(members), width, generator=generator)
    return torch.nn.functional.normalize(centres[members] + spread), 3 * members + 3
