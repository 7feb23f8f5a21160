"""Crops of images: centred, random, and random with resizing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from engram.data.augment import _boxes, center_crop, random_crop, random_resized_crop

RANDOM = np.random.default_rng(0)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(count: int, height: int, width: int) -> torch.Tensor:
    """Images whose pixels are their own coordinates: (row, column, image)."""
    images = torch.zeros(count, height, width, 3, dtype=torch.uint8)
    images[..., 0] = torch.arange(height)[None, :, None].to(torch.uint8)
    images[..., 1] = torch.arange(width)[None, None, :].to(torch.uint8)
    images[..., 2] = torch.arange(count)[:, None, None].to(torch.uint8)
    return images


def test_a_centre_crop_is_centred_and_keeps_smaller_images() -> None:
    images = numbered(2, 10, 13)
    seen = center_crop(images, 4)
    assert seen.shape == (2, 4, 4, 3)
    assert seen[0, 0, 0].tolist() == [3, 4, 0] and seen[1, -1, -1].tolist() == [6, 7, 1]
    assert torch.equal(center_crop(images, 10), images[:, :, 1:11])
    assert torch.equal(center_crop(images, 64), images)


def test_a_random_crop_is_a_window_anywhere_in_its_image() -> None:
    images = numbered(200, 9, 12)
    crops = random_crop(images, (7, 7), draws())
    assert crops.shape == (200, 7, 7, 3) and crops.is_contiguous()
    tops, lefts = crops[:, 0, 0, 0].tolist(), crops[:, 0, 0, 1].tolist()
    for number, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        assert torch.equal(crops[number], images[number, top : top + 7, left : left + 7])
    assert set(tops) == {0, 1, 2} and set(lefts) == {0, 1, 2, 3, 4, 5}


def test_a_crop_as_large_as_the_image_is_the_image() -> None:
    images = numbered(5, 8, 8)
    assert torch.equal(random_crop(images, (8, 8), draws()), images)
    whole = random_resized_crop(images, 8, (1.0, 1.0), (1.0, 1.0), draws())
    assert torch.equal(whole, images)


@pytest.mark.parametrize("crop", ["random", "resized"])
def test_crops_are_a_function_of_the_generator_alone(crop: str) -> None:
    images = torch.from_numpy(RANDOM.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8))

    def cropped(seed: int) -> torch.Tensor:
        if crop == "random":
            return random_crop(images, (9, 9), draws(seed))
        return random_resized_crop(images, 9, (0.1, 1.0), (3 / 4, 4 / 3), draws(seed))

    torch.manual_seed(5)
    assert torch.equal(cropped(1), cropped(1))
    assert not torch.equal(cropped(1), cropped(2))


def test_a_shard_gets_the_same_windows_as_in_the_whole_batch() -> None:
    images, rows = torch.from_numpy(RANDOM.integers(0, 256, (7, 16, 16, 3), dtype=np.uint8)), slice(2, 5)
    area, ratio = (0.1, 1.0), (3 / 4, 4 / 3)
    part = random_crop(images[rows], (9, 9), draws(), (rows, 7))
    assert torch.equal(part, random_crop(images, (9, 9), draws())[rows])
    part = random_resized_crop(images[rows], 9, area, ratio, draws(), (rows, 7))
    assert torch.equal(part, random_resized_crop(images, 9, area, ratio, draws())[rows])


def test_boxes_have_the_requested_areas_and_ratios_and_lie_inside_the_image() -> None:
    boxes = _boxes(4000, 30, 40, (0.2, 0.6), (0.5, 2.0), draws()).double()
    top, left, height, width = boxes.unbind(1)
    shares, shapes = height * width / (30 * 40), width / height
    assert 0.2 - 1e-5 <= float(shares.min()) < 0.22 and 0.58 < float(shares.max()) <= 0.6 + 1e-5
    assert 0.5 - 1e-5 <= float(shapes.min()) < 0.55 and 1.85 < float(shapes.max()) <= 2.0 + 1e-5
    assert abs(float(shapes.log().mean())) < 0.1  # on a logarithmic scale, wide as often as high
    assert float(top.min()) >= 0 and float((top + height).max()) <= 30 + 1e-4
    assert float(left.min()) >= 0 and float((left + width).max()) <= 40 + 1e-4


def test_if_no_box_fits_the_largest_square_is_used() -> None:
    boxes = _boxes(50, 10, 40, (0.9, 1.0), (1.0, 1.0), draws())
    assert boxes[:, 2:].tolist() == [[10.0, 10.0]] * 50
    assert float(boxes[:, 1].max()) <= 30 and len(boxes[:, 1].unique()) == 50


def test_a_resized_crop_is_scaled_up_as_by_pillow() -> None:
    smooth = torch.from_numpy(RANDOM.integers(0, 256, (8, 5, 5, 3), dtype=np.uint8))
    images = torch.stack(
        [
            torch.from_numpy(np.array(Image.fromarray(each.numpy()).resize((32, 32), Image.Resampling.BICUBIC)))
            for each in smooth
        ]
    )
    crops = random_resized_crop(images, 24, (0.1, 0.3), (3 / 4, 4 / 3), draws(3))
    boxes = _boxes(8, 32, 32, (0.1, 0.3), (3 / 4, 4 / 3), draws(3)).tolist()
    for image, crop, (top, left, height, width) in zip(images, crops, boxes, strict=True):
        box = (left, top, left + width, top + height)
        expected = np.array(Image.fromarray(image.numpy()).resize((24, 24), Image.Resampling.BILINEAR, box))
        # Pillow counts a pixel that lies half outside as half; at the borders they differ by a little.
        assert np.abs(crop.numpy().astype(int) - expected)[2:-2, 2:-2].max() <= 1
