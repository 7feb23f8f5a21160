"""What is learned from: samples, the tasks they arrive in, and the data sets there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engram.data import arrays, cifar, digits, download, folder, imagenet, tiny_imagenet
from engram.data.files import DecodeOptions
from engram.data.samples import Dataset, Samples, concatenate, hold_out
from engram.data.tasks import Stream, Task, split
from engram.errors import UsageError, unknown
from engram.progress import SILENT, Progress
from engram.text import printable

__all__ = [
    "DATASETS",
    "Dataset",
    "DecodeOptions",
    "Samples",
    "Source",
    "Stream",
    "Task",
    "concatenate",
    "hold_out",
    "load",
    "split",
]


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name."""

    description: str  # one line
    load: Callable[[Path | None, DecodeOptions, Progress], Dataset]
    of_files: bool = False  # whether it is read as `DecodeOptions` ask, from a folder that must be named
    embedded: bool = False  # whether it comes with what is installed: then it lies nowhere


def _digits(root: Path | None, reading: DecodeOptions, progress: Progress) -> Dataset:
    return digits.load()


def _cifar100(root: Path | None, reading: DecodeOptions, progress: Progress) -> Dataset:
    return cifar.load(cifar.CIFAR100, root or download.cache_folder(), progress)


def _cifar10(root: Path | None, reading: DecodeOptions, progress: Progress) -> Dataset:
    return cifar.load(cifar.CIFAR10, root or download.cache_folder(), progress)


def _arrays(root: Path | None, reading: DecodeOptions, progress: Progress) -> Dataset:
    if root is None:
        raise UsageError("The data set 'arrays' is a file of your own. Name it with --data FILE.npz.")
    return arrays.load(root)


def _of_files(name: str, description: str, load: Callable[[Path, DecodeOptions, Progress], Dataset]) -> Source:
    def named(root: Path | None, reading: DecodeOptions, progress: Progress) -> Dataset:
        if root is None:
            raise UsageError(f"The data set '{name}' is a folder of your own. Name it with --data DIR.")
        return load(root, reading, progress)

    return Source(description, named, of_files=True)


def _imagenet(name: str, description: str) -> Source:
    return _of_files(name, description, lambda root, reading, progress: imagenet.load(name, root, reading, progress))


DATASETS = {
    "digits": Source(
        "1,797 handwritten digits of 8 x 8 pixels, 10 classes; comes with scikit-learn", _digits, embedded=True
    ),
    "cifar100": Source("60,000 colour images of 32 x 32 pixels, 100 classes; downloads 169 MB once", _cifar100),
    "cifar10": Source("60,000 colour images of 32 x 32 pixels, 10 classes; downloads 171 MB once", _cifar10),
    "arrays": Source("images or vectors of your own, in one .npz file: --data FILE.npz", _arrays),
    "folder": _of_files(
        "folder", "pictures of your own, a folder per class, or train and val: --data DIR", folder.load
    ),
    "imagenet100": _imagenet("imagenet100", "a hundred of ImageNet's classes, train/CLASS and val/CLASS: --data DIR"),
    "imagenet1000": _imagenet("imagenet1000", "ImageNet, ILSVRC 2012, train/CLASS and val/CLASS: --data DIR"),
    "tiny-imagenet-200": _of_files(
        "tiny-imagenet-200",
        "200 of ImageNet's classes at 64 x 64 pixels, as it is published: --data DIR",
        tiny_imagenet.load,
    ),
}


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
    options: DecodeOptions | None = None,
) -> Dataset:
    """The data set `name` of `DATASETS`.

    `root` is, for cifar100 and cifar10, the folder that has or receives their files (by default $ENGRAM_DATA, or
    `engram` in the user's cache), for arrays the .npz file, and for data sets of files their folder; `reading` says how
    those become images.
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS, "engram datasets")
    source, reading = DATASETS[name], options or DecodeOptions()
    if reading.asked and not source.of_files:
        others = ", ".join(other for other, each in DATASETS.items() if each.of_files)
        raise UsageError(
            f"{name} is not read from pictures: image size, fit, class list, cache and workers are for {others}."
        )
    if root is not None and source.embedded:
        others = ", ".join(other for other, each in DATASETS.items() if not each.embedded)
        raise UsageError(f"{name} comes with engram, and --data is for others: name one with --dataset, of {others}.")
    root = None if root is None else Path(root).expanduser()
    dataset = source.load(root, reading, progress)
    if dataset.published:
        return dataset
    assert root is not None
    # One's own does not pass for a known one, whose settings it would be given, because its file is called so.
    taken = dataset.name in DATASETS and dataset.name != name
    return replace(
        dataset,
        name=f"{dataset.name} ({name})" if taken else dataset.name,
        source={"dataset": name, "data": printable(root.resolve().name), **reading.told()},
    )
