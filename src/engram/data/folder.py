"""Folders of images as data sets: any folder, ImageNet (ILSVRC 2012) with its usual subset, and Tiny ImageNet."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.data.files import ImageFiles, cache_images
from engram.data.images import Fit
from engram.data.labelled import class_folders, folder_labels, refuse_splits, skipped_in
from engram.data.samples import Dataset, DecodeOptions, Samples, Source, field_order, hold_out, listed_classes
from engram.data.scanning import ImageIndex, SkippedFile, at_most, open_index
from engram.errors import DataError, UsageError
from engram.progress import Progress
from engram.text import names_in, printable

TRAIN, TESTS = "train", ("val", "valid", "validation", "test")  # the first of these that exists is the test split
SHOWN = 5  # entries of a folder that an error names


def load(root: Path, options: DecodeOptions, progress: Progress) -> Dataset:
    """Any folder, named after it: with `train` and `val`, or with one folder per class, a fifth of each held out."""
    _check_folder(root)
    name = printable(Path(os.path.abspath(root)).name)  # also where root is "."
    if (root / TRAIN).is_dir() and any((root / part).is_dir() for part in TESTS):
        return _load_split(name, root, options, 64, "middle", progress)
    files = _files(root, (), options, 64, "middle", progress)
    classes, empty = class_folders(files.index)
    if not classes:
        raise _wrong_layout(root, f"CLASS/*.jpg, or {TRAIN}/CLASS/*.jpg and {TESTS[0]}/CLASS/*.jpg")
    refuse_splits(root, files.index, classes)
    names = _listed(options.class_list, sorted(classes))
    samples = _samples(files, folder_labels(files.index, classes, names))
    _refuse_missing(root, samples, names, "Each needs two, one for training and one for testing.", least=2)
    train, test = hold_out(samples, share=0.2, seed=0, purpose="test")
    return _dataset(name, names, train, test, files, options, progress, empty)


def _load_split(
    name: str, root: Path, options: DecodeOptions, size: int, fit: Fit, progress: Progress, subset: bool = False
) -> Dataset:
    """A folder with `train/CLASS/*` and `val/CLASS/*`: the listed classes, else ImageNet's usual `subset`, else all."""
    _check_folder(root)
    test_part = next((part for part in TESTS if (root / part).is_dir()), None)
    if not (root / TRAIN).is_dir() or test_part is None:
        raise _wrong_layout(root, f"{TRAIN}/CLASS/*.JPEG and {TESTS[0]}/CLASS/*.JPEG")
    files = _files(root, (TRAIN, test_part), options, size, fit, progress)
    classes, empty = class_folders(files.index, TRAIN)
    tested, _ = class_folders(files.index, test_part)
    names = _listed(options.class_list, sorted(classes))
    if subset and options.class_list is None:
        names = field_subset(names)
    if not names:
        raise _wrong_layout(root / TRAIN, f"{TRAIN}/CLASS/*.JPEG")
    train, test = (_samples(files, folder_labels(files.index, own, names)) for own in (classes, tested))
    advice = "sort the images into such folders, or name the classes to load with --class-list FILE."
    for part, samples in ((TRAIN, train), (test_part, test)):
        _refuse_missing(root / part, samples, names, f"Expected {part}/CLASS/*.JPEG for each: {advice}")
    unknown_classes = (root / test_part / other for other in sorted(tested.keys() - classes.keys()))
    reason = f"{TRAIN} has no such class, so it cannot be learned."
    extra = [*empty, *(SkippedFile(path, reason) for path in unknown_classes)]
    return _dataset(name, names, train, test, files, options, progress, extra)


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"{printable(root)} {what}. Name the folder of the data set with --data DIR.")


def _wrong_layout(root: Path, expected: str) -> DataError:
    found = sorted(os.listdir(root))
    what = ", ".join(printable(name) for name in found[:SHOWN]) + (", …" if len(found) > SHOWN else "")
    return DataError(f"{printable(root)} holds {what or 'nothing'}. Expected {expected}.")


def _files(
    root: Path, parts: Sequence[str], options: DecodeOptions, size: int, fit: Fit, progress: Progress
) -> ImageFiles:
    """The images of a folder; size and fit are the data set's own, unless the options have others."""
    index = open_index(root, parts, progress)
    return ImageFiles(index, options.size or size, options.fit or fit, options.workers)


def _listed(path: Path | None, names: list[str]) -> list[str]:
    """The names that a file lists, one per line, sorted; each must be one of `names`. All of them without a file."""
    return names if path is None else sorted(set(listed_classes(path, names, "class list")))


def _samples(files: ImageFiles, labels: Tensor) -> Samples:
    """The files that have a label, of labels (N,) for the whole index, and are not empty."""
    rows = ((labels >= 0) & (files.index.sizes > 0)).nonzero().squeeze(1)
    return Samples(files, rows, labels[rows])


def _refuse_missing(place: Path, samples: Samples, names: Sequence[str], advice: str, least: int = 1) -> None:
    """Refuse the folder `place` if it has fewer than `least` images of some class."""
    counts = torch.bincount(samples.labels, minlength=len(names)).tolist()
    missing = [name for name, count in zip(names, counts, strict=True) if count < least]
    if missing:
        few = "no images" if least == 1 else f"fewer than {least} images that are not empty"
        raise DataError(
            f"{printable(place)} has {few} of {len(missing):,} of the {len(names):,} classes, such as "
            f"{printable(missing[0])}. {advice}"
        )


def _dataset(
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


# ImageNet

WHOLE, SUBSET, TINY = "imagenet1000", "imagenet100", "tiny-imagenet-200"
CLASSES, CHOSEN = 1000, 100

# How long, and at which rates, each objective trains on ImageNet: the paper's own (§5.1), and what the authors of LUCIR
# (§4.1 and their code) and BiC (§5.2 and their code) report.
PAPER: Mapping[str, Mapping[str, Any]] = {
    "all": {"epochs": 60, "milestones": (20 / 60, 30 / 60, 40 / 60, 50 / 60)},
    "eeil": {"epochs": 80, "milestones": (0.25, 0.5, 0.75)},  # 40 epochs in which its code uses every image twice
    "lucir": {"epochs": 90, "milestones": (30 / 90, 60 / 90), "weight_decay": 1e-4},
    "bic": {
        **{"epochs": 100, "milestones": (0.3, 0.6, 0.8, 0.9), "batch_size": 256},
        **{"weight_decay": 1e-3, "weight_decay_falls": True},  # 1e-4 · 10 / t
    },
}
LESS_FORGET = 10.0  # LUCIR's λ_base on ImageNet, its §4.1


def load_imagenet(name: str, root: Path, options: DecodeOptions, progress: Progress) -> Dataset:
    """Images (n, 256, 256, 3) of the listed classes, else of the usual ones of the data set."""
    own = root / f"{name}.txt"  # such as imagenet100.txt
    options = replace(options, class_list=options.class_list or (own if own.is_file() else None))
    # As in iCaRL's code; in the paper an image takes 256 × 256 × 3 bytes (Table 1).
    return _load_split(name, root, options, 256, "stretch", progress, subset=name == SUBSET)


def field_subset(names: list[str]) -> list[str]:
    """The hundred classes that most of the field uses: the first of iCaRL's permutation of the thousand."""
    if len(names) == CHOSEN:  # the folder holds a subset already
        return names
    if len(names) != CLASSES:
        raise UsageError(
            f"The usual {CHOSEN} classes are drawn from {CLASSES:,}; found {len(names):,}. List the classes to load, "
            f"one per line, in {SUBSET}.txt in the folder or with --class-list FILE; or use --dataset {WHOLE}."
        )
    return [names[i] for i in sorted(field_order(CLASSES)[:CHOSEN])]


def _imagenet(name: str, summary: str, classes_per_task: int, **settings: Any) -> Source:
    return Source(
        summary=f"{summary}, train/CLASS and val/CLASS: --data DIR",
        load=partial(load_imagenet, name),
        location="folder",
        classes_per_task=classes_per_task,
        settings={"network": "resnet18", "pad": 0, "flip": True, "less_forget": LESS_FORGET, **settings},  # §5.1
        crop=7 / 8,  # iCaRL's code: 224 of 256 pixels per side
        # Table 1: ten images beside 250 features
        methods={"hybrid": {"images_per_class": 10}, "engram": {"rotation_labels": 1.0}},
        paper=PAPER,
    )


IMAGENET100 = _imagenet(SUBSET, "a hundred of ImageNet's classes", 10)
IMAGENET1000 = _imagenet(WHOLE, "ImageNet, ILSVRC 2012", 100, images_total=20_000)  # Table 1: 20 per class at the end


# Tiny ImageNet

LIST, WORDS, TEST = "wnids.txt", "words.txt", "val"
ANNOTATIONS = f"{TEST}/val_annotations.txt"
EXPECTED = f"{LIST}, {TRAIN}/CLASS/images/*.JPEG, {TEST}/images/*.JPEG and {ANNOTATIONS}"


def load_tiny(root: Path, options: DecodeOptions, progress: Progress) -> Dataset:
    """Images (n, 64, 64, 3) of 200 classes, each named by ImageNet's first word for it."""
    _check_folder(root)
    if not all((root / part).exists() for part in (LIST, TRAIN, TEST, ANNOTATIONS)):
        raise _wrong_layout(root, EXPECTED)
    identifiers = _listed(options.class_list, sorted(_lines(root / LIST)))
    files = _files(root, (TRAIN, TEST), options, 64, "stretch", progress)
    train = _samples(files, folder_labels(files.index, class_folders(files.index, TRAIN)[0], identifiers))
    test = _samples(files, _annotated(files.index, identifiers))
    for part, samples in ((TRAIN, train), (TEST, test)):
        _refuse_missing(root / part, samples, identifiers, f"Expected {EXPECTED}: unpack the data set again.")
    dataset = _dataset(TINY, _names(root, identifiers), train, test, files, options, progress)
    # Its lists and bounding boxes are no images, and are not meant to be.
    return replace(dataset, skipped=tuple(left for left in dataset.skipped if left.path.suffix != ".txt"))


def _annotated(index: ImageIndex, identifiers: Sequence[str]) -> Tensor:
    """The label of each file, int64 (N,), by the list of validation images; -1 where that has none."""
    label_of = {identifier: label for label, identifier in enumerate(identifiers)}
    columns = (line.split("\t") for line in _lines(index.root / ANNOTATIONS))
    folder = os.fsencode(f"{TEST}/images")
    annotated = {folder + b"/" + os.fsencode(row[0]): label_of.get(row[1], -1) for row in columns if len(row) > 1}
    labels = torch.full((len(index),), -1)
    if folder in index.folders:
        for row in (index.folder_of == index.folders.index(folder)).nonzero().squeeze(1).tolist():
            labels[row] = annotated.get(index.relative(row), -1)
    return labels


def _names(root: Path, identifiers: Sequence[str]) -> list[str]:
    """ImageNet's first word for each class, with the identifier where two classes share it."""
    lines = _lines(root / WORDS) if (root / WORDS).exists() else []
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    names = [words.get(identifier, identifier).split(",")[0].strip() for identifier in identifiers]
    uses = Counter(names)
    pairs = zip(names, identifiers, strict=True)
    return [name if uses[name] == 1 else f"{name} ({identifier})" for name, identifier in pairs]


def _lines(path: Path) -> list[str]:
    try:
        return names_in(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{printable(path)} cannot be read: {error}. Unpack the data set again.") from error


TINY_IMAGENET = Source(
    summary="200 of ImageNet's classes at 64 x 64 pixels, as published: --data DIR",
    load=load_tiny,
    location="folder",
    classes_per_task=20,
    settings={
        **{"network": "resnet18-small", "pad": 8, "flip": True, "less_forget": LESS_FORGET},
        "images_total": 4_000,  # 20 per class at the end, as Table 1 for ImageNet
    },
    methods={"engram": {"rotation_labels": 1.0}},
    paper=PAPER,
)
