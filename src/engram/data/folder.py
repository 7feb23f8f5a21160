"""Folders of pictures as data sets: `train/CLASS/*` and `val/CLASS/*`, or just one folder per class."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from engram.data.holdout import hold_out
from engram.data.index import open_index
from engram.data.labelling import (
    Defaults,
    classes_in,
    fewest,
    finished,
    folders_in,
    labels_in,
    listed,
    refuse_empty_classes,
    samples_of,
    wrong_layout,
)
from engram.data.reading import Reading
from engram.data.samples import Dataset
from engram.errors import DataError
from engram.progress import SILENT, Progress
from engram.text import shown

TRAIN, TESTS = "train", ("val", "validation", "test")  # of the latter, the first that is there
OWN = Defaults(64, "middle")  # as `learn` shows pictures, at a size that needs no graphics card


def load(root: Path, reading: Reading, progress: Progress = SILENT) -> Dataset:
    """Any folder of folders, named after it: with `train` and `val`, or one of classes, a fifth of each for testing."""
    found = folders_in(root)

    def choose(names: list[str]) -> list[str]:
        return names if reading.class_list is None else listed(reading.class_list, names)

    if TRAIN in found and set(TESTS) & set(found):
        return load_split(_named(root), root, reading, OWN, choose, progress)
    index = open_index(root, (), progress)
    if set(classes_in(index, "")) == {TRAIN} and len(classes_in(index, TRAIN)) > 1:
        raise DataError(
            f"{shown(root)} has {TRAIN}, but none of {', '.join(TESTS)}. Add one of them, or name "
            f"{shown(root / TRAIN)}, of which a fifth of each class is then for testing."
        )
    names = choose(sorted(classes_in(index, "")))
    if not names:
        raise wrong_layout(root, f"CLASS/*.jpg, or {TRAIN}/CLASS/*.jpg and {TESTS[0]}/CLASS/*.jpg")
    files = OWN.files(index, reading)
    samples = samples_of(files, labels_in(index, "", names))
    for name, count in fewest(samples, names).items():
        if count < 2:
            raise DataError(
                f"In {shown(root)}, the class '{shown(name)}' has {count} pictures that are not empty. Two are needed, "
                "one to learn from and one to be tested on."
            )
    train, test = hold_out(samples, share=0.2, seed=0, purpose="test")
    return finished(_named(root), names, train, test, files, reading, progress)


def _named(root: Path) -> str:
    """The data set's name: the folder's own, however it is pointed at."""
    return shown(Path(os.path.abspath(root)).name)


def load_split(
    name: str,
    root: Path,
    reading: Reading,
    defaults: Defaults,
    choose: Callable[[list[str]], list[str]],
    progress: Progress = SILENT,
) -> Dataset:
    """A folder with `train/CLASS/*` and `val/CLASS/*`; of the classes of `train`, sorted, those that are chosen."""
    found = folders_in(root)
    test_part = next((part for part in TESTS if part in found), None)
    if TRAIN not in found or test_part is None:
        raise wrong_layout(root, f"{TRAIN}/CLASS/*.JPEG and {TESTS[0]}/CLASS/*.JPEG")
    index = open_index(root, (TRAIN, test_part), progress)
    names = choose(sorted(classes_in(index, TRAIN)))
    if not names:
        raise wrong_layout(root / TRAIN, f"{TRAIN}/CLASS/*.JPEG")
    files = defaults.files(index, reading)
    train, test = (samples_of(files, labels_in(index, part, names)) for part in (TRAIN, test_part))
    for part, samples in ((TRAIN, train), (test_part, test)):
        refuse_empty_classes(
            root / part,
            samples,
            names,
            f"Expected {part}/CLASS/*.JPEG for each: sort them into such folders, or name the classes to take with "
            "--class-list FILE.",
        )
    return finished(name, names, train, test, files, reading, progress)
