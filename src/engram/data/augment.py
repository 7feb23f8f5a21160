"""Random crops, flips and changes of light, of whole batches of uint8 images."""

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


def change_light(images: Tensor, brightness: float, contrast: float, generator: torch.Generator) -> Tensor:
    """A third of the images (n, h, w, c) as they are, a third brighter or darker, a third of another contrast.

    `brightness` is the most that is added to or taken from every value; contrast is multiplied, about each channel's
    mean, by 1 − `contrast` to 1 + `contrast` (EEIL, §4.1).
    """
    count = len(images)
    kind = torch.randint(0, 3, (count, 1, 1, 1), generator=generator)
    draws = 2 * torch.rand(count, 1, 1, 1, generator=generator) - 1
    values = images.float()
    mean = values.mean((1, 2), keepdim=True)
    shift = torch.where(kind == 1, brightness * draws, torch.zeros(()))
    factor = torch.where(kind == 2, 1 + contrast * draws, torch.ones(()))
    return ((values - mean) * factor + mean + shift).round().clamp(0, 255).to(torch.uint8)
