"""Tiny ImageNet in its own layout: a list of classes, `train/CLASS/images/*`, and one folder of validation pictures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engram.data.files import DecodeOptions
from engram.data.labelling import (
    Defaults,
    finished,
    folders_in,
    labels_in,
    listed,
    refuse_empty_classes,
    samples_of,
    wrong_layout,
)
from engram.data.samples import Dataset
from engram.data.scanning import ImageIndex, open_index
from engram.errors import DataError
from engram.progress import SILENT, Progress
from engram.text import printable

NAME = "tiny-imagenet-200"
LIST, WORDS = "wnids.txt", "words.txt"
TRAIN, TEST, ANNOTATIONS = "train", "val", "val/val_annotations.txt"
EXPECTED = f"{LIST}, {TRAIN}/CLASS/images/*.JPEG, {TEST}/images/*.JPEG and {ANNOTATIONS}"
DEFAULTS = Defaults(64, "stretch")  # its own size


def load(root: Path, reading: DecodeOptions, progress: Progress = SILENT) -> Dataset:
    """Images (n, 64, 64, 3) of 200 classes, called by the first word that ImageNet has for each."""
    folders_in(root)
    if not all((root / part).exists() for part in (LIST, TRAIN, TEST, ANNOTATIONS)):
        raise wrong_layout(root, EXPECTED)
    identifiers = sorted(_lines(root / LIST))
    if reading.class_list is not None:
        identifiers = listed(reading.class_list, identifiers)
    index = open_index(root, (TRAIN, TEST), progress)
    files = DEFAULTS.files(index, reading)
    train = samples_of(files, labels_in(index, TRAIN, identifiers))
    test = samples_of(files, _annotated(index, identifiers))
    for part, samples in ((TRAIN, train), (TEST, test)):
        advice = f"Expected {EXPECTED}: unpack it again."
        refuse_empty_classes(root / part, samples, identifiers, advice, of=f" in {LIST}")
    dataset = finished(NAME, _words(root, identifiers), train, test, files, reading, progress)
    # Its lists and boxes are no pictures, and are not meant to be.
    return replace(dataset, skipped=tuple(left for left in dataset.skipped if left.path.suffix != ".txt"))


def _annotated(index: ImageIndex, identifiers: Sequence[str]) -> Tensor:
    """The label of each picture, int64 (N,), by the list of validation pictures; -1 where that says nothing."""
    label_of = {identifier: label for label, identifier in enumerate(identifiers)}
    columns = (line.split("\t") for line in _lines(index.root / ANNOTATIONS))
    annotated = {os.fsencode(f"{TEST}/images/{row[0]}"): label_of.get(row[1], -1) for row in columns if len(row) > 1}
    labels = torch.full((len(index),), -1)
    for number, folder in enumerate(index.folders):
        if folder == os.fsencode(f"{TEST}/images"):
            for row in (index.folder_of == number).nonzero().squeeze(1).tolist():
                labels[row] = annotated.get(index.relative(row), -1)
    return labels


def _words(root: Path, identifiers: Sequence[str]) -> list[str]:
    """What the classes are called: ImageNet's first word for each, with the identifier where two are called alike."""
    lines = _lines(root / WORDS) if (root / WORDS).exists() else []
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    names = [words.get(identifier, identifier).split(",")[0].strip() for identifier in identifiers]
    times = Counter(names)
    pairs = zip(names, identifiers, strict=True)
    return [name if times[name] == 1 else f"{name} ({identifier})" for name, identifier in pairs]


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{printable(path)} cannot be read: {error}. Unpack the data set again.") from error
