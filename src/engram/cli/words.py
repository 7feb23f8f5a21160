"""How commands about models say numbers, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram.data.pictures import LeftOut

LISTED = 20  # files that were left out, before only their number is told


def megabytes(count: int) -> str:
    """Bytes in the paper's MB, or in KB where they are few."""
    return f"{count / 2**20:.2f} MB" if count >= 100 * 2**10 else f"{count / 2**10:.1f} KB"


def minutes(seconds: float) -> str:
    """A length of time."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line for each file that was left out, up to a number."""
    lines = [f"left out: {each}" for each in left_out]
    rest = len(lines) - LISTED
    return lines if rest <= 0 else [*lines[:LISTED], f"left out: {rest} more; --json lists all"]
