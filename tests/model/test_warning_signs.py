"""Warnings of an update: a single class, single images, unequal classes, the same image in two classes."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from folders_made import paint
from images_made import encoded
from models_made import SIDE, draw
from PIL import Image

from engram.model import LearnOptions, ModelFolder, learn


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return ModelFolder(tmp_path / "model")


Warned = Callable[..., tuple[str, ...]]


@pytest.fixture
def warned(folder: ModelFolder, small_weights: Path) -> Warned:
    """Learns, from the small weights first unless other options are given, and returns the warnings."""

    def learn_and_warn(image_files: Path, options: LearnOptions | None = None) -> tuple[str, ...]:
        usual = LearnOptions(weights=None if folder.exists() else small_weights)
        return learn(folder, image_files, options or usual).warnings

    return learn_and_warn


def test_enough_different_images_give_no_warning(warned: Warned, tmp_path: Path) -> None:
    assert warned(paint(tmp_path / "1", ("red", "green"), 5)) == ()
    assert warned(paint(tmp_path / "2", ("blue",), 5)) == ()


def test_a_single_class_is_warned_about(warned: Warned, tmp_path: Path) -> None:
    (warning,) = warned(paint(tmp_path / "1", ("red",), 5))
    assert "one class" in warning
    assert warned(paint(tmp_path / "2", ("green",), 5)) == ()


def test_a_new_class_of_one_image_is_named(warned: Warned, tmp_path: Path) -> None:
    image_files = paint(tmp_path / "1", ("red", "green"), 5)
    paint(image_files, ("blue",), 1)
    (warning,) = warned(image_files)
    assert warning.startswith("Only one image: blue.") and "red" not in warning
    assert warned(paint(tmp_path / "2", ("red",), 1, seed=1)) == ()  # of a known class, one more is no problem


def test_of_many_classes_of_one_image_five_are_named(warned: Warned, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for number in range(8):
        path = tmp_path / "1" / f"class {number}" / "0.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(draws.integers(0, 256, (4, 4, 3)).astype(np.uint8), "PNG"))
    (warning,) = [each for each in warned(tmp_path / "1") if each.startswith("Only one image")]
    assert "class 4 and 3 more" in warning and "class 5" not in warning


@pytest.mark.parametrize(("large", "warns"), [(19, False), (20, True)])
def test_classes_ten_times_larger_than_others_are_warned_about(
    large: int, warns: bool, warned: Warned, tmp_path: Path
) -> None:
    image_files = paint(tmp_path / "1", ("red",), large)
    paint(image_files, ("green",), 2)
    warnings = warned(image_files)
    assert bool(warnings) is warns
    if warns:
        assert "20 images of red, 2 of green" in warnings[0]


def test_duplicate_image_in_two_classes_is_named_in_both(warned: Warned, tmp_path: Path) -> None:
    image_files = paint(tmp_path / "1", ("red", "green", "blue"), 5)
    shutil.copy(image_files / "red" / "3.png", image_files / "green" / "mistake.png")
    (warning,) = warned(image_files)
    for path, name in ((image_files / "red" / "3.png", "red"), (image_files / "green" / "mistake.png", "green")):
        assert f"{path} ({name})" in warning
    assert "blue" not in warning


def test_reencoded_photo_is_found_and_different_photos_are_not(photos: Path, warned: Warned, tmp_path: Path) -> None:
    for source in sorted((photos / "test").iterdir()):
        (tmp_path / "1" / source.name).mkdir(parents=True)
        for path in source.iterdir():
            shutil.copy(path, tmp_path / "1" / source.name)
    original, copy = tmp_path / "1" / "cannon" / "000.jpg", tmp_path / "1" / "wok" / "mistake.jpg"
    Image.open(original).save(copy, quality=85)
    (warning,) = warned(tmp_path / "1", LearnOptions())
    assert f"{original} (cannon)" in warning and f"{copy} (wok)" in warning


def test_duplicate_of_an_earlier_image_names_its_class(warned: Warned, tmp_path: Path) -> None:
    first = paint(tmp_path / "1", ("red", "green"), 5)
    warned(first)
    later = paint(tmp_path / "2", ("blue",), 5)
    shutil.copy(first / "red" / "2.png", later / "blue" / "mistake.png")
    (warning,) = warned(later)
    assert f"{later / 'blue' / 'mistake.png'} (blue) and an image of red" in warning


def test_duplicate_within_a_class_gives_no_warning(warned: Warned, tmp_path: Path) -> None:
    image_files = paint(tmp_path / "1", ("red", "green"), 5)
    shutil.copy(image_files / "red" / "3.png", image_files / "red" / "again.png")
    assert warned(image_files) == ()


def test_one_duplicate_is_named_per_pair_of_classes_and_at_most_five(warned: Warned, tmp_path: Path) -> None:
    names = ("red", "green", "blue", "white")
    image_files = paint(tmp_path / "1", names, 8)
    for number, (one, other) in enumerate(itertools.combinations(names, 2)):
        shutil.copy(image_files / one / f"{number}.png", image_files / other / f"same {number}.png")
    shutil.copy(image_files / "red" / "7.png", image_files / "green" / "same too.png")  # a second one of red and green
    *named, last = warned(image_files)
    assert len(named) == 5 and all(f"{image_files}/" in warning for warning in named)
    pairs = [frozenset(re.findall(r"\((\w+)\)", warning)) for warning in named]
    assert len({*pairs}) == 5 and all(len(pair) == 2 for pair in pairs)
    assert "1 more pair" in last


def test_similar_images_are_not_duplicates(warned: Warned, tmp_path: Path) -> None:
    """Noise around one grey: what all images have in common does not count."""
    assert warned(draw(tmp_path / "1", ("a", "b", "c"), 8)) == ()


def test_duplicates_are_not_reported_for_a_network_from_scratch(warned: Warned, tmp_path: Path) -> None:
    image_files = draw(tmp_path / "1", ("a", "b"), 5)
    shutil.copy(image_files / "a" / "3.png", image_files / "b" / "mistake.png")
    assert warned(image_files, LearnOptions(network="small", image_size=SIDE, epochs=1)) == ()


def test_names_in_warnings_are_escaped(warned: Warned, tmp_path: Path) -> None:
    image_files = paint(tmp_path / "1", ("red",), 5)
    shutil.copytree(image_files / "red", image_files / "\u202eder")
    warnings = warned(image_files)
    assert warnings and all("\u202e" not in warning and r"\u202eder" in warning for warning in warnings)
