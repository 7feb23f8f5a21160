"""What there is to report on: the result files and suites under some folders, checked and cleaned."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from engram.errors import DataError
from engram.experiments.results import SCHEMA, Result
from engram.storage import ASIDE, read_json

T = TypeVar("T")

RESULT = "result.json"
SUITES = ("suite.json", "suite-*.json")  # several suites may share a folder, and runs in it


@dataclass(frozen=True)
class Variant:
    """One line or point of a suite: some runs that differ only in the seed."""

    label: str
    series: str
    value: float | None = None
    runs: list[str] = field(default_factory=list)  # folders, relative to the suite's


@dataclass(frozen=True)
class Suite:
    """A suite, as the file of one describes it."""

    schema: int
    suite: str
    dataset: str
    summary: str = ""
    finding: str | None = None  # what the paper found
    varies: str | None = None  # what the variants' values are values of
    command: str | None = None
    variants: list[Variant] = field(default_factory=list)


@dataclass
class Found:
    """Results and suites by their files, and what a person should know about the search."""

    results: dict[Path, Result] = field(default_factory=dict)
    suites: dict[Path, Suite] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read(places: Sequence[Path]) -> Found:
    """Read the result files that are named, and those in the folders that are named, at any depth.

    A file that cannot be used is noted, and the others go on; where none is left, that is an error.
    """
    found = Found()
    for place in places:
        if not place.exists():
            raise DataError(f"There is no file or folder '{clean(str(place))}'. Name folders of runs, or result files.")
        for file in _search(place, RESULT):
            _add_result(found, file)
        for file in (file for name in SUITES for file in _search(place, name) if place.is_dir()):
            _add_suite(found, file)
    if not found.results:
        where = ", ".join(f"'{clean(str(place))}'" for place in places)
        raise DataError(" ".join([f"No result was found in {where}. `engram run` makes them.", *found.notes]))
    return found


def _search(place: Path, name: str) -> list[Path]:
    if place.is_file():
        return [place]
    files = sorted(place.rglob(name))
    return [file for file in files if file.is_file() and not any(part.startswith(ASIDE) for part in file.parts)]


def _add_result(found: Found, file: Path) -> None:
    if file.resolve() in found.results:
        return
    try:
        result = _checked(Result, vars(Result.load(file)), file)
        _check_lists(result, file)
        found.results[file.resolve()] = result
    except (DataError, RecursionError) as error:
        found.notes.append(clean(f"Left out: {error}"))


def _add_suite(found: Found, file: Path) -> None:
    if file.resolve() in found.suites:
        return
    try:
        suite = _checked(Suite, read_json(file), file)
        if suite.schema != SCHEMA:
            raise DataError(f"{file} has schema {suite.schema}; this version reads {SCHEMA}.")
    except (DataError, RecursionError) as error:
        found.notes.append(clean(f"The suite is not used, its results are: {error}"))
        return
    found.suites[file.resolve()] = suite
    runs = dict.fromkeys(file.parent / run / RESULT for variant in suite.variants for run in variant.runs)
    missing = [run for run in runs if not run.is_file()]
    for run in runs:
        if run not in missing:
            _add_result(found, run)
    if missing:
        share = f"{len(missing)} of {len(runs)} runs have no result"
        found.notes.append(clean(f"The suite {suite.suite} in {file.parent} is not complete: {share}."))


CHECKERS: dict[type[Any], pydantic.TypeAdapter[Any]] = {kind: pydantic.TypeAdapter(kind) for kind in (Result, Suite)}


def _checked(kind: type[T], values: Any, file: Path) -> T:
    """The values as `kind`, each of the type its field should have, and with no character that could do harm."""
    try:
        return CHECKERS[kind].validate_python(_cleaned(values))  # type: ignore[no-any-return]
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise DataError(f"{file} is not what it should be: {where}: {first['msg']}.") from error
    except OverflowError as error:
        raise DataError(f"{file} is not what it should be: it holds a number that is not finite, or absurd.") from error


def _check_lists(result: Result, file: Path) -> None:
    """Refuse lists that do not go together: nothing that reads them would notice."""
    tasks = len(result.curve)
    along = [getattr(result, name) for name in ALONG_TASKS]
    averages = [result.average_incremental_accuracy, result.average_incremental_accuracy_top5]
    fits = (
        tasks > 0
        and all(len(each) == tasks for each in along if each is not None)
        and [len(row) for row in result.accuracy_matrix] == list(range(1, tasks + 1))
        and all(0 <= accuracy <= 1 for row in [result.curve, averages, *result.accuracy_matrix] for accuracy in row)
        and result.classes_seen[0] > 0
        and all(a <= b for a, b in itertools.pairwise(result.classes_seen))  # a task may bring known classes alone
        and result.memory_bytes >= 0
        and all(seconds >= 0 for seconds in result.seconds.values())
    )
    if not fits:
        raise DataError(f"{file} contradicts itself: its lists do not go together.")


ALONG_TASKS = (
    *("classes_seen", "curve_top5", "head_curve", "accuracy_matrix"),
    *("omega", "omega_previous", "omega_first", "ceiling_curve", "drift_gap"),
)


LARGEST = 2**63  # of the numbers that a result may hold: bytes, seconds


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        raise OverflowError
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {clean(str(name)): _cleaned(item) for name, item in value.items()}
    return value


# They turn the direction of all text that follows, so that a name could rewrite the page around it.
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """The text without control characters, lone surrogates, what is no character at all, and the like."""
    if text.isprintable():
        return text
    spaced = text.replace("\n", " ").replace("\t", " ")
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) in ("Cc", "Cn", "Cs") or each in TURNING else each
        for each in spaced
    )
