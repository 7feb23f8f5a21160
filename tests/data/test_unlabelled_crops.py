"""Random crops of unlabelled images: how many, of which images, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engram.data.augment import unlabelled_crops
from engram.errors import DataError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images of one colour each, in nested folders, and a file that is not an image."""
    for name, colour in (("a/red", (255, 0, 0)), ("a/b/green", (0, 255, 0)), ("blue", (0, 0, 255))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (90, 60), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    return tmp_path


def test_every_image_is_used_about_equally_often_and_crops_have_no_class(folder: Path) -> None:
    found = unlabelled_crops(folder, (8, 8, 3), 31, seed=0, purpose=1)
    assert found.shape == (8, 8, 3) and len(found) == 31
    assert bool((found.labels == -1).all())
    colours = found.batch(torch.arange(31))[:, 4, 4].argmax(dim=1).bincount(minlength=3).tolist()
    assert sorted(colours) == [10, 10, 11]


def test_of_many_images_only_some_are_read(folder: Path) -> None:
    found = unlabelled_crops(folder, (8, 8, 3), 2, seed=0, purpose=1)
    assert len(found) == 2


def test_crops_are_a_function_of_seed_and_purpose(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    one, again, other = (unlabelled_crops(tmp_path, (8, 8, 3), 5, 0, task).batch(torch.arange(5)) for task in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len(one.flatten(1).unique(dim=0)) == 5


def test_crops_have_the_shape_of_the_samples(folder: Path) -> None:
    assert unlabelled_crops(folder, (6, 9, 3), 4, 0, 1).shape == (6, 9, 3)
    grey = unlabelled_crops(folder, (8, 8, 1), 3, 0, 1)
    assert grey.shape == (8, 8, 1)
    assert bool((grey.batch(torch.arange(3)) == 85).all())  # a third of 255


def test_a_folder_without_images_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere "):
        unlabelled_crops(tmp_path / "nowhere", (8, 8, 3), 4, 0, 1)
    with pytest.raises(UsageError, match=r"blue\.png "):
        unlabelled_crops(folder / "blue.png", (8, 8, 3), 4, 0, 1)
    with pytest.raises(UsageError, match="vectors"):
        unlabelled_crops(folder, (64,), 4, 0, 1)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(DataError, match="none "):
        unlabelled_crops(tmp_path / "none", (8, 8, 3), 4, 0, 1)
