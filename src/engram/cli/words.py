"""How commands about models say numbers, set tables, and tell what was left out."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from engram.text import printable

if TYPE_CHECKING:
    from engram.data.scanning import SkippedFile

LISTED = 20  # files that were left out, before only their number is told
NARROWEST = 8  # columns that the last one of a table has, however narrow the terminal


def megabytes(count: int) -> str:
    """Bytes in the paper's MB, or in KB where they are few."""
    return f"{count / 2**20:.2f} MB" if count >= 100 * 2**10 else f"{count / 2**10:.1f} KB"


def minutes(seconds: float) -> str:
    """A length of time."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def counted(number: int, what: str) -> str:
    """`1 class`, `2 classes`, `1,234 pictures`."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def print_skipped(skipped: Iterable[SkippedFile]) -> None:
    """A line on stderr for each file that was left out, up to a number."""
    for line in skipped_lines(skipped, "; --json lists all"):
        typer.echo(line, err=True)


def skipped_lines(skipped: Iterable[SkippedFile], see: str = "") -> list[str]:
    """A line for each file that was left out, up to a number; `see`: where the others are."""
    lines = [f"left out: {each}" for each in skipped]
    return [*lines[:LISTED], f"left out: {len(lines) - LISTED:,} more{see}"] if len(lines) > LISTED else lines


def columns_there_are() -> int:
    """How wide the terminal is."""
    from rich.console import Console

    return Console().width


def table(rows: Sequence[Sequence[str]], *, right: Container[int] = (), folded: bool = True) -> str:
    """Aligned columns of text, those in `right` flush right. The last is folded into the width there is, or cut."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    console = Console()
    room = max(console.width - sum(widths) - 2 * len(widths), NARROWEST)
    lines = []
    for *first, last in cells:
        padding = [" " * (width - cell_len(cell)) for cell, width in zip(first, widths, strict=True)]
        padded = [
            gap + cell if n in right else cell + gap for n, (cell, gap) in enumerate(zip(first, padding, strict=True))
        ]
        text = Text(last)  # which takes nothing for markup
        if not folded:
            text.truncate(room, overflow="ellipsis")
        folds = [line.plain.rstrip() for line in text.wrap(console, room)] or [""]
        indent = " " * (sum(widths) + 2 * len(widths))
        lines += ["  ".join([*padded, folds[0]]).rstrip(), *(indent + fold for fold in folds[1:])]
    return "\n".join(lines)
