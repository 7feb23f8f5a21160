"""`Plot`: a figure that can be drawn in any look, with a caption and a table of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from engram.experiments.aggregate import Group, Spread
from engram.experiments.report import text
from engram.experiments.report.appearance import Style
from engram.experiments.report.drawing import Look
from engram.experiments.report.tables import Cell, Quantity, Table

Styles = Sequence[Style]  # one for each group of a section


@dataclass(frozen=True)
class Plot:
    """What a figure shows. `draw` makes it anew; it must be drawn and saved under the settings of `drawing`."""

    name: str
    title: str
    caption: str
    table: Table
    draw: Callable[[Look], Figure]


def spread_cell(spread: Spread | None, written: Callable[[float], str] = text.accuracy) -> Cell:
    """A mean and deviation as a cell of a plot's table."""
    return None if spread is None else Quantity(spread, written)


def labels(groups: Sequence[Group]) -> list[str]:
    """The names of groups."""
    return [group.label for group in groups]
