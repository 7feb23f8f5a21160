"""What is learned from: samples, the tasks they arrive in, and the data sets there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engram.data import arrays, cifar, digits, download
from engram.data.samples import Dataset, Samples, concatenate
from engram.data.tasks import Stream, Task, split
from engram.errors import UsageError, unknown
from engram.progress import SILENT, Progress

__all__ = ["DATASETS", "Dataset", "Samples", "Source", "Stream", "Task", "concatenate", "load", "split"]


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name."""

    description: str  # one line
    load: Callable[[Path | None, Progress], Dataset]


def _digits(root: Path | None, progress: Progress) -> Dataset:
    return digits.load()


def _cifar100(root: Path | None, progress: Progress) -> Dataset:
    return cifar.load(cifar.CIFAR100, root or download.cache_folder(), progress)


def _cifar10(root: Path | None, progress: Progress) -> Dataset:
    return cifar.load(cifar.CIFAR10, root or download.cache_folder(), progress)


def _arrays(root: Path | None, progress: Progress) -> Dataset:
    if root is None:
        raise UsageError("The data set 'arrays' is a file of your own. Name it with --data FILE.npz.")
    return arrays.load(root)


DATASETS = {
    "digits": Source("1,797 handwritten digits of 8 x 8 pixels, 10 classes; comes with scikit-learn", _digits),
    "cifar100": Source("60,000 colour images of 32 x 32 pixels, 100 classes; downloads 169 MB once", _cifar100),
    "cifar10": Source("60,000 colour images of 32 x 32 pixels, 10 classes; downloads 171 MB once", _cifar10),
    "arrays": Source("images or vectors of your own, in one .npz file: --data FILE.npz", _arrays),
}


def load(name: str, root: str | os.PathLike[str] | None = None, progress: Progress = SILENT) -> Dataset:
    """The data set `name` of `DATASETS`.

    `root` is, for cifar100 and cifar10, the folder that has or receives their files (by default $ENGRAM_DATA, or
    `engram` in the user's cache), and for arrays the .npz file.
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS, "engram datasets")
    return DATASETS[name].load(None if root is None else Path(root).expanduser(), progress)
