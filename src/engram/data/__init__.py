"""Samples, the tasks in which they arrive, and the data sets that can be loaded by name."""

from engram.data import arrays, cifar, digits, folder
from engram.data.samples import (
    DATASETS,
    Dataset,
    DecodeOptions,
    Samples,
    Source,
    Stream,
    Task,
    concatenate,
    hold_out,
    load,
    split,
)

__all__ = ["DATASETS", "Dataset", "DecodeOptions", "Samples", "Source", "Stream", "Task"]
__all__ += ["concatenate", "hold_out", "load", "split"]

DATASETS.update(
    {
        "digits": digits.SOURCE,
        "cifar100": cifar.CIFAR100_SOURCE,
        "cifar10": cifar.CIFAR10_SOURCE,
        "arrays": arrays.SOURCE,
        "folder": folder.SOURCE,
        "imagenet100": folder.IMAGENET100,
        "imagenet1000": folder.IMAGENET1000,
        "tiny-imagenet-200": folder.TINY_IMAGENET,
    }
)
