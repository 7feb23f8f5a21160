"""What commands print: JSON, tables, skipped files."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import typer

from engram.text import printable

if TYPE_CHECKING:
    from engram.data.scanning import SkippedFile
    from engram.model import RejectionThreshold

MOST_SKIPPED = 20  # skipped files that are listed; the others are counted
NARROWEST = 8  # characters of the last column of a table, however narrow the terminal


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    typer.echo(json.dumps(value))


def print_skipped(skipped: Iterable[SkippedFile]) -> None:
    """Print the skipped files to stderr."""
    for line in skipped_lines(skipped, "; --json lists all"):
        typer.echo(line, err=True)


def rejection_text(threshold: RejectionThreshold | None) -> str:
    """What `--reject auto` does."""
    if threshold is None:
        return "not known: it takes three classes, and a network that was not trained on them"
    return (
        f"--reject auto accepts about {threshold.rate:.0%} of images of unknown classes and "
        f"{threshold.known_accepted:.0%} of known ones (similarity {threshold.similarity:.3f}), estimated from "
        f"{threshold.images:,} held-out images, leaving out each of {threshold.classes:,} classes"
    )


def skipped_lines(skipped: Iterable[SkippedFile], see: str = "") -> list[str]:
    """A line per skipped file; beyond `MOST_SKIPPED` only their number, and where to `see` them."""
    lines = [f"skipped: {each}" for each in skipped]
    if len(lines) > MOST_SKIPPED:
        lines[MOST_SKIPPED:] = [f"skipped: {len(lines) - MOST_SKIPPED:,} more{see}"]
    return lines


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Container[int] = (),
    overflow: Literal["wrap", "ellipsis", "none"] = "wrap",
) -> str:
    """Aligned columns of text, those in `right` flush right; the last one wraps or is cut at the terminal's width."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    indent = sum(widths) + 2 * len(widths)
    room = max(console.width - indent, NARROWEST)
    lines = []
    for *first, last in cells:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(first, widths, strict=True)]
        padded = [
            gap + cell if n in right else cell + gap for n, (cell, gap) in enumerate(zip(first, gaps, strict=True))
        ]
        text = Text(last)  # no markup in names
        if overflow == "ellipsis":
            text.truncate(room, overflow="ellipsis")
        wrapped = [line.plain.rstrip() for line in text.wrap(console, room)] if overflow != "none" else [last]
        lines += ["  ".join([*padded, *wrapped[:1]]).rstrip(), *(" " * indent + line for line in wrapped[1:])]
    return "\n".join(lines)
