"""CIFAR-100 and CIFAR-10 from their official files: checksums first, then a reader that can run no code."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.data import download
from engram.data.samples import Dataset, Samples
from engram.errors import DataError
from engram.progress import SILENT, Progress

CHANNELS, SIDE = 3, 32
PIXELS = CHANNELS * SIDE * SIDE


@dataclass(frozen=True)
class Release:
    """The files of a published data set, and how to recognise them."""

    name: str
    folder: str  # the folder inside the archive, and inside the root
    url: str  # of the archive, a .tar.gz
    md5: str  # of the archive
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str  # the file that holds the class names
    labels_key: str
    names_key: str
    checksums: Mapping[str, str]  # file -> MD5


CIFAR100 = Release(
    name="cifar100",
    folder="cifar-100-python",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    md5="eb9058c3a382ffc7106e4002c42a8d85",
    train=("train",),
    test=("test",),
    meta="meta",
    labels_key="fine_labels",
    names_key="fine_label_names",
    checksums={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
)

CIFAR10 = Release(
    name="cifar10",
    folder="cifar-10-batches-py",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    md5="c58f30108f718f92721af3b95e74349a",
    train=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    test=("test_batch",),
    meta="batches.meta",
    labels_key="labels",
    names_key="label_names",
    checksums={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)

# All that an array's pickle refers to. The first has moved within numpy, so it is asked of an array itself.
GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def load(release: Release, root: Path, progress: Progress = SILENT) -> Dataset:
    """Images (n, 32, 32, 3) of a release in `root`, the folder that has or receives the release's own folder."""
    folder = _locate(release, root, progress)
    names = _class_names(folder, release)
    train = _samples(folder, release.train, release, len(names))
    test = _samples(folder, release.test, release, len(names))
    return Dataset(release.name, train, test, names, published=True)


def _locate(release: Release, root: Path, progress: Progress) -> Path:
    if all((root / name).is_file() for name in release.checksums):
        return root  # what was named as the root is the release's own folder
    folder = root / release.folder
    if not folder.exists():
        download.provide(folder, release.checksums, release.url, release.md5, progress)
    for name in release.checksums:
        if not (folder / name).is_file():
            raise _wrong(folder / name, "is missing")
    return folder


def _again(path: Path) -> str:
    return f"Delete the folder {path.parent} and run again to download it."


def _wrong(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}. {_again(path)}")


def _class_names(folder: Path, release: Release) -> tuple[str, ...]:
    path = folder / release.meta
    names = _field(_read(path, release), release.names_key, path)
    if not isinstance(names, list) or not names or not all(isinstance(name, bytes) for name in names):
        raise _wrong(path, f"must hold a list of class names under '{release.names_key}'; found {_described(names)}")
    return tuple(name.decode("latin1") for name in names)


def _samples(folder: Path, files: tuple[str, ...], release: Release, classes: int) -> Samples:
    batches = [_batch(folder / file, release, classes) for file in files]
    labels = torch.cat([labels for _, labels in batches])
    inputs = torch.empty((len(labels), SIDE, SIDE, CHANNELS), dtype=torch.uint8)
    places = inputs.split_with_sizes([len(pixels) for pixels, _ in batches])
    for place, (pixels, _) in zip(places, batches, strict=True):
        # Straight into its place: a torch.cat of rearranged images would hold the pixels a third time.
        place.copy_(torch.from_numpy(pixels).reshape(-1, CHANNELS, SIDE, SIDE).permute(0, 2, 3, 1))
    return Samples.of(inputs, labels)


def _batch(path: Path, release: Release, classes: int) -> tuple[npt.NDArray[np.uint8], Tensor]:
    """The pixels (n, 3072), one colour after the other, and the labels (n,) of one file."""
    content = _read(path, release)
    pixels = _field(content, "data", path)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        raise _wrong(path, f"must hold uint8 (n, {PIXELS}) under 'data'; found {_described(pixels)}")
    key = release.labels_key
    labels = _field(content, key, path)
    if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(label) is int for label in labels):
        raise _wrong(path, f"must hold {len(pixels)} whole numbers under '{key}'; found {_described(labels)}")
    if labels and not 0 <= min(labels) <= max(labels) < classes:
        raise _wrong(path, f"must have labels from 0 to {classes - 1}; found {min(labels)} to {max(labels)}")
    return pixels, torch.tensor(labels, dtype=torch.int64)


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, list):
        return f"a list of {len(value)} {' and '.join(sorted({type(item).__name__ for item in value}))}"
    return type(value).__name__


def _field(content: Mapping[bytes, Any], key: str, path: Path) -> Any:
    if key.encode() not in content:
        raise _wrong(path, f"has no '{key}', so it is not a file of this release")
    return content[key.encode()]


def _read(path: Path, release: Release) -> Mapping[bytes, Any]:
    download.check(path, release.checksums[path.name], _again(path))
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, path).load()
    except DataError:
        raise
    except Exception as error:  # the errors that a damaged pickle may raise are not limited to any list
        raise _wrong(path, f"cannot be read as a pickle ({error})") from error
    if not isinstance(content, dict):
        raise _wrong(path, "holds no table, so it is not a file of this release")
    return content


class _Unpickler(pickle.Unpickler):
    """Reads arrays, numbers and text that Python 2 wrote, and refuses whatever else a pickle may ask for."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="bytes")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in GLOBALS:
            raise _wrong(self.path, f"asks for {module}.{name}, which could run code")
        return GLOBALS[module, name]
