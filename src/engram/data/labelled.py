"""Labelled pictures of one's own: found in a folder with one sub-folder per class or in a CSV list, then decoded."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram.data.images import LIMIT, UnreadableImage, check_side, decode
from engram.data.lazy import prefetch
from engram.data.lists import read_list
from engram.data.samples import Samples
from engram.data.scanning import CIRCLE, Identity, SkippedFile, identity_of, is_folder, is_passed_over, problem_of
from engram.errors import DataError
from engram.progress import SILENT, Phase, Progress
from engram.text import composed, printable

SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})

EXPECTED = "one sub-folder per class, such as {}/cat/1.jpg, or a .csv file with the columns path and label"


@dataclass(frozen=True)
class LabelledFiles:
    """Pictures that were found, with their classes; none of them is opened yet."""

    source: Path  # the folder or the list
    class_names: tuple[str, ...]  # sorted, each with at least one picture
    paths: tuple[Path, ...]  # sorted by class, then by path
    labels: tuple[int, ...]  # of each path: its position in `class_names`
    skipped: tuple[SkippedFile, ...]  # other files, empty classes, links that lead nowhere or in a circle


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Pictures that were decoded, as samples (n, size, size, 3), and those that could not be."""

    samples: Samples
    class_names: tuple[str, ...]  # by label
    paths: tuple[Path, ...]  # of each sample
    unreadable: tuple[SkippedFile, ...]


def scan(source: str | os.PathLike[str], progress: Progress = SILENT) -> LabelledFiles:
    """The pictures of a folder with one sub-folder per class, or those that a .csv file lists with their labels.

    In a folder, all that lies below a class's sub-folder belongs to the class, links are followed, and pictures are
    known by their extensions. A list has the columns `path` (relative to the list) and `label`, in that order if it has
    no header.
    """
    source = Path(source)
    with progress.phase("scan") as phase:
        if os.path.isdir(source):
            return _scan_folder(source, phase)
        if os.path.isfile(source) and source.suffix.lower() == ".csv":
            return _found(source, *read_list(source, phase))
    what = "is neither a folder nor a .csv file" if os.path.exists(source) else "cannot be found"
    raise DataError(f"{printable(source)} {what}. Expected {EXPECTED.format('FOLDER')}.")


def read_images(
    found: LabelledFiles, size: int, progress: Progress = SILENT, *, limit: int = LIMIT, threads: int | None = None
) -> LabelledImages:
    """Decode what was found to squares of `size` pixels; pictures of more than `limit` pixels count as unreadable.

    Besides the result, no more than a few pictures are in memory at a time.
    """
    check_side(size)
    inputs = _room(len(found.paths), size)
    kept: list[int] = []
    unreadable: list[SkippedFile] = []
    with progress.phase("read", len(found.paths)) as phase:
        for position, outcome in enumerate(decode_files(found.paths, size, limit=limit, threads=threads)):
            if isinstance(outcome, SkippedFile):
                unreadable.append(outcome)
            else:
                inputs[len(kept)] = outcome
                kept.append(position)
            phase.advance()
    _check_classes(found, kept, unreadable)
    labels = torch.tensor([found.labels[position] for position in kept], dtype=torch.int64)
    paths = tuple(found.paths[position] for position in kept)
    return LabelledImages(Samples.of(inputs[: len(kept)], labels), found.class_names, paths, tuple(unreadable))


def decode_files(
    paths: Iterable[Path], size: int, *, limit: int = LIMIT, threads: int | None = None
) -> Iterator[Tensor | SkippedFile]:
    """Each picture as a square of `size` pixels, uint8 (size, size, 3), or why it cannot be read; in order."""

    def attempt(path: Path) -> Tensor | SkippedFile:
        try:
            return decode(path, size=size, limit=limit)
        except UnreadableImage as error:
            return SkippedFile(path, str(error))

    workers = threads or torch.get_num_threads()  # as many as torch may use, so that one setting limits both
    yield from prefetch(attempt, paths, workers=workers, ahead=2 * workers)


def images_below(folder: Path) -> tuple[list[Path], list[SkippedFile]]:
    """All pictures in a folder and the folders in it, by name, and what was left out."""
    skipped: list[SkippedFile] = []
    with SILENT.phase("scan") as phase:
        return sorted(_files_below(folder, None, skipped, phase)), skipped


def _room(count: int, size: int) -> Tensor:
    try:
        return torch.empty((count, size, size, 3), dtype=torch.uint8)
    except RuntimeError as error:
        gigabytes = count * size * size * 3 / 1e9
        raise DataError(
            f"{count:,} pictures of {size} x {size} pixels take {gigabytes:,.1f} GB, which this machine does not have. "
            "Take fewer pictures at a time, or a smaller size."
        ) from error


def _check_classes(found: LabelledFiles, kept: list[int], unreadable: list[SkippedFile]) -> None:
    bare = sorted(set(found.labels) - {found.labels[position] for position in kept})
    if bare:
        label_of = dict(zip(found.paths, found.labels, strict=True))
        first = next(picture for picture in unreadable if label_of[picture.path] == bare[0])
        raise DataError(
            f"None of the pictures of the class '{printable(found.class_names[bare[0]])}' can be read. {first} "
            "Replace them, or leave the class out."
        )


# Folders


def _scan_folder(folder: Path, phase: Phase) -> LabelledFiles:
    skipped: list[SkippedFile] = []
    beside, class_folders = _sorted_entries(folder, skipped)
    per_class = {entry: _files_below(entry, folder, skipped, phase) for entry in class_folders}
    if not any(per_class.values()):
        what = "pictures, but not in class folders" if beside else "no pictures"
        raise DataError(f"{printable(folder)} holds {what}. Expected {EXPECTED.format(printable(folder))}.")
    skipped += [SkippedFile(path, "It lies beside the class folders, so it has no class.") for path in beside]
    reported = {left.path for left in skipped}
    empty = [entry for entry, files in per_class.items() if not files and entry not in reported]
    skipped += [SkippedFile(entry, "This class has no pictures.") for entry in empty]
    _check_splits(folder, per_class)
    labelled = [(entry.name, path) for entry, files in per_class.items() for path in files]
    places = {entry.name: f"the folder {printable(entry)}" for entry, files in per_class.items() if files}
    return _found(folder, labelled, places, skipped)


def _sorted_entries(folder: Path, skipped: list[SkippedFile]) -> tuple[list[Path], list[Path]]:
    """The pictures and the folders that lie in `folder`, by name."""
    pictures, folders = [], []
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry for entry in entries if not is_passed_over(entry)), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"The folder {printable(folder)} cannot be read: {error.strerror}.") from error
    for entry in found:
        path = folder / entry.name
        if is_folder(entry):
            folders.append(path)
        elif problem := problem_of(entry):
            skipped.append(SkippedFile(path, problem))
        else:
            pictures.append(path)
    return pictures, folders


def _files_below(class_folder: Path, root: Path | None, skipped: list[SkippedFile], phase: Phase) -> list[Path]:
    """All pictures below a class's folder. A folder that contains itself, by a link, is not entered again."""
    files: list[Path] = []
    around = () if root is None else (identity_of(root.stat()),)
    waiting: list[tuple[Path, tuple[Identity, ...]]] = [(class_folder, around)]
    while waiting:
        folder, above = waiting.pop()
        identity = identity_of(folder.stat())
        if identity in above:
            skipped.append(SkippedFile(folder, CIRCLE))
            continue
        pictures, folders = _sorted_entries(folder, skipped)
        waiting += [(inner, (*above, identity)) for inner in folders]
        files += pictures
        phase.advance(len(pictures))
    return files


def _check_splits(folder: Path, per_class: Mapping[Path, list[Path]]) -> None:
    """Refuse a folder of folders of classes, which would be learned as the classes 'train' and 'test'."""
    filled = [entry for entry, files in per_class.items() if files]
    direct = any(path.parent == entry for entry in filled for path in per_class[entry])
    if not direct and {entry.name.lower() for entry in filled} <= SPLIT_NAMES:
        likely = next((entry for entry in filled if entry.name.lower().startswith("train")), filled[0])
        raise DataError(
            f"{printable(folder)} seems to be split into {' and '.join(printable(entry.name) for entry in filled)}, "
            f"with the classes one level below. Name one of these folders, such as {printable(likely)}."
        )


# Classes


def _found(
    source: Path, labelled: Iterable[tuple[str, Path]], places: Mapping[str, str], skipped: list[SkippedFile]
) -> LabelledFiles:
    """Name the classes and sort the pictures. `places` says where each spelling of a class was met."""
    check_class_names(places)
    named = sorted((composed(name), path) for name, path in labelled)
    class_names = tuple(dict.fromkeys(name for name, _ in named))
    label_of = {name: label for label, name in enumerate(class_names)}
    labels = tuple(label_of[name] for name, _ in named)
    skipped.sort(key=lambda left: left.path)
    return LabelledFiles(source, class_names, tuple(path for _, path in named), labels, tuple(skipped))


def check_class_names(places: Mapping[str, str]) -> None:
    """Refuse names that are not text, and two spellings that a person, or another system, takes for one."""
    met: dict[str, str] = {}
    for name, place in places.items():
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(f"The class '{printable(name)}' ({place}) is not named in UTF-8. Rename it.")
        key = name_key(name)
        if key in met:
            raise DataError(
                f"The classes {met[key]!a} ({places[met[key]]}) and {name!a} ({place}) differ in capitals, "
                "spaces or the encoding of accents alone. Give both one name, or two that differ more."
            )
        met[key] = name


def name_key(name: str) -> str:
    """Without capitals and surrounding spaces, accents decomposed."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name.strip()).casefold())
