"""Random changes of whole batches of uint8 images (n, h, w, c): crops, flips, brightness and contrast."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample
from torch.nn.functional import pad as pad_borders

from engram.data.labelled import decode_files, images_below
from engram.data.samples import Samples
from engram.errors import DataError, UsageError
from engram.progress import SILENT, Progress
from engram.randomness import generator
from engram.text import printable

Range = tuple[float, float]

TRIES = 10  # draws of area and aspect ratio; the first that fits into the image counts
NO_CLASS = -1  # the label of unlabelled crops
AREA = (0.12, 1.0)  # of unlabelled crops, as a share of the middle square of an image


class Shard(NamedTuple):
    """Which rows of a batch the images are. Draws are made for the whole batch, so that ranks agree on them."""

    rows: slice
    batch: int  # images in the whole batch


def crop_and_flip(
    images: Tensor, pad: int, flip: bool, generator: torch.Generator, shard: Shard | None = None
) -> Tensor:
    """Pad each image by `pad` zeros and crop it back at random; mirror half of them if `flip`."""
    count, height, width, _ = images.shape
    rows, batch = shard or Shard(slice(0, count), count)
    if pad:
        padded = pad_borders(images, (0, 0, pad, pad, pad, pad))
        images = random_crop(padded, (height, width), generator, shard)
    if flip:
        mirrored = torch.rand(batch, generator=generator)[rows] < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(2), images)
    return images.contiguous()


def jitter(
    images: Tensor, brightness: float, contrast: float, generator: torch.Generator, shard: Shard | None = None
) -> Tensor:
    """Leave a third of the images, change the brightness of a third and the contrast of a third (EEIL, §4.1).

    Brightness changes by at most `brightness`; contrast, about each channel's mean, by a factor 1 ± `contrast`.
    """
    rows, batch = shard or Shard(slice(0, len(images)), len(images))
    kind = torch.randint(0, 3, (batch, 1, 1, 1), generator=generator)[rows]
    draws = 2 * torch.rand(batch, 1, 1, 1, generator=generator)[rows] - 1
    values = images.float()
    mean = values.mean((1, 2), keepdim=True)
    shift = torch.where(kind == 1, brightness * draws, torch.zeros(()))
    factor = torch.where(kind == 2, 1 + contrast * draws, torch.ones(()))
    return ((values - mean) * factor + mean + shift).round().clamp(0, 255).to(torch.uint8)


def center_crop(images: Tensor, side: int) -> Tensor:
    """The middle (n, side, side, c) of each image, a view; smaller images stay as they are."""
    _, height, width, _ = images.shape
    top, left = max(0, (height - side) // 2), max(0, (width - side) // 2)
    return images[:, top : top + side, left : left + side]


def random_crop(
    images: Tensor, size: tuple[int, int], generator: torch.Generator, shard: Shard | None = None
) -> Tensor:
    """A random window of this size (height, width) of each image."""
    count, height, width, _ = images.shape
    rows, batch = shard or Shard(slice(0, count), count)
    tops = torch.randint(0, height - size[0] + 1, (batch,), generator=generator)[rows]
    lefts = torch.randint(0, width - size[1] + 1, (batch,), generator=generator)[rows]
    windows = zip(images, tops.tolist(), lefts.tolist(), strict=True)
    return torch.stack([image[top : top + size[0], left : left + size[1]] for image, top, left in windows])


def random_resized_crop(
    images: Tensor, side: int, area: Range, ratio: Range, generator: torch.Generator, shard: Shard | None = None
) -> Tensor:
    """A window of each image, of random area and aspect ratio, scaled to (side, side, c) (Szegedy et al., 2015).

    The share of the area is uniform in `area`, width over height log-uniform in `ratio`.
    """
    count, height, width, _ = images.shape
    rows, batch = shard or Shard(slice(0, count), count)
    boxes = _boxes(batch, height, width, area, ratio, generator)[rows]  # (n, 4)
    steps = (torch.arange(side) + 0.5) / side  # centres of pixels, as shares of the window
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


def check_unlabelled_folder(folder: Path) -> None:
    """Refuse what is not a folder."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{printable(folder)} {what}. `unlabelled` expects a folder of images.")


def unlabelled_crops(
    folder: Path, shape: tuple[int, ...], count: int, seed: int, purpose: object, progress: Progress = SILENT
) -> Samples:
    """`count` random square crops of the images in a folder, as samples (n, *shape) without a class.

    Every image is used about equally often; of more images than `count`, some. Unreadable files are ignored.
    """
    check_unlabelled_folder(folder)
    if len(shape) != 3:
        raise UsageError("`unlabelled` is for images, but the samples are vectors. Remove it.")
    height, width, channels = shape
    side = max(height, width)
    paths, _ = images_below(folder)
    paths = paths[:: max(1, -(-len(paths) // count))]
    images = []
    with progress.phase("read", len(paths)) as phase:
        for outcome in decode_files(paths, 2 * side):  # twice the side, so that small crops are not blurred
            images += [outcome] if isinstance(outcome, Tensor) else []
            phase.advance()
    if not images:
        raise DataError(f"{printable(folder)} has no readable image. `unlabelled` expects a folder of images.")
    whole = torch.stack(images)
    draws = generator(seed, "windows", purpose)
    parts = []
    for some in torch.arange(count).split(256):  # crops are computed in float32, so not all at once
        crops = random_resized_crop(whole[some % len(whole)], side, AREA, (1.0, 1.0), draws)[:, :height, :width]
        parts.append(crops if channels == 3 else crops.float().mean(dim=-1, keepdim=True).round().to(torch.uint8))
    return Samples.of(torch.cat(parts), torch.full((count,), NO_CLASS))
