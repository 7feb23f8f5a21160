"""Figures of accuracy matrices as heat maps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure

from engram.experiments.aggregate import Group, Spread, mean_matrix
from engram.experiments.report.appearance import PAPER
from engram.experiments.report.drawing import Look, fitted_all, new_figure, plain
from engram.experiments.report.plot import Plot, Styles, labels
from engram.experiments.report.sections import Section
from engram.experiments.report.tables import Quantity, Table

MOST_MATRICES = 16
MOST_TASKS_IN_TABLE = 20


def matrices(section: Section, styles: Styles) -> Plot | None:
    """Accuracy on each task's classes after each task, one map for each group."""
    if section.tasks < 2:
        return None
    groups = section.groups[:MOST_MATRICES]
    rows = tuple(
        (
            group.label,
            str(task + 1),
            *(Quantity(Spread(cell, None)) for cell in row),
            *[None] * (section.tasks - len(row)),
        )
        for group in groups
        for task, row in enumerate(mean_matrix(group))
        if section.tasks <= MOST_TASKS_IN_TABLE or task == section.tasks - 1
    )
    caption = "Accuracy on each task's classes (across) after each task (down), the mean over the seeds."
    more = f" The first {MOST_MATRICES} of {len(section.groups)} groups." if len(groups) < len(section.groups) else ""
    less = " The table has what is left after the last task." if section.tasks > MOST_TASKS_IN_TABLE else ""
    return Plot(
        "matrix",
        "Accuracy by task",
        caption + more + less,
        Table("matrix", caption, ("", "after task", *(str(task + 1) for task in range(section.tasks))), rows),
        functools.partial(_draw_matrices, groups),
    )


def _draw_matrices(groups: Sequence[Group], look: Look) -> Figure:
    across = 4 if len(groups) > 6 else 3  # for one group too: a map needs no more room
    down = math.ceil(len(groups) / across)
    side = look.width / (across + 0.5)
    figure = new_figure(look, down * (side + 1.2 * look.size) + 1.5 * look.size)
    every = figure.subplots(down, across, squeeze=False)
    titles = fitted_all(labels(groups), 0.9 * side, 0.8 * look.size)
    for index, axes in enumerate(every.flat):
        if index >= len(groups):
            axes.set_visible(False)
            continue
        _draw_matrix(axes, mean_matrix(groups[index]))
        axes.set_title(titles[index], fontsize=0.8 * look.size, loc="left")
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, 1), _shades()), ax=every, fraction=0.03, pad=0.02, aspect=30, anchor=(0, 1)
    )
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda value, _: plain(round(value, 2)))
    return figure


@functools.cache
def _shades() -> Colormap:
    """Cividis, which all kinds of colour vision see alike, without its darkest end: it would be lost on dark paper."""
    return ListedColormap(matplotlib.colormaps["cividis"]([0.12 + 0.88 * step / 255 for step in range(256)]))


def _draw_matrix(axes: Axes, matrix: Sequence[Sequence[float]]) -> None:
    tasks = len(matrix)
    cells = [[*row, *[math.nan] * (tasks - len(row))] for row in matrix]
    few = tasks <= MOST_TASKS_IN_TABLE
    edges: dict[str, Any] = {"edgecolors": PAPER.light, "linewidth": min(0.6, 4 / tasks)} if few else {}
    # Beyond twenty tasks the cells are drawn as one picture: as shapes they would be thousands.
    axes.pcolormesh(cells, cmap=_shades(), norm=Normalize(0, 1), rasterized=not few, **edges)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.invert_yaxis()
    axes.set_xticks([0.5, tasks - 0.5], ["1", str(tasks)])
    axes.set_yticks([0.5, tasks - 0.5], ["1", str(tasks)])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
