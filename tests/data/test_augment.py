"""Crops and flips of a whole batch are those of each image on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engram.data.augment import crop_and_flip


def batch(count: int = 40, height: int = 6, width: int = 5, channels: int = 3) -> Tensor:
    # No zeros, so that every one in the result is of the padding.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, height, width, channels), dtype=torch.uint8, generator=generator)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_by_one(images: Tensor, pad: int, flip: bool, draws: torch.Generator) -> Tensor:
    """The definition, pixel by pixel, from the same draws."""
    count, height, width, _ = images.shape
    tops, lefts = torch.randint(0, 2 * pad + 1, (2, count), generator=draws).tolist() if pad else [[0] * count] * 2
    mirrored = (torch.rand(count, generator=draws) < 0.5).tolist() if flip else [False] * count
    result = torch.zeros_like(images)
    for i in range(count):
        for y in range(height):
            for x in range(width):
                from_y = tops[i] + y - pad
                from_x = lefts[i] + (width - 1 - x if mirrored[i] else x) - pad
                if 0 <= from_y < height and 0 <= from_x < width:
                    result[i, y, x] = images[i, from_y, from_x]
    return result


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_is_cropped_and_mirrored_as_its_images_one_by_one(pad: int, flip: bool, channels: int) -> None:
    images = batch(channels=channels)
    result = crop_and_flip(images, pad, flip, generator())
    assert result.dtype == torch.uint8
    assert result.is_contiguous()
    assert torch.equal(result, one_by_one(images, pad, flip, generator()))


def test_the_same_generator_gives_the_same_batch_and_another_another() -> None:
    images = batch()
    first = crop_and_flip(images, 2, True, generator(1))
    torch.rand(7)
    assert torch.equal(crop_and_flip(images, 2, True, generator(1)), first)
    assert not torch.equal(crop_and_flip(images, 2, True, generator(2)), first)


def test_the_batch_given_is_left_as_it_was() -> None:
    images = batch()
    crop_and_flip(images, 2, True, generator()).zero_()
    assert torch.equal(images, batch())


def test_every_place_is_cropped_equally_often_and_half_are_mirrored() -> None:
    # One bright pixel in the middle shows where the crop was taken, another beside it which way round.
    images = torch.zeros(9000, 5, 5, 1, dtype=torch.uint8)
    images[:, 2, 2], images[:, 2, 3] = 2, 1
    result = crop_and_flip(images, 1, True, generator())[..., 0]
    places = (result == 2).flatten(1).int().argmax(1)
    counts = torch.bincount(places, minlength=25).reshape(5, 5)
    assert int(counts[1:4, 1:4].sum()) == 9000
    assert (counts[1:4, 1:4] - 1000).abs().max() < 130  # over four deviations
    mirrored = ((result == 1).flatten(1).int().argmax(1) == places - 1).sum()
    assert abs(int(mirrored) - 4500) < 200
