"""An .npz file is read as it was saved, or refused with a DataError that names it."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram.data import arrays, load
from engram.data.samples import Samples
from engram.errors import DataError, UsageError

RANDOM = np.random.default_rng(3)
IMAGES = RANDOM.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
VECTORS = RANDOM.normal(size=(6, 7))
LABELS = np.array([2, 0, 1, 1, 0, 2])
WHOLE: dict[str, Any] = {
    "train_inputs": IMAGES,
    "train_labels": LABELS,
    "test_inputs": IMAGES[:2],
    "test_labels": LABELS[:2],
}


def saved(folder: Path, **content: Any) -> Path:
    path = folder / "flowers.npz"
    np.savez(path, **content)
    return path


def rows(samples: Samples) -> np.ndarray[Any, Any]:
    return samples.batch(torch.arange(len(samples))).numpy()


def test_training_and_test_arrays_are_read_as_saved(tmp_path: Path) -> None:
    dataset = arrays.load(saved(tmp_path, **WHOLE))
    assert np.array_equal(rows(dataset.train), IMAGES) and np.array_equal(rows(dataset.test), IMAGES[:2])
    assert dataset.train.labels.tolist() == LABELS.tolist() and dataset.test.labels.tolist() == [2, 0]
    assert dataset.class_names == ("0", "1", "2")
    assert dataset.name == "flowers"


def test_vectors_are_read_as_float32(tmp_path: Path) -> None:
    content = {**WHOLE, "train_inputs": VECTORS, "test_inputs": VECTORS[:2]}
    assert np.array_equal(rows(arrays.load(saved(tmp_path, **content)).train), VECTORS.astype(np.float32))


def test_compressed_files_and_foreign_byte_orders_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    content = {**WHOLE, "train_inputs": VECTORS.astype(">f8"), "test_inputs": VECTORS[:2].astype(">f8")}
    np.savez_compressed(path, **{**content, "train_labels": LABELS.astype(">i2")})
    dataset = arrays.load(path)
    assert np.array_equal(rows(dataset.train), VECTORS.astype(np.float32))
    assert dataset.train.labels.tolist() == LABELS.tolist()


def test_gray_images_may_lack_their_channel(tmp_path: Path) -> None:
    content = {**WHOLE, "train_inputs": IMAGES[..., 0], "test_inputs": IMAGES[:2, ..., 0]}
    assert arrays.load(saved(tmp_path, **content)).train.shape == (4, 5, 1)


def test_numbers_with_gaps_are_mapped_in_order_and_keep_their_names(tmp_path: Path) -> None:
    content = {**WHOLE, "train_labels": np.array([30, -5, 7, 7, -5, 30]), "test_labels": np.array([7, 30], np.uint8)}
    dataset = arrays.load(saved(tmp_path, **content))
    assert dataset.class_names == ("-5", "7", "30")
    assert dataset.train.labels.tolist() == [2, 0, 1, 1, 0, 2] and dataset.test.labels.tolist() == [1, 2]


@pytest.mark.parametrize("kind", [str, bytes])
def test_text_is_mapped_in_order_and_kept_as_names(kind: type, tmp_path: Path) -> None:
    texts: np.ndarray[Any, Any] = np.array(["rose", "aster", "lily", "lily", "aster", "rose"]).astype(kind)
    dataset = arrays.load(saved(tmp_path, **{**WHOLE, "train_labels": texts, "test_labels": texts[:2]}))
    assert dataset.class_names == ("aster", "lily", "rose")
    assert dataset.train.labels.tolist() == [2, 0, 1, 1, 0, 2] and dataset.test.labels.tolist() == [2, 0]


def test_class_names_give_integer_labels_their_names(tmp_path: Path) -> None:
    dataset = arrays.load(saved(tmp_path, **WHOLE, class_names=np.array(["rose", "aster", "lily"])))
    assert dataset.class_names == ("rose", "aster", "lily")
    assert dataset.train.labels.tolist() == LABELS.tolist()


def test_class_names_order_text_labels_and_unused_names_are_skipped(tmp_path: Path) -> None:
    texts = np.array(["rose", "aster", "lily", "lily", "aster", "rose"])
    content = {**WHOLE, "train_labels": texts, "test_labels": texts[:2]}
    dataset = arrays.load(saved(tmp_path, **content, class_names=np.array(["rose", "violet", "lily", "aster"])))
    assert dataset.class_names == ("rose", "lily", "aster")
    assert dataset.train.labels.tolist() == [0, 2, 1, 1, 2, 0]


def test_without_a_split_a_fixed_fifth_of_each_class_is_the_test_split(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 50, 2, 1])
    inputs = np.arange(153, dtype=np.float32).reshape(-1, 1)  # each sample is its own number
    dataset = arrays.load(saved(tmp_path, inputs=inputs, labels=labels))
    assert dataset.train.labels.bincount(minlength=4).tolist() == [80, 40, 1, 1]
    assert dataset.test.labels.bincount(minlength=4).tolist() == [20, 10, 1, 0]
    train, test = rows(dataset.train)[:, 0].tolist(), rows(dataset.test)[:, 0].tolist()
    assert sorted([*train, *test]) == list(range(153))
    assert train == sorted(train) and test == sorted(test)
    assert [int(labels[int(number)]) for number in test] == dataset.test.labels.tolist()
    again = arrays.load(saved(tmp_path, inputs=inputs, labels=labels))
    assert rows(again.test)[:, 0].tolist() == test
    assert test[:20] != list(range(20)) and test[:20] != list(range(80, 100))


def test_other_arrays_in_the_file_are_ignored(tmp_path: Path) -> None:
    objects = np.array([{}, None], dtype=object)
    assert len(arrays.load(saved(tmp_path, **WHOLE, notes=objects)).train) == 6


class Malice:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.proof}'",)


@pytest.mark.parametrize("key", ["train_inputs", "test_labels", "class_names"])
def test_arrays_of_objects_are_refused_without_unpickling_them(key: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    path = saved(tmp_path, **{**WHOLE, key: np.array([Malice(proof)], dtype=object)})
    with pytest.raises(DataError, match=rf"flowers\.npz: '{key}' .*Python objects"):
        arrays.load(path)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_inputs": IMAGES[0]}, "'train_inputs': .* 4 "),
        ({"train_inputs": np.zeros((6, 4, 5, 2), np.uint8)}, r"'train_inputs': .*\(6, 4, 5, 2\)"),
        ({"test_inputs": IMAGES[:2].astype(float)}, "'test_inputs': .*uint8"),
        ({"train_inputs": np.zeros(6)}, r"'train_inputs': .*\(6,\)"),
        ({"train_inputs": VECTORS * np.nan}, "'train_inputs': .*NaN"),
        ({"train_inputs": VECTORS * 1j}, "'train_inputs' .*complex128"),
        ({"train_inputs": np.array(["a"] * 6)}, "'train_inputs' .*<U1"),
        ({"test_inputs": VECTORS[:2]}, r"\(4, 5, 3\).* \(7,\)"),
        ({"train_labels": LABELS[:5]}, r" 6 .*\(5,\)"),
        ({"train_labels": LABELS * 1.0}, r"'train_labels' .*float64 \(6,\)"),
        ({"train_labels": LABELS > 1}, r"'train_labels' .*bool \(6,\)"),
        ({"train_labels": LABELS[:, None]}, r"'train_labels' .*int64 \(6, 1\)"),
        ({"train_labels": LABELS.astype(str)}, "train_labels and test_labels"),
        ({"train_labels": LABELS[:0], "train_inputs": IMAGES[:0]}, "'train_labels' .*empty"),
        ({"test_labels": np.array([0, 9])}, "'test_labels' .*9.*'train_labels'"),
        ({"train_labels": np.array([b"\xff"] * 6)}, "'train_labels' .*UTF-8"),
        ({"class_names": np.array(["a", "b"])}, "'train_labels' .*2.*'class_names'"),
        ({"class_names": np.array(["a", "b", "a"])}, "'class_names' "),
        ({"class_names": np.array([1, 2, 3])}, "'class_names' .*int64"),
        ({"class_names": np.array("abc")}, "'class_names' "),
    ],
)
def test_arrays_of_the_wrong_shape_or_type_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, **{**WHOLE, **changes})
    with pytest.raises(DataError, match=rf"{path.stem}.*{message}"):
        arrays.load(path)


@pytest.mark.parametrize(
    ("content", "lacking"),
    [
        ({"x": LABELS, "y": LABELS}, "train_inputs, train_labels, test_inputs, test_labels; .*x, y"),
        ({"inputs": IMAGES}, "labels; .*inputs"),
        (
            {"train_inputs": IMAGES, "labels": LABELS},
            "train_labels, test_inputs, test_labels; .*train_inputs, labels",
        ),
        ({}, "nothing"),
    ],
)
def test_missing_keys_are_named_with_those_found(content: dict[str, Any], lacking: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{lacking}.*inputs and labels"):
        arrays.load(saved(tmp_path, **content))


def test_one_sample_per_class_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one sample per class"):
        arrays.load(saved(tmp_path, inputs=VECTORS[:3], labels=np.arange(3)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            arrays.load(path)


def test_other_formats_are_refused_without_unpickling(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", IMAGES)
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Malice(tmp_path / "proof")))
    for name in ("one.npy", "text.npz", "empty.npz", "pickle.npz"):
        with pytest.raises(DataError, match=rf"{name}.*numpy\.savez"):
            arrays.load(tmp_path / name)
    assert not (tmp_path / "proof").exists()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, **WHOLE)
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"flowers\.npz"):
        arrays.load(path)


@pytest.mark.parametrize("prefix", [b"\0", b"\x80", b"\x93NUMPY"])
def test_a_file_with_a_damaged_beginning_is_refused(prefix: bytes, tmp_path: Path) -> None:
    path = saved(tmp_path, **WHOLE)
    path.write_bytes(prefix + path.read_bytes()[len(prefix) :])
    with pytest.raises(DataError, match=path.name):
        arrays.load(path)


def test_an_array_followed_by_a_zip_archive_is_read_as_the_archive(tmp_path: Path) -> None:
    path = saved(tmp_path, **WHOLE)
    np.save(tmp_path / "one.npy", IMAGES)
    path.write_bytes((tmp_path / "one.npy").read_bytes() + path.read_bytes())
    assert len(arrays.load(path).train) == 6


def test_arrays_larger_than_the_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, inputs=np.zeros((10, 100_000), np.uint8), labels=LABELS)
    assert path.stat().st_size < 10_000
    monkeypatch.setattr("engram.data.arrays.machine_memory", lambda: 810_000)
    with pytest.raises(DataError, match=r"bomb\.npz.* 810,000 bytes"):
        arrays.load(path)


@pytest.mark.parametrize("error", [MemoryError("too large"), RuntimeError("DefaultCPUAllocator: can't allocate")])
def test_arrays_that_cannot_be_allocated_are_refused(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Samples, "of", refuse)
    with pytest.raises(DataError, match=r"flowers\.npz"):
        arrays.load(saved(tmp_path, **WHOLE))


@pytest.mark.timeout(20)
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match=r"pipe\.npz"):
        arrays.load(tmp_path / "pipe.npz")


def test_a_member_that_is_not_an_array_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, **{key: value for key, value in WHOLE.items() if key != "test_labels"})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("test_labels.npy", b"text")
    with pytest.raises(DataError, match="'test_labels'"):
        arrays.load(path)


def test_arrays_need_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data FILE\.npz"):
        load("arrays")
    assert load("arrays", str(saved(tmp_path, **WHOLE))).name == "flowers"


def test_a_member_that_numpy_cannot_read_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, **WHOLE)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"'shape': (6, 4, 5, 3), }", b"'shape': (6, 4, 5, 3   }"))  # of a part, its header
    with pytest.raises(DataError, match=r"flowers\.npz: 'train_inputs' "):
        arrays.load(path)


def test_labels_beyond_int64_are_refused(tmp_path: Path) -> None:
    labels = np.array([2**64 - 1, 0, 1, 1, 0, 2**64 - 1], dtype=np.uint64)
    with pytest.raises(DataError, match=r"'labels' .*18446744073709551615"):
        arrays.load(saved(tmp_path, inputs=IMAGES, labels=labels))
