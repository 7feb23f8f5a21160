"""A user's labelled images: found in a folder with one sub-folder per class or in a CSV list, then decoded."""

from __future__ import annotations

import csv
import os
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram.data.images import UnreadableImage, check_side, decode
from engram.data.samples import Samples, prefetch
from engram.data.scanning import ImageIndex, SkippedFile, at_most, build_index
from engram.errors import DataError
from engram.progress import SILENT, Phase, Progress
from engram.text import composed, printable

SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
EXPECTED = "one sub-folder per class, such as {}/cat/1.jpg, or a .csv file with the columns path and label"
MAX_PROBLEMS = 10  # wrong lines of a list that an error names


@dataclass(frozen=True)
class LabelledFiles:
    """Image files with their classes; none is opened yet."""

    source: Path  # the folder or the list
    class_names: tuple[str, ...]  # sorted, each with at least one file
    paths: tuple[Path, ...]  # sorted by class, then by path
    labels: tuple[int, ...]  # of each path: its position in `class_names`
    skipped: tuple[SkippedFile, ...]

    def where(self, wanted: Callable[[Path, str], bool]) -> LabelledFiles:
        """The files whose path and class are wanted, and their classes."""
        files = zip((self.class_names[label] for label in self.labels), self.paths, strict=True)
        return _sorted(self.source, [(name, path) for name, path in files if wanted(path, name)], self.skipped)


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Decoded images, as samples (n, size, size, 3), and the files that cannot be decoded."""

    samples: Samples
    class_names: tuple[str, ...]  # by label
    paths: tuple[Path, ...]  # of each sample
    unreadable: tuple[SkippedFile, ...]


def scan(source: str | os.PathLike[str], progress: Progress = SILENT) -> LabelledFiles:
    """The images of a folder with one sub-folder per class, or those that a .csv file lists with their labels.

    All images below a class's sub-folder belong to the class; links are followed. A list has the columns `path`
    (relative to the list) and `label`, in that order if it has no header.
    """
    source = Path(source)
    if os.path.isfile(source) and source.suffix.lower() == ".csv":
        with progress.phase("scan") as phase:
            return _scan_list(source, phase)
    if not os.path.isdir(source):
        what = "is neither a folder nor a .csv file" if os.path.exists(source) else "does not exist"
        raise DataError(f"{printable(source)} {what}. Expected {EXPECTED.format('FOLDER')}.")
    index = build_index(source, progress=progress)
    classes, empty = class_folders(index)
    if not classes:
        what = "images, but not in class folders" if len(index) else "no images"
        raise DataError(f"{printable(source)} holds {what}. Expected {EXPECTED.format(printable(source))}.")
    refuse_splits(source, index, classes)
    names = sorted(classes)
    labels = folder_labels(index, classes, names).tolist()
    labelled = [(names[label], index.path(row)) for row, label in enumerate(labels) if label >= 0]
    return _sorted(source, labelled, [*skipped_in(index), *empty])


def images_below(folder: Path) -> tuple[list[Path], list[SkippedFile]]:
    """All image files below a folder, sorted by path, and the skipped files."""
    index = build_index(folder)
    return sorted(map(index.path, range(len(index)))), list(index.skipped)


def read_images(files: LabelledFiles, size: int, progress: Progress = SILENT) -> LabelledImages:
    """Decode files to squares of `size` pixels. Besides the result, only a few images are in memory at a time."""
    check_side(size)
    count = len(files.paths)
    try:
        inputs = torch.empty((count, size, size, 3), dtype=torch.uint8)
    except RuntimeError as error:
        raise DataError(
            f"{count:,} images of {size} x {size} pixels need {count * size * size * 3 / 1e9:,.1f} GB, more than this "
            "machine has. Use fewer images at a time, or a smaller size."
        ) from error
    decoded: list[int] = []
    unreadable: list[SkippedFile] = []
    with progress.phase("read", count) as phase:
        for position, outcome in enumerate(decode_files(files.paths, size)):
            if isinstance(outcome, SkippedFile):
                unreadable.append(outcome)
            else:
                inputs[len(decoded)] = outcome
                decoded.append(position)
            phase.advance()
    labels = torch.tensor([files.labels[position] for position in decoded], dtype=torch.int64)
    if missing := sorted(set(files.labels) - set(labels.tolist())):
        first = next(left for left in unreadable if files.labels[files.paths.index(left.path)] == missing[0])
        name = printable(files.class_names[missing[0]])
        raise DataError(f"No image of the class '{name}' can be read. {first} Replace them, or remove the class.")
    paths = tuple(files.paths[position] for position in decoded)
    return LabelledImages(Samples.of(inputs[: len(decoded)], labels), files.class_names, paths, tuple(unreadable))


def decode_files(paths: Iterable[Path], size: int, ahead: int = 0) -> Generator[Tensor | SkippedFile, None, None]:
    """Each image as a square of `size` pixels, uint8 (size, size, 3), or why it cannot be read; in order.

    At least `ahead` of them are prefetched. Close the generator if it may not be exhausted.
    """

    def attempt(path: Path) -> Tensor | SkippedFile:
        try:
            return decode(path, size=size)
        except UnreadableImage as error:
            return SkippedFile(path, str(error))

    workers = torch.get_num_threads()  # as many as torch may use, so that one setting limits both
    yield from prefetch(attempt, paths, workers=workers, ahead=max(ahead, 2 * workers))


# Folders


def class_folders(index: ImageIndex, part: str = "") -> tuple[dict[str, list[int]], list[SkippedFile]]:
    """The class folders of a part of the tree: each class with the numbers of its folders, and the empty ones."""
    prefix = os.fsencode(f"{part}/" if part else "")
    numbers: dict[str, list[int]] = {}
    for number, folder in enumerate(index.folders):
        if folder.startswith(prefix) and (name := folder[len(prefix) :].split(b"/")[0]):
            numbers.setdefault(os.fsdecode(name), []).append(number)
    filled = set(index.folder_of.unique().tolist())  # the folders that directly hold images
    classes = {name: own for name, own in numbers.items() if filled.intersection(own)}
    check_class_names({name: f"the folder {printable(index.root / part / name)}" for name in classes})
    reported = {left.path for left in index.skipped}
    bare = (index.root / part / name for name in sorted(numbers.keys() - classes.keys()))
    empty = [SkippedFile(path, "This class has no images.") for path in bare if path not in reported]
    return {composed(name): own for name, own in classes.items()}, empty


def folder_labels(index: ImageIndex, classes: Mapping[str, Sequence[int]], names: Sequence[str]) -> Tensor:
    """The label of each file, int64 (N,): the position in `names` of its class; -1 where it has none of these."""
    by_folder = torch.full((len(index.folders),), -1)
    for label, name in enumerate(names):
        by_folder[list(classes.get(name, []))] = label
    return by_folder[index.folder_of.long()]


def refuse_splits(folder: Path, index: ImageIndex, classes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a folder of splits: they would be learned as the classes 'train' and 'test'."""
    filled = (index.folders[number] for number in index.folder_of.unique().tolist())
    direct = any(folder and b"/" not in folder for folder in filled)
    if not direct and {name.lower() for name in classes} <= SPLIT_NAMES:
        likely = next((name for name in sorted(classes) if name.lower().startswith("train")), min(classes))
        raise DataError(
            f"{printable(folder)} holds {' and '.join(sorted(map(printable, classes)))}, which look like the splits of "
            f"a data set, with the classes one level below. Name one of them, such as {printable(folder / likely)}; "
            "for `engram run`, splits may also be called train and val."
        )


def skipped_in(index: ImageIndex) -> list[SkippedFile]:
    """The skipped files of an index, and the images that lie beside the class folders."""
    is_whole = index.folders[0] == b""  # otherwise only some sub-folders of the root were scanned
    tops = [not folder if is_whole else b"/" not in folder for folder in index.folders]
    beside = torch.tensor(tops)[index.folder_of.long()].nonzero().squeeze(1).tolist()
    reason = "It lies beside the class folders, so it has no class."
    return at_most([*index.skipped, *(SkippedFile(index.path(row), reason) for row in beside)], index.root)


# Lists


def _scan_list(path: Path, phase: Phase) -> LabelledFiles:
    problems: list[str] = []
    skipped: list[SkippedFile] = []
    known: dict[str, tuple[Path, str, int]] = {}  # by the resolved path: path, label and line
    for line, cell, label in _rows(path, problems):
        phase.advance()
        file = path.parent / cell  # not normalised: the file system must resolve `..` after a link to a folder
        if not cell or not label or not os.path.isfile(file):
            what = "the path is empty" if not cell else "" if label else f"the label of {printable(cell)} is empty"
            problems.append(f"Line {line}: {what or f'there is no file {printable(cell)}'}.")
            continue
        _, before, first = known.setdefault(os.path.realpath(file), (file, label, line))
        if before != label:
            was = f"'{printable(before)}' in line {first}"
            problems.append(f"Line {line}: {printable(cell)} is '{printable(label)}', but {was}.")
        elif first != line:
            skipped.append(SkippedFile(file, f"Line {line} repeats line {first}."))
    if problems or not known:
        more = f" And {len(problems) - MAX_PROBLEMS:,} more." if len(problems) > MAX_PROBLEMS else ""
        what = " ".join(problems[:MAX_PROBLEMS]) + more or "It lists no images."
        raise DataError(
            f"{printable(path)} cannot be used. {what} "
            "Expected the columns path and label, one image per line, with paths relative to the list."
        )
    lines: dict[str, str] = {}
    for _, label, line in known.values():
        lines.setdefault(label, f"line {line}")
    check_class_names(lines)
    return _sorted(path, [(composed(label), file) for file, label, _ in known.values()], skipped)


def _rows(path: Path, problems: list[str]) -> Iterator[tuple[int, str, str]]:
    """(line, path, label) of each row with as many columns as the first; the others become problems."""
    rows = _lines(path)
    line, first = next(rows, (1, ["path", "label"]))
    names = [cell.strip().lower() for cell in first]
    header = "path" in names and "label" in names
    if not header and (len(first) != 2 or "\0" in "".join(first)):  # zeros: UTF-16, as spreadsheets may save it
        raise DataError(
            f"{printable(path)} must be UTF-8 text with the columns path and label, separated by a comma; "
            f"its first line is '{printable(','.join(first))[:80]}'."
        )
    which, what = (names.index("path"), names.index("label")) if header else (0, 1)
    if not header:
        yield line, first[which], first[what].strip()
    for line, row in rows:
        if len(row) == len(first):
            yield line, row[which], row[what].strip()
        else:
            problems.append(f"Line {line}: it has {len(row)} instead of {len(first)} columns.")


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the number of the line it begins in."""
    try:
        # File names may be any bytes; labels are checked to be text.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            begin = 1
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield begin, row
                begin = reader.line_num + 1
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not comma-separated text ({error})"
        raise DataError(f"{printable(path)} cannot be read: {reason}.") from error


# Classes


def _sorted(source: Path, labelled: Iterable[tuple[str, Path]], skipped: Iterable[SkippedFile]) -> LabelledFiles:
    pairs = sorted(labelled)
    label_of = {name: label for label, name in enumerate(dict.fromkeys(name for name, _ in pairs))}
    labels = tuple(label_of[name] for name, _ in pairs)
    ordered = tuple(sorted(skipped, key=lambda left: left.path))
    return LabelledFiles(source, tuple(label_of), tuple(path for _, path in pairs), labels, ordered)


def check_class_names(places: Mapping[str, str]) -> None:
    """Refuse names (keys, with where they were found) not in UTF-8, or equal but for case, spaces or Unicode form."""
    known: dict[str, str] = {}
    for name, place in places.items():
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(f"The class name '{printable(name)}' ({place}) is not UTF-8. Rename it.")
        other = known.setdefault(name_key(name), name)
        if other != name:
            raise DataError(
                f"The class names {other!a} ({places[other]}) and {name!a} ({place}) differ only in case, spaces or "
                "the encoding of accents. Use one name, or two that differ more."
            )


def name_key(name: str) -> str:
    """The same key for names that people, or another file system, would take for one."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name.strip()).casefold())
