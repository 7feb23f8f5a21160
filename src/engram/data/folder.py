"""Folders of pictures as data sets: `train/CLASS/*` and `val/CLASS/*`, or just one folder per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from engram.data.files import DecodeOptions
from engram.data.labelled import SPLIT_NAMES
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
from engram.data.samples import Dataset, hold_out
from engram.data.scanning import ImageIndex, SkippedFile, open_index
from engram.errors import DataError
from engram.progress import SILENT, Progress
from engram.text import composed, printable

TRAIN, TESTS = "train", ("val", "valid", "validation", "test")  # of the latter, the first that is there
OWN = Defaults(64, "middle")  # as `learn` shows pictures, at a size that needs no graphics card


def load(root: Path, reading: DecodeOptions, progress: Progress = SILENT) -> Dataset:
    """Any folder of folders, named after it: with `train` and `val`, or one of classes, a fifth of each for testing."""
    found = folders_in(root)

    def choose(names: list[str]) -> list[str]:
        return names if reading.class_list is None else listed(reading.class_list, names)

    if TRAIN in found and set(TESTS) & set(found):
        return load_split(_named(root), root, reading, OWN, choose, progress)
    index = open_index(root, (), progress)
    classes = sorted(classes_in(index, ""))
    _refuse_parts(root, index, classes)
    names = choose(classes)
    if not names:
        raise wrong_layout(root, f"CLASS/*.jpg, or {TRAIN}/CLASS/*.jpg and {TESTS[0]}/CLASS/*.jpg")
    files = OWN.files(index, reading)
    samples = samples_of(files, labels_in(index, "", names))
    for name, count in fewest(samples, names).items():
        if count < 2:
            raise DataError(
                f"In {printable(root)}, the class '{printable(name)}' has {count} pictures that are not empty. Two are needed, "
                "one to learn from and one to be tested on."
            )
    train, test = hold_out(samples, share=0.2, seed=0, purpose="test")
    return finished(_named(root), names, train, test, files, reading, progress, _without_pictures(root, classes))


def _refuse_parts(root: Path, index: ImageIndex, classes: list[str]) -> None:
    """Refuse folders of folders of classes, such as `Train` and `Test`, which would be learned as classes."""
    direct = any(len(classes_in(index, name)) < 2 for name in classes)
    if classes and not direct and {name.lower() for name in classes} <= SPLIT_NAMES:
        likely = next((name for name in classes if name.lower().startswith(TRAIN)), classes[0])
        what = (
            f"{TRAIN}, but none of {', '.join(TESTS)}. Add one of them"
            if classes == [TRAIN]
            else f"{' and '.join(map(printable, classes))}, which seem to be parts of a data set. Call them {TRAIN} and val"
        )
        raise DataError(
            f"{printable(root)} has {what}, or name {printable(root / likely)}, of which a fifth of each class is then for "
            "testing."
        )


def _without_pictures(folder: Path, classes: Collection[str]) -> list[SkippedFile]:
    """The folders that could be those of classes, and have no pictures."""
    empty = (name for name in folders_in(folder) if composed(name) not in classes)
    return [SkippedFile(folder / name, "This class has no pictures.") for name in sorted(empty)]


def _named(root: Path) -> str:
    """The data set's name: the folder's own, however it is pointed at."""
    return printable(Path(os.path.abspath(root)).name)


def load_split(
    name: str,
    root: Path,
    reading: DecodeOptions,
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
    classes = sorted(classes_in(index, TRAIN))
    names = choose(classes)
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
    skipped = _without_pictures(root / TRAIN, classes)
    known = {left.path.name for left in skipped} | set(classes)
    unlearned = [other for other in folders_in(root / test_part) if composed(other) not in known]
    reason = f"{TRAIN} has no such class, so it cannot be learned."
    skipped += [SkippedFile(root / test_part / other, reason) for other in sorted(unlearned)]
    return finished(name, names, train, test, files, reading, progress, skipped)
