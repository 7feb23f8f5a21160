"""CIFAR-100 and CIFAR-10 from their official files: checksums first, then an unpickler that cannot run code."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram import storage
from engram.data import download
from engram.data.samples import Dataset, DecodeOptions, Samples, Source
from engram.errors import DataError
from engram.progress import SILENT, Progress

CHANNELS, SIDE = 3, 32
PIXELS = CHANNELS * SIDE * SIDE


@dataclass(frozen=True)
class Release:
    """The files of a published data set and their checksums."""

    name: str
    folder: str  # inside the archive and inside the root
    url: str  # of the archive, a .tar.gz
    md5: str  # of the archive
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str  # the file with the class names
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


class _Stub:
    """Stands for numpy's functions and types while unpickling: numpy itself can crash on a forged state."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


# The only globals that the pickle of an array refers to: module and name.
GLOBALS = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}


def load(release: Release, root: Path, options: DecodeOptions | None = None, progress: Progress = SILENT) -> Dataset:
    """Images (n, 32, 32, 3) of a release in `root`, which is or contains the release's own folder, or receives it."""
    folder = root if all((root / name).is_file() for name in release.checksums) else root / release.folder
    if not folder.exists():
        download.provide(folder, release.checksums, release.url, release.md5, progress)
    names = _read(folder / release.meta, release).get(release.names_key.encode())
    if not isinstance(names, list) or not names or not all(isinstance(name, bytes) for name in names):
        raise _invalid(folder / release.meta, f"has no list of class names under '{release.names_key}'")
    train, test = (_samples(folder, files, release, len(names)) for files in (release.train, release.test))
    return Dataset(release.name, train, test, tuple(name.decode("latin1") for name in names), published=True)


def _invalid(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}. Delete the folder {path.parent} and run again to download it.")


def _samples(folder: Path, files: tuple[str, ...], release: Release, classes: int) -> Samples:
    batches = [_batch(folder / file, release, classes) for file in files]
    labels = torch.cat([labels for _, labels in batches])
    inputs = torch.empty((len(labels), SIDE, SIDE, CHANNELS), dtype=torch.uint8)
    targets = inputs.split_with_sizes([len(pixels) for pixels, _ in batches])
    for target, (pixels, _) in zip(targets, batches, strict=True):
        # In place: a torch.cat of transposed images would need the memory a third time.
        target.numpy()[:] = pixels.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Samples.of(inputs, labels)


def _batch(path: Path, release: Release, classes: int) -> tuple[npt.NDArray[np.uint8], Tensor]:
    """The pixels (n, 3072), one channel after the other, and the labels (n,) of one file."""
    content = _read(path, release)
    array, labels = content.get(b"data"), content.get(release.labels_key.encode())
    match array:
        case _Stub(state=(_, (int(count), int(width)), _Stub(arguments=(b"u1", *_)), False, bytes(values))) if (
            width == PIXELS and len(values) == count * width
        ):
            pixels = np.frombuffer(values, dtype=np.uint8).reshape(-1, PIXELS)
        case _:
            raise _invalid(path, f"has no uint8 array (n, {PIXELS}) under 'data'")
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(type(label) is int and 0 <= label < classes for label in labels)
    ):
        raise _invalid(path, f"has no {len(pixels)} labels from 0 to {classes - 1} under '{release.labels_key}'")
    return pixels, torch.tensor(labels, dtype=torch.int64)


def _read(path: Path, release: Release) -> Mapping[bytes, Any]:
    if not path.is_file():
        raise _invalid(path, "is missing")
    if (found := storage.checksum(path, "md5")) != (expected := release.checksums[path.name]):
        raise _invalid(path, f"is damaged or another release: its MD5 is {found}, expected {expected}")
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, path).load()
    except DataError:
        raise
    except Exception as error:  # damaged pickles raise errors of any type
        raise _invalid(path, f"cannot be unpickled ({error})") from error
    if not isinstance(content, dict):
        raise _invalid(path, "does not contain a dictionary")
    return content


class _Unpickler(pickle.Unpickler):
    """Reads arrays, numbers and text that Python 2 wrote, and refuses every other global."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="bytes")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in GLOBALS:
            raise _invalid(self.path, f"asks for {module}.{name}, which could run code")
        return _Stub


def _source(release: Release, classes: int, megabytes: int, classes_per_task: int) -> Source:
    return Source(
        summary=f"60,000 colour images of 32 x 32 pixels, {classes} classes; downloads {megabytes} MB once",
        load=partial(load, release),
        location="cache",
        classes_per_task=classes_per_task,
        settings={"pad": 4, "flip": True},
        methods={"engram": {"rotation_labels": 1.0}},
        paper={"eeil": {"epochs": 480}},  # 40 epochs in which its code uses every image twelve times
    )


CIFAR100_SOURCE = _source(CIFAR100, classes=100, megabytes=169, classes_per_task=10)
CIFAR10_SOURCE = _source(CIFAR10, classes=10, megabytes=171, classes_per_task=2)
