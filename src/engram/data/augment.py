"""Random crops, flips and changes of light, of whole batches of uint8 images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_borders


class Part(NamedTuple):
    """Which rows of a batch the images are. Draws are made for all of it, so that they are the same however divided."""

    rows: slice
    batch: int  # how many images the whole batch has


def crop_and_flip(images: Tensor, pad: int, flip: bool, generator: torch.Generator, part: Part | None = None) -> Tensor:
    """Each image (n, h, w, c) padded by `pad` zeros and cropped back at random; half of them mirrored if `flip`.

    The images may be a part of a batch: they become what they would in the whole.
    """
    count, height, width, _ = images.shape
    rows, batch = part or Part(slice(0, count), count)
    if pad:
        corners = torch.randint(0, 2 * pad + 1, (2, batch), generator=generator)[:, rows]
        padded = pad_borders(images, (0, 0, pad, pad, pad, pad))
        # Every window as a view, (n, 2 pad + 1, 2 pad + 1, c, h, w); one gather then copies the chosen ones.
        windows = padded.unfold(1, height, 1).unfold(2, width, 1)
        images = windows[torch.arange(count), corners[0], corners[1]].permute(0, 2, 3, 1)
    if flip:
        mirrored = torch.rand(batch, generator=generator)[rows] < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(2), images)
    return images.contiguous()


def change_light(
    images: Tensor, brightness: float, contrast: float, generator: torch.Generator, part: Part | None = None
) -> Tensor:
    """A third of the images (n, h, w, c) as they are, a third brighter or darker, a third of another contrast.

    `brightness` is the most that is added to or taken from every value; contrast is multiplied, about each channel's
    mean, by 1 − `contrast` to 1 + `contrast` (EEIL, §4.1). The images may be a part of a batch, as above.
    """
    rows, batch = part or Part(slice(0, len(images)), len(images))
    kind = torch.randint(0, 3, (batch, 1, 1, 1), generator=generator)[rows]
    draws = 2 * torch.rand(batch, 1, 1, 1, generator=generator)[rows] - 1
    values = images.float()
    mean = values.mean((1, 2), keepdim=True)
    shift = torch.where(kind == 1, brightness * draws, torch.zeros(()))
    factor = torch.where(kind == 2, 1 + contrast * draws, torch.ones(()))
    return ((values - mean) * factor + mean + shift).round().clamp(0, 255).to(torch.uint8)
