"""From an index of pictures to a data set: which class each is of, which classes are taken, what is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram.data.files import DecodeOptions, ImageFiles, pack
from engram.data.images import Fit
from engram.data.labelled import check_class_names
from engram.data.samples import Dataset, Samples
from engram.data.scanning import NAMED, ImageIndex, SkippedFile, is_folder, is_passed_over
from engram.errors import DataError, UsageError, unknown
from engram.progress import Progress
from engram.text import composed, names_in, printable

SHOWN = 5  # of what was found, in an error


@dataclass(frozen=True)
class Defaults:
    """How a data set's pictures become images where nothing else is asked for."""

    size: int
    fit: Fit

    def files(self, index: ImageIndex, reading: DecodeOptions) -> ImageFiles:
        """The pictures of an index as images, as asked for or as here."""
        return ImageFiles(index, reading.size or self.size, reading.fit or self.fit, reading.workers)


def folders_in(root: Path) -> list[str]:
    """The names of the folders in a data set's folder, or why there are none."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "cannot be found"
        raise DataError(f"{printable(root)} {what}. Name the data set's folder with --data DIR.")
    return [entry.name for entry in os.scandir(root) if is_folder(entry) and not is_passed_over(entry)]


def wrong_layout(root: Path, expected: str) -> DataError:
    """The error for a folder that is not laid out as it should be."""
    found = sorted(os.listdir(root))
    what = ", ".join(printable(name) for name in found[:SHOWN]) + (", …" if len(found) > SHOWN else "")
    return DataError(f"{printable(root)} holds {what or 'nothing'}. Expected {expected}.")


# Which class


def classes_in(index: ImageIndex, part: str) -> dict[str, list[int]]:
    """The classes that have pictures in a part of the tree, each with the numbers of all folders that belong to it."""
    classes: dict[str, list[int]] = {}
    above = os.fsencode(f"{part}/" if part else "")
    for number in index.folder_of.unique().tolist():
        folder = index.folders[number]
        if folder.startswith(above) and (name := folder[len(above) :].split(b"/")[0]):
            classes.setdefault(os.fsdecode(name), []).append(number)
    check_class_names({name: f"the folder {printable(index.root / part / name)}" for name in classes})
    return {composed(name): numbers for name, numbers in classes.items()}


def labels_in(index: ImageIndex, part: str, names: Sequence[str]) -> Tensor:
    """The label of each picture, int64 (N,), by its folder in this part; -1 where it is of none of these classes."""
    by_folder = torch.full((len(index.folders),), -1)
    classes = classes_in(index, part)
    for label, name in enumerate(names):
        by_folder[classes.get(name, [])] = label
    return by_folder[index.folder_of.long()]


def samples_of(files: ImageFiles, labels: Tensor) -> Samples:
    """The pictures that have a label, of labels (N,) for all that are in the index, and are not empty."""
    rows = ((labels >= 0) & (files.index.sizes > 0)).nonzero().squeeze(1)
    return Samples(files, rows, labels[rows])


def fewest(samples: Samples, names: Sequence[str]) -> dict[str, int]:
    """The classes with the fewest samples, and how many they have."""
    counts = torch.bincount(samples.labels, minlength=len(names))
    least = int(counts.min())
    return {name: least for name, count in zip(names, counts.tolist(), strict=True) if count == least}


def refuse_empty_classes(place: Path, samples: Samples, names: Sequence[str], advice: str, *, of: str = "") -> None:
    """Refuse a part of a data set, at `place`, that has no picture of some class; `of` says whence the classes are."""
    without = [name for name, count in fewest(samples, names).items() if not count]
    if without:
        raise DataError(
            f"{printable(place)} has no pictures of {len(without):,} of the {len(names):,} classes{of}, such as "
            f"{printable(without[0])}. {advice}"
        )


def listed(path: Path, names: Sequence[str]) -> list[str]:
    """Those of the names that a file has, one a line; sorted."""
    try:
        wanted = set(names_in(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The list of classes {printable(path)} cannot be read. One name a line is expected."
        ) from error
    for name in sorted(wanted):
        if name not in names:
            raise unknown("class", name, names, f"the lines of {path}")
    if not wanted:
        raise UsageError(f"The list of classes {printable(path)} names none. One name a line is expected.")
    return sorted(wanted)


# The whole


def finished(
    name: str,
    names: Sequence[str],
    train: Samples,
    test: Samples,
    files: ImageFiles,
    reading: DecodeOptions,
    progress: Progress,
    skipped: Sequence[SkippedFile] = (),
) -> Dataset:
    """The data set of these samples, packed if that is asked for; more may be `skipped` than the index tells."""
    if reading.cache is not None:
        packed = pack(files, torch.cat([train.rows, test.rows]).unique(), reading.cache, progress)
        train, test = (Samples(packed, part.rows, part.labels) for part in (train, test))
    told = list(_skipped(files.index))
    known = {left.path for left in told}
    return Dataset(name, train, test, tuple(names), (*told, *(left for left in skipped if left.path not in known)))


def _skipped(index: ImageIndex) -> Iterator[SkippedFile]:
    """What is not among the samples, though no one has asked for that."""
    yield from index.skipped
    beside = torch.isin(index.folder_of, torch.tensor(index.tops, dtype=torch.int32))
    yield from _some(index, beside, "It lies beside the class folders, so it has no class.")
    yield from _some(index, ~beside & (index.sizes == 0), "It is empty. Copy it again.")


def _some(index: ImageIndex, which: Tensor, reason: str) -> Iterator[SkippedFile]:
    rows = which.nonzero().squeeze(1).tolist()
    for row in rows[:NAMED]:
        yield SkippedFile(index.path(row), reason)
    if len(rows) > NAMED:
        yield SkippedFile(index.root, f"Likewise {len(rows) - NAMED:,} more of its files. {reason}")
