"""Random crops, flips and changes of brightness or contrast of whole batches of uint8 images."""

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


class Shard(NamedTuple):
    """Which rows of a batch the images are. Draws are made for all of it, so that they are the same however divided."""

    rows: slice
    batch: int  # how many images the whole batch has


def crop_and_flip(
    images: Tensor, pad: int, flip: bool, generator: torch.Generator, shard: Shard | None = None
) -> Tensor:
    """Each image (n, h, w, c) padded by `pad` zeros and cropped back at random; half of them mirrored if `flip`.

    The images may be a part of a batch: they become what they would in the whole.
    """
    count, height, width, _ = images.shape
    rows, batch = shard or Shard(slice(0, count), count)
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


def jitter(
    images: Tensor, brightness: float, contrast: float, generator: torch.Generator, shard: Shard | None = None
) -> Tensor:
    """A third of the images (n, h, w, c) as they are, a third brighter or darker, a third of another contrast.

    `brightness` is the most that is added to or taken from every value; contrast is multiplied, about each channel's
    mean, by 1 − `contrast` to 1 + `contrast` (EEIL, §4.1). The images may be a part of a batch, as above.
    """
    rows, batch = shard or Shard(slice(0, len(images)), len(images))
    kind = torch.randint(0, 3, (batch, 1, 1, 1), generator=generator)[rows]
    draws = 2 * torch.rand(batch, 1, 1, 1, generator=generator)[rows] - 1
    values = images.float()
    mean = values.mean((1, 2), keepdim=True)
    shift = torch.where(kind == 1, brightness * draws, torch.zeros(()))
    factor = torch.where(kind == 2, 1 + contrast * draws, torch.ones(()))
    return ((values - mean) * factor + mean + shift).round().clamp(0, 255).to(torch.uint8)


Range = tuple[float, float]

TRIES = 10  # drawings of area and shape, of which the first that fits into the image counts


def center_crop(images: Tensor, side: int) -> Tensor:
    """The middle (n, side, side, c) of images (n, h, w, c), a view; smaller ones stay as they are."""
    _, height, width, _ = images.shape
    top, left = max(0, (height - side) // 2), max(0, (width - side) // 2)
    return images[:, top : top + side, left : left + side]


def random_crop(images: Tensor, side: int, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
    """Of each image (n, h, w, c) a window (side, side, c) at random."""
    count, height, width, _ = images.shape
    rows, batch = shard or Shard(slice(0, count), count)
    tops = torch.randint(0, height - side + 1, (batch,), generator=generator)[rows]
    lefts = torch.randint(0, width - side + 1, (batch,), generator=generator)[rows]
    windows = zip(images, tops.tolist(), lefts.tolist(), strict=True)
    return torch.stack([image[top : top + side, left : left + side] for image, top, left in windows])


def random_resized_crop(
    images: Tensor, side: int, area: Range, ratio: Range, generator: torch.Generator, shard: Shard | None = None
) -> Tensor:
    """Of each image (n, h, w, c) a window of a random share of its area and a random shape, scaled to (side, side, c).

    Shares are drawn evenly from `area`, width over height from `ratio` on a logarithmic scale (Szegedy et al., 2015).
    """
    count, height, width, _ = images.shape
    rows, batch = shard or Shard(slice(0, count), count)
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


NO_CLASS = -1  # the label of what belongs to no class
AREA = (0.12, 1.0)  # of a picture's middle square


def check_unlabelled_folder(folder: Path) -> None:
    """Refuse what is no folder."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "cannot be found"
        raise UsageError(f"{printable(folder)} {what}. `unlabelled` wants a folder of pictures, of whatever they are.")


def unlabelled_crops(
    folder: Path, shape: tuple[int, ...], count: int, seed: int, purpose: object, progress: Progress = SILENT
) -> Samples:
    """`count` square windows of the pictures in a folder, at random, as samples (n, *shape) of no class.

    Every picture is taken about as often; of more pictures than `count`, some. Those that cannot be read are passed
    over.
    """
    check_unlabelled_folder(folder)
    if len(shape) != 3:
        raise UsageError("`unlabelled` is for images, and these are vectors. Leave it out.")
    height, width, channels = shape
    side = max(height, width)
    paths, _ = images_below(folder)
    paths = paths[:: max(1, -(-len(paths) // count))]
    with progress.phase("read", len(paths)) as phase:
        pictures = []
        for outcome in decode_files(paths, 2 * side):  # so that a small window is not a blur
            if isinstance(outcome, torch.Tensor):
                pictures.append(outcome)
            phase.advance()
    if not pictures:
        raise DataError(
            f"{printable(folder)} has no picture that can be read. `unlabelled` wants some, of whatever they are."
        )
    whole = torch.stack(pictures)
    draws = generator(seed, "windows", purpose)
    parts = []
    for some in torch.arange(count).split(256):  # in float32, one at a time is enough
        cut = random_resized_crop(whole[some % len(whole)], side, AREA, (1.0, 1.0), draws)
        parts.append(cut[:, :height, :width] if channels == 3 else _grey(cut[:, :height, :width]))
    return Samples.of(torch.cat(parts), torch.full((count,), NO_CLASS))


def _grey(images: torch.Tensor) -> torch.Tensor:
    return images.float().mean(dim=-1, keepdim=True).round().to(torch.uint8)
