"""Samples are views of one tensor, checked on entry, and the same samples have the same fingerprint."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

from engram.data import Dataset, Samples, concatenate
from engram.errors import DataError

RANDOM = np.random.default_rng(5)
IMAGES = RANDOM.integers(0, 256, (8, 4, 5, 3), dtype=np.uint8)
LABELS = np.array([2, 0, 1, 1, 0, 2, 5, 0])


def images() -> Samples:
    return Samples.of(IMAGES.copy(), LABELS.copy())


def content(samples: Samples) -> np.ndarray[Any, Any]:
    return samples.batch(torch.arange(len(samples))).numpy()


def test_images_and_labels_are_kept_unchanged() -> None:
    samples = images()
    assert len(samples) == 8
    assert samples.shape == (4, 5, 3)
    assert samples.inputs.dtype == torch.uint8
    assert samples.labels.dtype == torch.int64
    assert np.array_equal(content(samples), IMAGES)
    assert samples.labels.tolist() == LABELS.tolist()
    assert samples.classes() == (0, 1, 2, 5)


def test_gray_images_get_their_channel_and_vectors_become_float32() -> None:
    assert Samples.of(IMAGES[..., 0].copy(), LABELS).shape == (4, 5, 1)
    vectors = Samples.of(RANDOM.normal(size=(8, 6)), LABELS)
    assert vectors.shape == (6,)
    assert vectors.inputs.dtype == torch.float32
    assert Samples.of(torch.ones(8, 6, dtype=torch.int32), LABELS).inputs.dtype == torch.float32


def test_samples_are_a_view_of_their_input() -> None:
    tensor = torch.from_numpy(IMAGES.copy())
    samples = Samples.of(tensor, LABELS)
    views = [
        samples,
        samples.select(torch.tensor([6, 1])),
        samples.of_classes((0, 5)),
        samples.of_classes((0, 5)).select(torch.tensor([0])),
        concatenate(samples.of_classes((2,)), samples.of_classes((1,))),
    ]
    assert all(view.inputs.data_ptr() == tensor.data_ptr() for view in views)


def test_selecting_follows_the_positions_through_several_views() -> None:
    samples = images().of_classes((0, 2))  # rows 0, 1, 4, 5, 7
    chosen = samples.select(torch.tensor([4, 0, 2]))
    assert chosen.rows.tolist() == [7, 0, 4]
    assert chosen.labels.tolist() == [0, 2, 0]
    assert np.array_equal(content(chosen), IMAGES[[7, 0, 4]])
    assert np.array_equal(chosen.batch(torch.tensor([2, 2])).numpy(), IMAGES[[4, 4]])


def test_a_batch_is_a_copy() -> None:
    samples = images()
    samples.batch(torch.arange(8)).zero_()
    assert np.array_equal(content(samples), IMAGES)


def test_samples_of_classes_keep_their_order() -> None:
    for classes in ((2, 0), (0, 2)):
        assert images().of_classes(classes).rows.tolist() == [0, 1, 4, 5, 7]
    assert len(images().of_classes((3,))) == 0


def test_parts_of_different_tensors_are_joined_in_order() -> None:
    other = Samples.of(IMAGES[::-1].copy(), LABELS[::-1].copy())
    joined = concatenate(images().of_classes((5,)), other.select(torch.tensor([3, 0])))
    assert np.array_equal(content(joined), IMAGES[[6, 4, 7]])
    assert joined.labels.tolist() == [5, 0, 0]


def test_samples_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        images().labels = torch.zeros(8)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (IMAGES.astype(np.float32) / 255, LABELS, r"uint8.*torch\.float32"),
        (IMAGES.transpose(0, 3, 1, 2)[..., :4], LABELS, r"channels.*\(8, 3, 4, 4\)"),
        (np.zeros((8, 4, 4)), LABELS, r"\(n, h, w, c\) .*\(8, 4, 4\)"),
        (np.zeros(8), LABELS, r"\(8,\)"),
        (np.zeros((8, 2, 2, 2, 1), np.uint8), LABELS, r"\(8, 2, 2, 2, 1\)"),
        (np.array([[1.0, np.nan]] * 8), LABELS, "NaN or infinity"),
        (np.array([[1.0, np.inf]] * 8), LABELS, "NaN or infinity"),
        (np.array([[1.0, 1e300]] * 8), LABELS, "NaN or infinity"),  # infinite as float32
        (IMAGES, LABELS[:7], r" 8 .*\(7,\)"),
        (IMAGES, LABELS[:, None], r" 8 .*\(8, 1\)"),
        (IMAGES, LABELS.astype(np.float64), r"torch\.float64"),
        (IMAGES, LABELS > 1, r"torch\.bool"),
    ],
)
def test_wrong_shapes_types_and_values_are_refused(inputs: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Samples.of(inputs, labels)


def changed(array: np.ndarray[Any, Any], place: Any, value: int) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy[place] = value
    return copy


def test_the_fingerprint_does_not_depend_on_how_samples_are_stored() -> None:
    twice = Samples.of(np.concatenate([IMAGES[::-1], IMAGES]), np.concatenate([LABELS[::-1], LABELS]))
    assert twice.select(torch.arange(8, 16)).fingerprint() == images().fingerprint()
    assert twice.fingerprint() != images().fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        Samples.of(changed(IMAGES, (7, 3, 4, 2), IMAGES[7, 3, 4, 2] ^ 1), LABELS),
        Samples.of(IMAGES, changed(LABELS, 7, 1)),
        Samples.of(IMAGES[:7].copy(), LABELS[:7]),
        Samples.of(IMAGES[::-1].copy(), LABELS[::-1].copy()),
        Samples.of(IMAGES.reshape(8, 5, 4, 3), LABELS),
        Samples.of(IMAGES.reshape(8, 60), LABELS),
    ],
    ids=["one pixel", "one label", "one fewer", "another order", "another shape", "vectors"],
)
def test_the_fingerprint_changes_with_any_difference(other: Samples) -> None:
    assert other.fingerprint() != images().fingerprint()


def test_the_fingerprint_covers_the_last_of_many_samples() -> None:
    vectors = np.zeros((5000, 1))  # more than are read at a time
    labels = np.zeros(5000, np.int64)
    fingerprint = Samples.of(vectors, labels).fingerprint()
    assert Samples.of(changed(vectors, 4999, 1), labels).fingerprint() != fingerprint
    assert Samples.of(vectors.copy(), labels.copy()).fingerprint() == fingerprint


def test_a_data_set_refuses_labels_without_a_name_and_samples_of_two_shapes() -> None:
    Dataset("toys", images(), images(), ("a", "b", "c", "d", "e", "f"))
    with pytest.raises(DataError, match=r"toys .*0 to 5.* 5 "):
        Dataset("toys", images(), images(), ("a", "b", "c", "d", "e"))
    negative = Samples.of(IMAGES, changed(LABELS, 0, -1))
    with pytest.raises(DataError, match="-1 to 5"):
        Dataset("toys", images(), negative, ("a", "b", "c", "d", "e", "f"))
    smaller = Samples.of(IMAGES[:, :3].copy(), LABELS)
    with pytest.raises(DataError, match=r"toys .*\(4, 5, 3\).*\(3, 5, 3\)"):
        Dataset("toys", images(), smaller, ("a", "b", "c", "d", "e", "f"))


def test_images_may_have_negative_strides() -> None:
    samples = Samples.of(IMAGES[..., ::-1], LABELS)
    assert np.array_equal(content(samples), IMAGES[..., ::-1])


@pytest.mark.parametrize(
    ("inputs", "labels", "fact"),
    [
        (IMAGES, ["cat"] * 8, "labels .*numbers"),
        (np.array([None] * 8), LABELS, "inputs .*numbers"),
        (np.ones((8, 3), dtype=complex), LABELS, "torch.complex128"),
        (np.ones((8, 0)), LABELS, r"\(8, 0\)"),
        (IMAGES[:, :0], LABELS, r"\(8, 0, 5, 3\)"),
    ],
    ids=["text", "objects", "complex", "no numbers", "no rows"],
)
def test_text_objects_and_empty_samples_are_refused(inputs: Any, labels: Any, fact: str) -> None:
    with pytest.raises(DataError, match=fact):
        Samples.of(inputs, labels)
