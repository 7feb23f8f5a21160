"""Random crops and flips of whole batches of uint8 images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_borders


def crop_and_flip(images: Tensor, pad: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Each image (n, h, w, c) padded by `pad` zeros and cropped back at random; half of them mirrored if `flip`."""
    count, height, width, _ = images.shape
    if pad:
        corners = torch.randint(0, 2 * pad + 1, (2, count), generator=generator)
        padded = pad_borders(images, (0, 0, pad, pad, pad, pad))
        # Every window as a view, (n, 2 pad + 1, 2 pad + 1, c, h, w); one gather then copies the chosen ones.
        windows = padded.unfold(1, height, 1).unfold(2, width, 1)
        images = windows[torch.arange(count), corners[0], corners[1]].permute(0, 2, 3, 1)
    if flip:
        mirrored = torch.rand(count, generator=generator) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(2), images)
    return images.contiguous()
