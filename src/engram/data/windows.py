"""`windows`: parts of pictures of anything, to learn from how a network has moved."""

from __future__ import annotations

from pathlib import Path

import torch

from engram.data.crops import random_resized_crop
from engram.data.pictures import decoded, pictures_below
from engram.data.samples import Samples
from engram.errors import DataError, UsageError
from engram.progress import SILENT, Progress
from engram.randomness import generator
from engram.text import printable

NO_CLASS = -1  # the label of what belongs to no class
AREA = (0.12, 1.0)  # of a picture's middle square


def check_folder(folder: Path) -> None:
    """Refuse what is no folder."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "cannot be found"
        raise UsageError(f"{printable(folder)} {what}. `unlabelled` wants a folder of pictures, of whatever they are.")


def windows(
    folder: Path, shape: tuple[int, ...], count: int, seed: int, purpose: object, progress: Progress = SILENT
) -> Samples:
    """`count` square windows of the pictures in a folder, at random, as samples (n, *shape) of no class.

    Every picture is taken about as often; of more pictures than `count`, some. Those that cannot be read are passed
    over.
    """
    check_folder(folder)
    if len(shape) != 3:
        raise UsageError("`unlabelled` is for images, and these are vectors. Leave it out.")
    height, width, channels = shape
    side = max(height, width)
    paths, _ = pictures_below(folder)
    paths = paths[:: max(1, -(-len(paths) // count))]
    with progress.phase("read", len(paths)) as phase:
        pictures = []
        for outcome in decoded(paths, 2 * side):  # so that a small window is not a blur
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
