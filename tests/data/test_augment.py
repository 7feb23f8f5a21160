"""Crops, flips and jitter of a batch are those of each of its images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engram.data.augment import crop_and_flip, jitter


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
def test_a_batch_is_cropped_and_mirrored_as_single_images_are(pad: int, flip: bool, channels: int) -> None:
    images = batch(channels=channels)
    result = crop_and_flip(images, pad, flip, generator())
    assert result.dtype == torch.uint8
    assert result.is_contiguous()
    assert torch.equal(result, one_by_one(images, pad, flip, generator()))


def test_crops_and_flips_are_a_function_of_the_generator() -> None:
    images = batch()
    first = crop_and_flip(images, 2, True, generator(1))
    torch.rand(7)
    assert torch.equal(crop_and_flip(images, 2, True, generator(1)), first)
    assert not torch.equal(crop_and_flip(images, 2, True, generator(2)), first)


def test_cropping_does_not_change_its_input() -> None:
    images = batch()
    crop_and_flip(images, 2, True, generator()).zero_()
    assert torch.equal(images, batch())


def test_crop_positions_are_uniform_and_half_of_the_images_are_mirrored() -> None:
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


# Light


def striped(count: int) -> Tensor:
    """Images (n, 6, 4, 3) whose channels have the means 120, 128 and 136, half of each 60 below and half above."""
    rows = torch.tensor([-60, 60]).repeat(3)[:, None, None]  # (6, 1, 1)
    image = (torch.tensor([120, 128, 136]) + rows).expand(6, 4, 3)
    return image.to(torch.uint8).repeat(count, 1, 1, 1)


def differences(images: Tensor, changed: Tensor) -> Tensor:
    """The change of each value, (n, h * w * c)."""
    return (changed.int() - images.int()).flatten(1)


def test_a_third_is_unchanged_a_third_changes_brightness_and_a_third_contrast() -> None:
    images = striped(9000)
    moved = differences(images, jitter(images, 63, 0.8, generator()))
    alike = (moved == moved[:, :1]).all(1)  # by the same number everywhere
    untouched = (moved == 0).all(1)
    counts = torch.stack([untouched, alike & ~untouched, ~alike]).sum(1)
    assert (counts - 3000).abs().max() < 250  # over five deviations; a shift below one half is none


def test_brightness_adds_one_bounded_number_to_a_whole_image() -> None:
    images = torch.full((3000, 4, 4, 3), 128, dtype=torch.uint8)
    images[:, 0] = 100  # not of one value: contrast would change it
    moved = differences(images, jitter(images, 63, 0.0, generator()))
    assert bool((moved == moved[:, :1]).all())
    shifts = moved[:, 0]
    assert (int(shifts.min()), int(shifts.max())) == (-63, 63)
    changed = shifts[shifts != 0].float()
    assert 900 < len(changed) < 1100
    assert abs(float(changed.mean())) < 5  # as often brighter as darker: over four deviations
    assert abs(float(changed.abs().mean()) - 32) < 3  # and of every size


def test_contrast_scales_deviations_from_the_mean_of_each_channel_within_bounds() -> None:
    images = striped(3000)
    result = jitter(images, 0.0, 0.8, generator()).float()
    means = result.mean((1, 2))
    assert float((means - torch.tensor([120.0, 128.0, 136.0])).abs().max()) <= 0.5  # rounding
    factors = (result.amax((1, 2)) - result.amin((1, 2))) / 120  # (n, 3)
    rounding = 1 / 120
    assert float((factors - factors[:, :1]).abs().max()) <= 2 * rounding  # one for all channels
    assert 0.2 - rounding <= float(factors.min()) < 0.25
    assert 1.75 < float(factors.max()) <= 1.8 + rounding
    changed = factors[(factors - 1).abs().amax(1) > rounding, 0]
    assert 850 < len(changed) < 1100  # a third, but for factors too near to one
    assert abs(float(changed.mean()) - 1) < 0.07
    spread = result - means[:, None, None]
    assert bool((spread.sign() == spread[:1].sign()).all())  # dark stays dark and bright bright


def test_jittered_values_are_clipped_to_bytes() -> None:
    ends = torch.tensor([0, 255], dtype=torch.uint8).repeat_interleave(300)[:, None, None, None].expand(600, 2, 2, 1)
    black, white = jitter(ends, 63, 0.8, generator()).flatten(1).split(300)
    assert int(black.max()) in range(50, 64) and int(black.min()) == 0
    assert int(white.min()) in range(192, 206) and int(white.max()) == 255
    halves = torch.tensor([0, 255], dtype=torch.uint8)[None, :, None, None].expand(600, 2, 2, 1)
    result = jitter(halves, 0.0, 0.8, generator()).squeeze(3)
    assert bool((result[:, 0] <= 127).all()) and bool((result[:, 1] >= 128).all())  # more contrast cannot turn round
    assert (int(result.min()), int(result.max())) == (0, 255)
    assert int((result[:, 0] > 0).all(1).sum()) > 60  # less contrast is seen


def test_jitter_of_zero_changes_nothing() -> None:
    images = batch()
    assert torch.equal(jitter(images, 0.0, 0.0, generator()), images)


def test_jitter_is_a_function_of_the_generator() -> None:
    images = batch()
    first = jitter(images, 63, 0.8, generator(1))
    assert (first.dtype, first.shape) == (torch.uint8, images.shape)
    torch.rand(7)
    assert torch.equal(jitter(images, 63, 0.8, generator(1)), first)
    assert not torch.equal(jitter(images, 63, 0.8, generator(2)), first)


def test_the_jitter_of_an_image_does_not_depend_on_the_others() -> None:
    images = batch()
    others = images.clone()
    others[1:] = 255 - others[1:]
    first, second = (jitter(each, 63, 0.8, generator(1)) for each in (images, others))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1:], second[1:])


def test_jitter_does_not_change_its_input() -> None:
    images = batch()
    jitter(images, 63, 0.8, generator()).zero_()
    assert torch.equal(images, batch())
