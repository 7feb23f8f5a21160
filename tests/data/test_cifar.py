"""CIFAR is read as plain pickle and numpy read it, and nothing else in a file has any effect."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram.data import cifar, load
from engram.data.cifar import CIFAR100, Release
from engram.data.samples import Samples
from engram.errors import DataError

MakeRelease = Callable[..., Release]


def read_by_pickle(path: Path) -> dict[str, Any]:
    """An independent reader, which trusts the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core is deprecated, but it is what the official files name
        content: dict[str, Any] = pickle.loads(path.read_bytes(), encoding="latin1")
    return content


def assert_same(samples: Samples, folder: Path, files: tuple[str, ...], labels_key: str) -> None:
    contents = [read_by_pickle(folder / file) for file in files]
    pixels = np.concatenate([content["data"] for content in contents])
    red, green, blue = pixels[:, :1024], pixels[:, 1024:2048], pixels[:, 2048:]
    expected = np.stack([red, green, blue], axis=-1).reshape(-1, 32, 32, 3)
    assert samples.inputs.dtype == torch.uint8
    assert np.array_equal(samples.batch(torch.arange(len(samples))).numpy(), expected)
    assert samples.labels.tolist() == [label for content in contents for label in content[labels_key]]


def test_a_release_is_read_as_plain_pickle_and_numpy_read_it(
    official: Release, make_release: MakeRelease, tmp_path: Path
) -> None:
    release = make_release(official)
    dataset = cifar.load(release, tmp_path)
    assert_same(dataset.train, tmp_path / release.folder, release.train, release.labels_key)
    assert_same(dataset.test, tmp_path / release.folder, release.test, release.labels_key)
    assert dataset.class_names == ("ant", "bee", "café")
    assert dataset.name == release.name


def test_the_tiny_releases_refer_to_the_same_globals_as_the_official_files(
    make_release: MakeRelease, tmp_path: Path
) -> None:
    release = make_release()
    content = (tmp_path / release.folder / "train").read_bytes()
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in content
    assert b"cnumpy\nndarray\n" in content and b"cnumpy\ndtype\n" in content


def test_the_root_may_be_the_release_folder_itself(make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release()
    assert len(cifar.load(release, tmp_path / release.folder).train) == 5


def test_a_damaged_file_is_refused_by_its_checksum(
    official: Release, make_release: MakeRelease, tmp_path: Path
) -> None:
    release = make_release(official)
    path = tmp_path / release.folder / release.train[-1]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=rf"{path}.*MD5 .*[0-9a-f]{{32}}") as caught:
        cifar.load(release, tmp_path)
    assert release.checksums[path.name] in str(caught.value)


class Malice:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.proof}'",)


@pytest.mark.parametrize("file", ["train", "test", "meta"])
def test_a_malicious_pickle_executes_nothing(file: str, make_release: MakeRelease, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    malicious = pickle.dumps({"data": Malice(proof)}, protocol=2)
    release = make_release(**{file: malicious})
    with pytest.raises(DataError, match=rf"{file} .*(posix|nt)\.system"):
        cifar.load(release, tmp_path)
    assert not proof.exists()
    pickle.loads(malicious)
    assert proof.exists(), "this pickle is harmless, so the test shows nothing"


def test_a_file_with_the_wrong_checksum_is_not_unpickled(make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release()
    (tmp_path / release.folder / "train").write_bytes(pickle.dumps(Malice(tmp_path / "proof"), protocol=2))
    with pytest.raises(DataError, match="MD5"):
        cifar.load(release, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "numpy load",
        "numpy.core.multiarray fromfile",
        "numpy.core.multiarray scalar",
        "builtins eval",
        "numpy os.system",
    ],
)
def test_only_three_globals_are_allowed(name: str, make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release(train=b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(DataError, match=name.replace(" ", ".")):
        cifar.load(release, tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train": {"data": np.zeros((5, 3071), np.uint8)}}, "data"),
        ({"train": {"data": np.zeros((5, 3072), np.int64)}}, "data"),
        ({"train": {"data": np.zeros(3072, np.uint8)}}, "data"),
        ({"train": {"data": np.array(3, np.uint8)}}, "data"),
        ({"train": {"data": "pixels"}}, "data"),
        ({"train": {"data": None}}, "data"),
        ({"test": {"fine_labels": None}}, "fine_labels"),
        ({"test": {"fine_labels": [0, 1]}}, "fine_labels"),
        ({"test": {"fine_labels": [0, 1, 2, 0, "a"]}}, "fine_labels"),
        ({"test": {"fine_labels": [0, 1, 2, 0, 3]}}, "fine_labels"),
        ({"test": {"fine_labels": [0, 1, 2, 0, -1]}}, "fine_labels"),
        ({"meta": {"fine_label_names": []}}, "fine_label_names"),
        ({"meta": {"fine_label_names": [1, 2, 3]}}, "fine_label_names"),
        ({"meta": {"fine_label_names": None}}, "fine_label_names"),
        ({"meta": b"]."}, ""),
        ({"train": b"no pickle"}, ""),
        ({"train": b""}, ""),
        ({"train": b"\x80\x02cnumpy\nndarray\nK\x01\x85R(b."}, ""),
    ],
)
def test_a_file_with_unexpected_content_is_refused_by_name(
    changes: dict[str, Any], key: str, make_release: MakeRelease, tmp_path: Path
) -> None:
    release = make_release(**changes)
    (file,) = changes
    with pytest.raises(DataError, match=rf"{tmp_path / release.folder / file} .*{key}"):
        cifar.load(release, tmp_path)


# An array whose type claims to hold objects, with numbers in place of their addresses: numpy would follow them.
POINTERS = (
    b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    b"(K\x01K\x01\x85cnumpy\ndtype\nU\x02V8K\x00K\x01\x87R"
    b"(K\x03U\x01|NU\x01a\x85}U\x01acnumpy\ndtype\nU\x02O8K\x00K\x01\x87RK\x00\x86sK\x08K\x01K\x01tb"
    b"\x89U\x08AAAAAAAAtbs."
)


def test_a_pickle_that_crashes_numpy_is_refused(make_release: MakeRelease, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cifar-100-python/train .*data"):
        cifar.load(make_release(train=POINTERS), tmp_path)


def test_a_missing_file_is_named(make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release()
    (tmp_path / release.folder / "test").unlink()
    with pytest.raises(DataError, match="cifar-100-python/test "):
        cifar.load(release, tmp_path)


def test_the_official_releases_have_a_checksum_for_each_file(official: Release) -> None:
    assert set(official.checksums) == {*official.train, *official.test, official.meta}
    assert all(len(md5) == 32 for md5 in (*official.checksums.values(), official.md5))
    assert replace(official, name="other") != official


needs_cifar100 = pytest.mark.skipif(
    not Path(os.environ.get("ENGRAM_DATA") or "/nowhere", CIFAR100.folder, "train").is_file(),
    reason="ENGRAM_DATA does not name a folder that holds cifar-100-python",
)


@needs_cifar100
def test_the_real_cifar100_is_complete() -> None:
    dataset = load("cifar100")
    assert (len(dataset.train), len(dataset.test)) == (50_000, 10_000)
    assert dataset.train.shape == dataset.test.shape == (32, 32, 3)
    assert dataset.train.labels.bincount().tolist() == [500] * 100
    assert dataset.test.labels.bincount().tolist() == [100] * 100
    assert dataset.class_names[:2] == ("apple", "aquarium_fish") and dataset.class_names[99] == "worm"
    folder = Path(os.environ["ENGRAM_DATA"]) / CIFAR100.folder
    assert_same(dataset.test, folder, CIFAR100.test, CIFAR100.labels_key)
    # The mean colour of the training images, as published everywhere.
    mean = dataset.train.inputs.numpy().mean(axis=0, dtype=np.float32).mean(axis=(0, 1)) / 255
    assert mean.tolist() == pytest.approx([0.5071, 0.4865, 0.4409], abs=1e-4)
