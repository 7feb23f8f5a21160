"""ImageNet (ILSVRC 2012), all of it or the usual hundred classes, and Tiny ImageNet in its own layout."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.files import DecodeOptions, ImageFiles
from engram.data.folder import (
    check_folder,
    dataset_of,
    labelled_samples,
    listed,
    load_split,
    refuse_missing,
    wrong_layout,
)
from engram.data.labelled import class_folders, folder_labels
from engram.data.samples import Dataset, Source
from engram.data.scanning import ImageIndex, open_index
from engram.data.tasks import FIELD_SEED
from engram.errors import DataError, UsageError
from engram.progress import SILENT, Progress
from engram.text import names_in, printable

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


# ImageNet


def load_imagenet(name: str, root: Path, options: DecodeOptions, progress: Progress = SILENT) -> Dataset:
    """Images (n, 256, 256, 3) of the classes of a list, or of all; of `imagenet100`, of the usual hundred.

    The list is the one in the options or, in the folder, the file named after the data set: imagenet100.txt.
    """
    own = root / f"{name}.txt"
    path = options.class_list or (own if own.is_file() else None)

    def choose(names: list[str]) -> list[str]:
        if path is not None:
            return listed(path, names)
        return field_subset(names) if name == SUBSET else names

    # As in iCaRL's code; in the paper an image takes 256 × 256 × 3 bytes (Table 1).
    return load_split(name, root, options.size or 256, options.fit or "stretch", choose, options, progress)


def field_subset(names: list[str]) -> list[str]:
    """The hundred classes that most of the field uses: the first of iCaRL's permutation of the thousand."""
    if len(names) == CHOSEN:  # the folder holds a subset already
        return names
    if len(names) != CLASSES:
        raise UsageError(
            f"The usual {CHOSEN} classes are drawn from {CLASSES:,}; found {len(names):,}. List the classes to load, "
            f"one per line, in {SUBSET}.txt in the folder or with --class-list FILE; or use --dataset {WHOLE}."
        )
    # The legacy generator on purpose: its permutation is what "seed 1993" means in published code.
    return [names[i] for i in sorted(np.random.RandomState(FIELD_SEED).permutation(CLASSES)[:CHOSEN])]


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

LIST, WORDS = "wnids.txt", "words.txt"
TRAIN, TEST, ANNOTATIONS = "train", "val", "val/val_annotations.txt"
EXPECTED = f"{LIST}, {TRAIN}/CLASS/images/*.JPEG, {TEST}/images/*.JPEG and {ANNOTATIONS}"


def load_tiny(root: Path, options: DecodeOptions, progress: Progress = SILENT) -> Dataset:
    """Images (n, 64, 64, 3) of 200 classes, each named by ImageNet's first word for it."""
    check_folder(root)
    if not all((root / part).exists() for part in (LIST, TRAIN, TEST, ANNOTATIONS)):
        raise wrong_layout(root, EXPECTED)
    identifiers = sorted(_lines(root / LIST))
    if options.class_list is not None:
        identifiers = listed(options.class_list, identifiers)
    index = open_index(root, (TRAIN, TEST), progress)
    files = ImageFiles(index, options.size or 64, options.fit or "stretch", options.workers)
    train = labelled_samples(files, folder_labels(index, class_folders(index, TRAIN)[0], identifiers))
    test = labelled_samples(files, _annotated(index, identifiers))
    for part, samples in ((TRAIN, train), (TEST, test)):
        refuse_missing(root / part, samples, identifiers, f"Expected {EXPECTED}: unpack the data set again.")
    dataset = dataset_of(TINY, _names(root, identifiers), train, test, files, options, progress)
    # Its lists and bounding boxes are no images, and are not meant to be.
    return replace(dataset, skipped=tuple(left for left in dataset.skipped if left.path.suffix != ".txt"))


def _annotated(index: ImageIndex, identifiers: Sequence[str]) -> Tensor:
    """The label of each file, int64 (N,), by the list of validation images; -1 where that has none."""
    label_of = {identifier: label for label, identifier in enumerate(identifiers)}
    columns = (line.split("\t") for line in _lines(index.root / ANNOTATIONS))
    annotated = {os.fsencode(f"{TEST}/images/{row[0]}"): label_of.get(row[1], -1) for row in columns if len(row) > 1}
    labels = torch.full((len(index),), -1)
    folder = os.fsencode(f"{TEST}/images")
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
