"""Tiny ImageNet is read as it is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from folders_made import imagenet, tiny_imagenet

from engram.data import DecodeOptions, load
from engram.data.files import ImageFiles
from engram.errors import DataError


@pytest.fixture
def root(tmp_path: Path, cache: Path) -> Path:
    return tiny_imagenet(tmp_path / "tiny-imagenet-200")


def test_classes_are_named_by_their_first_word_with_the_identifier_if_two_share_it(root: Path) -> None:
    assert load("tiny-imagenet-200", root).class_names == ("goldfish", "newt (n00000001)", "newt (n00000002)")
    (root / "words.txt").unlink()
    assert load("tiny-imagenet-200", root).class_names == ("n00000000", "n00000001", "n00000002")


def test_training_images_are_labelled_by_folder_and_validation_images_by_the_list(root: Path) -> None:
    dataset = load("tiny-imagenet-200", root)
    assert dataset.name == "tiny-imagenet-200" and dataset.train.shape == (64, 64, 3)
    assert dataset.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert dataset.test.labels.tolist() == [0, 1, 2, 0, 1, 2]  # val_0 to val_5: classes take turns
    assert isinstance(dataset.test.inputs, ImageFiles)
    for row, label in zip(dataset.test.rows.tolist(), dataset.test.labels.tolist(), strict=True):
        number = int(dataset.test.inputs.index.path(row).stem.removeprefix("val_"))
        assert number % 3 == label
    assert dataset.test.batch(torch.arange(6)).shape == (6, 64, 64, 3)


def test_lists_and_boxes_are_not_reported_as_skipped_but_empty_images_are(root: Path) -> None:
    assert load("tiny-imagenet-200", root).skipped == ()
    (root / "train" / "n00000000" / "images" / "n00000000_9.JPEG").touch()
    assert [left.path.name for left in load("tiny-imagenet-200", root).skipped] == ["n00000000_9.JPEG"]


def test_a_class_list_selects_by_identifier(root: Path, tmp_path: Path) -> None:
    (tmp_path / "some").write_text("n00000002\n")
    dataset = load("tiny-imagenet-200", root, options=DecodeOptions(class_list=tmp_path / "some", size=8))
    assert dataset.class_names == ("newt",) and (len(dataset.train), len(dataset.test)) == (4, 2)


def test_another_layout_is_refused_with_what_is_expected(root: Path, tmp_path: Path) -> None:
    expected = r"Expected wnids\.txt, train/CLASS/images/\*\.JPEG, val/images/\*\.JPEG and val/val_annotations\.txt"
    with pytest.raises(DataError, match=rf"data .*train, val.*{expected}"):
        load("tiny-imagenet-200", imagenet(tmp_path / "data"))
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn00000000\t0\t0\t9\t9\n")
    with pytest.raises(DataError, match=rf"val .*2 of the 3 .*n00000001.*{expected}"):
        load("tiny-imagenet-200", root)
