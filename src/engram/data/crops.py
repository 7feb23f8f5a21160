"""Windows of whole batches of uint8 images: one in the middle, one at random, or one at random scaled to size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from engram.data.augment import Part

Range = tuple[float, float]

TRIES = 10  # drawings of area and shape, of which the first that fits into the image counts


def middle(images: Tensor, side: int) -> Tensor:
    """The middle (n, side, side, c) of images (n, h, w, c), a view; smaller ones stay as they are."""
    _, height, width, _ = images.shape
    top, left = max(0, (height - side) // 2), max(0, (width - side) // 2)
    return images[:, top : top + side, left : left + side]


def random_crop(images: Tensor, side: int, generator: torch.Generator, part: Part | None = None) -> Tensor:
    """Of each image (n, h, w, c) a window (side, side, c) at random."""
    count, height, width, _ = images.shape
    rows, batch = part or Part(slice(0, count), count)
    tops = torch.randint(0, height - side + 1, (batch,), generator=generator)[rows]
    lefts = torch.randint(0, width - side + 1, (batch,), generator=generator)[rows]
    windows = zip(images, tops.tolist(), lefts.tolist(), strict=True)
    return torch.stack([image[top : top + side, left : left + side] for image, top, left in windows])


def random_resized_crop(
    images: Tensor, side: int, area: Range, ratio: Range, generator: torch.Generator, part: Part | None = None
) -> Tensor:
    """Of each image (n, h, w, c) a window of a random share of its area and a random shape, scaled to (side, side, c).

    Shares are drawn evenly from `area`, width over height from `ratio` on a logarithmic scale (Szegedy et al., 2015).
    """
    count, height, width, _ = images.shape
    rows, batch = part or Part(slice(0, count), count)
    boxes = _boxes(batch, height, width, area, ratio, generator)[rows]  # (n, 4)
    steps = (torch.arange(side) + 0.5) / side  # the centres of the pixels of a window, as shares of its side
    down = (boxes[:, 0:1] + steps * boxes[:, 2:3]) / height  # (n, side), as shares of the image
    across = (boxes[:, 1:2] + steps * boxes[:, 3:4]) / width
    grid = torch.stack(
        [across[:, None, :].expand(count, side, side), down[:, :, None].expand(count, side, side)], dim=-1
    )
    values = images.permute(0, 3, 1, 2).float()
    scaled = grid_sample(values, 2 * grid - 1, mode="bilinear", padding_mode="border", align_corners=False)
    return scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _boxes(count: int, height: int, width: int, area: Range, ratio: Range, generator: torch.Generator) -> Tensor:
    """(top, left, height, width) of a window in each image, in pixels, float (n, 4)."""
    draws = torch.rand(2, count, TRIES, generator=generator)
    places = torch.rand(2, count, generator=generator)
    shares = area[0] + draws[0] * (area[1] - area[0])
    low, high = torch.tensor(ratio).log().tolist()
    shapes = (low + draws[1] * (high - low)).exp()
    down, across = (height * width * shares / shapes).sqrt(), (height * width * shares * shapes).sqrt()
    fits = (down <= height) & (across <= width)
    first = fits.int().argmax(1, keepdim=True)
    # Where none of them fits, the largest square.
    square = torch.tensor(float(min(height, width)))
    down, across = (torch.where(fits.any(1), each.gather(1, first).squeeze(1), square) for each in (down, across))
    return torch.stack([places[0] * (height - down), places[1] * (width - across), down, across], dim=1)
