"""Folders of images as data sets: `train/CLASS/*` and `val/CLASS/*`, or one folder per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engram.data.files import DecodeOptions, ImageFiles, cache_images
from engram.data.images import Fit
from engram.data.labelled import class_folders, folder_labels, refuse_splits, skipped_in
from engram.data.samples import Dataset, Samples, Source, hold_out
from engram.data.scanning import SkippedFile, at_most, open_index
from engram.errors import DataError, UsageError, unknown
from engram.progress import SILENT, Progress
from engram.text import names_in, printable

TRAIN, TESTS = "train", ("val", "valid", "validation", "test")  # the first of these that exists is the test split
SHOWN = 5  # entries of a folder that an error names

Choose = Callable[[list[str]], list[str]]  # the classes to load, of all that were found


def load(root: Path, options: DecodeOptions, progress: Progress = SILENT) -> Dataset:
    """Any folder, named after it: with `train` and `val`, or with one folder per class, a fifth of each held out."""
    check_folder(root)
    name = printable(Path(os.path.abspath(root)).name)  # the folder's own name, also where root is "."
    size, fit = options.size or 64, options.fit or "middle"

    def choose(names: list[str]) -> list[str]:
        return names if options.class_list is None else listed(options.class_list, names)

    if (root / TRAIN).is_dir() and any((root / part).is_dir() for part in TESTS):
        return load_split(name, root, size, fit, choose, options, progress)
    files = ImageFiles(open_index(root, (), progress), size, fit, options.workers)
    classes, empty = class_folders(files.index)
    if not classes:
        raise wrong_layout(root, f"CLASS/*.jpg, or {TRAIN}/CLASS/*.jpg and {TESTS[0]}/CLASS/*.jpg")
    refuse_splits(root, files.index, classes)
    names = choose(sorted(classes))
    samples = labelled_samples(files, folder_labels(files.index, classes, names))
    for each, count in zip(names, _counts(samples, names), strict=True):
        if count < 2:
            raise DataError(
                f"In {printable(root)}, the class '{printable(each)}' has {count} images that are not empty. It needs "
                "two, one for training and one for testing."
            )
    train, test = hold_out(samples, share=0.2, seed=0, purpose="test")
    return dataset_of(name, names, train, test, files, options, progress, empty)


def load_split(
    name: str, root: Path, size: int, fit: Fit, choose: Choose, options: DecodeOptions, progress: Progress = SILENT
) -> Dataset:
    """A folder with `train/CLASS/*` and `val/CLASS/*`; of the classes of `train`, sorted, those that are chosen."""
    check_folder(root)
    test_part = next((part for part in TESTS if (root / part).is_dir()), None)
    if not (root / TRAIN).is_dir() or test_part is None:
        raise wrong_layout(root, f"{TRAIN}/CLASS/*.JPEG and {TESTS[0]}/CLASS/*.JPEG")
    files = ImageFiles(open_index(root, (TRAIN, test_part), progress), size, fit, options.workers)
    classes, empty = class_folders(files.index, TRAIN)
    tested, _ = class_folders(files.index, test_part)
    names = choose(sorted(classes))
    if not names:
        raise wrong_layout(root / TRAIN, f"{TRAIN}/CLASS/*.JPEG")
    advice = "sort the images into such folders, or name the classes to load with --class-list FILE."
    train, test = (labelled_samples(files, folder_labels(files.index, own, names)) for own in (classes, tested))
    for part, samples in ((TRAIN, train), (test_part, test)):
        refuse_missing(root / part, samples, names, f"Expected {part}/CLASS/*.JPEG for each: {advice}")
    unknown_classes = (root / test_part / other for other in sorted(tested.keys() - classes.keys()))
    reason = f"{TRAIN} has no such class, so it cannot be learned."
    extra = [*empty, *(SkippedFile(path, reason) for path in unknown_classes)]
    return dataset_of(name, names, train, test, files, options, progress, extra)


def check_folder(root: Path) -> None:
    """Refuse what is not a folder."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"{printable(root)} {what}. Name the folder of the data set with --data DIR.")


def wrong_layout(root: Path, expected: str) -> DataError:
    """The error for a folder with an unexpected layout."""
    found = sorted(os.listdir(root))
    what = ", ".join(printable(name) for name in found[:SHOWN]) + (", …" if len(found) > SHOWN else "")
    return DataError(f"{printable(root)} holds {what or 'nothing'}. Expected {expected}.")


def listed(path: Path, names: Sequence[str]) -> list[str]:
    """The names that a file lists, one per line, sorted; each must be one of `names`."""
    try:
        wanted = sorted(set(names_in(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The class list {printable(path)} cannot be read. Expected one name per line.") from error
    for name in wanted:
        if name not in names:
            raise unknown("class", name, names, f"the lines of {path}")
    if not wanted:
        raise UsageError(f"The class list {printable(path)} is empty. Expected one name per line.")
    return wanted


def labelled_samples(files: ImageFiles, labels: Tensor) -> Samples:
    """The files that have a label, of labels (N,) for the whole index, and are not empty."""
    rows = ((labels >= 0) & (files.index.sizes > 0)).nonzero().squeeze(1)
    return Samples(files, rows, labels[rows])


def refuse_missing(place: Path, samples: Samples, names: Sequence[str], advice: str) -> None:
    """Refuse a split, at `place`, without an image of some class."""
    missing = [name for name, count in zip(names, _counts(samples, names), strict=True) if not count]
    if missing:
        raise DataError(
            f"{printable(place)} has no images of {len(missing):,} of the {len(names):,} classes, such as "
            f"{printable(missing[0])}. {advice}"
        )


def _counts(samples: Samples, names: Sequence[str]) -> list[int]:
    counts: list[int] = torch.bincount(samples.labels, minlength=len(names)).tolist()
    return counts


def dataset_of(
    name: str,
    names: Sequence[str],
    train: Samples,
    test: Samples,
    files: ImageFiles,
    options: DecodeOptions,
    progress: Progress,
    skipped: Sequence[SkippedFile] = (),
) -> Dataset:
    """The data set of these samples, cached if the options say so."""
    if options.cache is not None:
        cached = cache_images(files, torch.cat([train.rows, test.rows]).unique(), options.cache, progress)
        train, test = (Samples(cached, part.rows, part.labels) for part in (train, test))
    index = files.index
    beside = skipped_in(index)
    known = {left.path for left in beside}
    empty = (index.path(row) for row in (index.sizes == 0).nonzero().squeeze(1).tolist())
    beside += [SkippedFile(path, "It is empty. Copy it again.") for path in empty if path not in known]
    everything = sorted([*at_most(beside, index.root), *skipped], key=lambda left: left.path)
    return Dataset(name, train, test, tuple(names), tuple(everything))


SOURCE = Source(
    summary="images of your own, a folder per class, or train and val: --data DIR", load=load, location="folder"
)
