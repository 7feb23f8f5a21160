"""Samples, the tasks in which they arrive, and the data sets that can be loaded by name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from engram.data import arrays, cifar, digits, folder
from engram.data.samples import Dataset, DecodeOptions, Samples, Source, Stream, Task, concatenate, hold_out, split
from engram.data.scanning import cache_folder
from engram.errors import UsageError, unknown
from engram.progress import SILENT, Progress
from engram.text import printable

__all__ = ["DATASETS", "Dataset", "DecodeOptions", "Samples", "Source", "Stream", "Task"]
__all__ += ["concatenate", "hold_out", "load", "split"]

DATASETS = {
    "digits": digits.SOURCE,
    "cifar100": cifar.CIFAR100_SOURCE,
    "cifar10": cifar.CIFAR10_SOURCE,
    "arrays": arrays.SOURCE,
    "folder": folder.SOURCE,
    "imagenet100": folder.IMAGENET100,
    "imagenet1000": folder.IMAGENET1000,
    "tiny-imagenet-200": folder.TINY_IMAGENET,
}


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
    options: DecodeOptions | None = None,
) -> Dataset:
    """The data set `name` of `DATASETS`.

    `root` is the .npz file of `arrays`, the folder of a data set of image files (only these have `options`), or the
    folder that has or receives the files of CIFAR (by default $ENGRAM_DATA, or `engram` in the user's cache).
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS, "engram datasets")
    source, options = DATASETS[name], options or DecodeOptions()
    if options != DecodeOptions() and source.location != "folder":
        others = ", ".join(other for other, each in DATASETS.items() if each.location == "folder")
        raise UsageError(
            f"{name} does not consist of image files: image size, fit, class list, cache and workers are for {others}."
        )
    if root is not None and source.location == "installed":
        others = ", ".join(other for other, each in DATASETS.items() if each.location != "installed")
        raise UsageError(f"{name} is installed with engram and has no --data. Data sets with --data are {others}.")
    if root is None and source.location in ("file", "folder"):
        what = "FILE.npz" if source.location == "file" else "DIR"
        raise UsageError(f"The data set '{name}' is a {source.location} of your own. Name it with --data {what}.")
    place = cache_folder() if root is None and source.location == "cache" else Path(root or "").expanduser()
    dataset = source.load(place, options, progress)
    if dataset.published:
        return dataset
    # Data of one's own must not pass for a known data set, and get its settings, because of the name of its file.
    clash = dataset.name in DATASETS and dataset.name != name
    return replace(
        dataset,
        name=f"{dataset.name} ({name})" if clash else dataset.name,
        source={"dataset": name, "data": printable(place.resolve().name), **options.to_json()},
    )
