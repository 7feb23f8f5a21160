"""Figures of bars: forgetting, and time by phase."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from engram.experiments.aggregate import Group, Spread, measured, phases
from engram.experiments.report import text
from engram.experiments.report.appearance import INK, MUTED, PAPER, PHASES, phase_colours
from engram.experiments.report.drawing import Look, fitted_all, legend, new_figure, plain
from engram.experiments.report.plot import Plot, Styles, labels, spread_cell
from engram.experiments.report.sections import Section
from engram.experiments.report.tables import Quantity, Table


def forgetting(section: Section, styles: Styles) -> Plot | None:
    """What earlier tasks have lost since their best."""
    if section.tasks < 2:
        return None
    rows = tuple((group.label, spread_cell(measured(group, "forgetting"))) for group in section.groups)
    caption = "What earlier tasks have lost since their best, on average, after the last task. Less is better."
    whiskers = any(len(group.seeds) > 1 for group in section.groups)
    return Plot(
        "forgetting",
        "Forgetting",
        caption + (" Whiskers are one standard deviation between seeds to either side." if whiskers else ""),
        Table("forgetting", caption, ("", "forgetting"), rows),
        functools.partial(_draw_forgetting, section, styles),
    )


def _draw_forgetting(section: Section, styles: Styles, look: Look) -> Figure:
    figure, axes = _bars(section.groups, look)
    for row, (group, style) in enumerate(zip(section.groups, styles, strict=True)):
        spread = measured(group, "forgetting")
        assert spread is not None
        whiskers = {"xerr": spread.deviation, "error_kw": {"ecolor": INK.light, "elinewidth": 0.8}}
        kept = whiskers if spread.deviation else {}
        face = PAPER.light if style.hollow else style.colour.light
        axes.barh(row, spread.mean, height=0.62, color=face, edgecolor=style.colour.light, linewidth=1, **kept)  # type: ignore[arg-type]
    axes.axvline(0, color=MUTED.light, linewidth=0.8)
    axes.set_xlabel("forgetting")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    return figure


def _bars(groups: Sequence[Group], look: Look) -> tuple[Figure, Axes]:
    """A figure with a row for each group, its name on the left."""
    figure = new_figure(look, (len(groups) * 1.9 + 4.2) * look.size)
    axes = figure.subplots()
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK.light)
    axes.set_yticks(range(len(groups)), fitted_all(labels(groups), 0.4 * look.width, 0.9 * look.size))
    axes.set_ylim(len(groups) - 0.5, -0.5)
    return figure, axes


UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def times(section: Section, styles: Styles) -> Plot | None:
    """How long each phase took."""
    spent = [phases(group) for group in section.groups]
    names = _phase_names(spent)
    if not any(sum(each.values()) for each in spent):
        return None
    rows = tuple(
        (group.label, *(_seconds(each[name]) if name in each else None for name in names))
        for group, each in zip(section.groups, spent, strict=True)
    )
    caption = "Mean seconds of a run by phase. Measuring, which ω and the drift gap need, is no part of a method."
    shared = any(not group.trained for group in section.groups)
    more = " Some runs took networks from others that share them, and spent no time on those." if shared else ""
    return Plot(
        "time",
        "Time by phase",
        caption + more,
        Table("time", caption, ("", *names), rows),
        functools.partial(_draw_times, section.groups, spent),
    )


def _seconds(value: float) -> Quantity:
    return Quantity(Spread(value, None), text.seconds)


def _phase_names(spent: Sequence[Mapping[str, float]]) -> list[str]:
    """The phases there are: those known in their order, then others."""
    there = dict.fromkeys(name for each in spent for name in each)
    return [*(name for name in PHASES if name in there), *sorted(name for name in there if name not in PHASES)]


def _draw_times(groups: Sequence[Group], spent: Sequence[Mapping[str, float]], look: Look) -> Figure:
    figure, axes = _bars(groups, look)
    longest = max(sum(each.values()) for each in spent)
    unit, length = next(each for each in UNITS if longest >= 2 * each[1] or each[1] == 1)
    names = _phase_names(spent)
    colours = phase_colours(names)
    left = [0.0] * len(groups)
    for name in names:
        widths = [each.get(name, 0.0) / length for each in spent]
        axes.barh(range(len(groups)), widths, left=left, height=0.62, color=colours[name].light, linewidth=0)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlim(0, max(left) * 1.03)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    legend(figure, look, [Patch(color=colours[name].light) for name in names], names)
    return figure
