"""Lists of pictures: a .csv file with the columns path and label."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

from engram.data.scanning import SkippedFile
from engram.errors import DataError
from engram.progress import Phase
from engram.text import printable

PROBLEMS_SHOWN = 10


def read_list(path: Path, phase: Phase) -> tuple[list[tuple[str, Path]], dict[str, str], list[SkippedFile]]:
    """The class and the path of each picture that a list names, where each class was met, and what is left out."""
    problems: list[str] = []
    skipped: list[SkippedFile] = []
    met: dict[str, tuple[Path, str, int]] = {}  # by the file itself: picture, label and line
    for line, cell, label in _rows(path, problems):
        phase.advance()
        # As it is written: what `..` is, after a folder that is a link, only the file system knows.
        picture = path.parent / cell
        if problem := _problem(cell, picture, label):
            problems.append(f"Line {line}: {problem}.")
            continue
        file = os.path.realpath(picture)
        _, before, there = met.get(file, (picture, label, line))
        if before != label:
            problems.append(
                f"Line {line}: {printable(cell)} is '{printable(label)}', but '{printable(before)}' in line {there}."
            )
        elif there != line:
            skipped.append(SkippedFile(picture, f"Line {line} repeats line {there}."))
        else:
            met[file] = picture, label, line
    if problems:
        more = f" And {len(problems) - PROBLEMS_SHOWN:,} more." if len(problems) > PROBLEMS_SHOWN else ""
        raise DataError(
            f"{printable(path)} cannot be used. {' '.join(problems[:PROBLEMS_SHOWN])}{more} "
            "Expected the columns path and label, with paths relative to the list."
        )
    if not met:
        raise DataError(
            f"{printable(path)} lists no pictures. Expected the columns path and label, one picture a line."
        )
    places: dict[str, str] = {}
    for _, label, line in met.values():
        places.setdefault(label, f"line {line}")
    return [(label, picture) for picture, label, _ in met.values()], places, skipped


def _problem(cell: str, picture: Path, label: str) -> str:
    """Why a row cannot be used, or nothing."""
    if not cell:
        return "the path is empty"
    if not label:
        return f"the label of {printable(cell)} is empty"
    return "" if os.path.isfile(picture) else f"there is no file {printable(cell)}"


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
        # Names of files may be any bytes, and come through as they are; labels are checked to be text.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            begin = 1
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield begin, row
                begin = reader.line_num + 1
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a list of values with commas"
        raise DataError(f"{printable(path)} cannot be read: {reason}.") from error
