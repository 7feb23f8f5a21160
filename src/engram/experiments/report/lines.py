"""Figures of lines and points: accuracy against classes, values and memory, and drift along the tasks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from engram.experiments.aggregate import Group, Spread, curve, measured
from engram.experiments.report import text
from engram.experiments.report.appearance import KNOWN, RULE, Style, name_of_look
from engram.experiments.report.drawing import (
    Look,
    Scale,
    fitted,
    legend,
    line_style,
    linear_scale,
    log_scale,
    new_figure,
    set_accuracy_ticks,
    set_ticks,
    style_handles,
)
from engram.experiments.report.plot import Plot, Styles, labels, spread_cell
from engram.experiments.report.sections import Section
from engram.experiments.report.tables import Cell, Table

WIDE_SPAN = 50  # values that span more are shown on a logarithmic axis

# Accuracy against the number of classes.


def curves(section: Section, styles: Styles) -> Plot:
    """Accuracy on all classes seen, after each task."""
    seen = section.kind.classes_seen
    several = any(len(group.seeds) > 1 for group in section.groups)
    rows = tuple((group.label, *(spread_cell(point) for point in curve(group))) for group in section.groups)
    caption = "Top-1 accuracy on all classes seen so far, after each task."
    more = " Bands are one standard deviation between seeds to either side." if several else ""
    more += _from_zero([value for group in section.groups for value in _means(group)])
    return Plot(
        "accuracy",
        "Accuracy against the number of classes",
        caption + more,
        Table("accuracy", caption, ("classes", *map(str, seen)), rows),
        functools.partial(_draw_curves, section, styles),
    )


def _draw_curves(section: Section, styles: Styles, look: Look) -> Figure:
    figure = new_figure(look, 0.56 * look.width)
    axes = figure.subplots()
    seen = section.kind.classes_seen
    for group, style in zip(section.groups, styles, strict=True):
        _draw_line(axes, seen, curve(group), style)
    axes.set_ylim(*_limits([value for group in section.groups for value in _means(group)]))
    axes.set_ylabel("accuracy")
    set_accuracy_ticks(axes)
    _class_axis(axes, seen, look)
    legend(figure, look, style_handles(styles), labels(section.groups))
    return figure


def _means(group: Group) -> list[float]:
    return [point.mean for point in curve(group) if point is not None]


def _limits(accuracies: Sequence[float]) -> tuple[float, float]:
    """From 0, unless all lie in the upper half of what would be shown; to a little above the highest."""
    low, high = min(accuracies), max(accuracies)
    bottom = 0.1 * math.floor(10 * low - 0.5) if low > 0.5 * high else 0.0
    return max(0.0, bottom), min(1 + 0.02 * (1 - bottom), 0.1 * math.ceil(10 * high + 0.3))


def _from_zero(accuracies: Sequence[float]) -> str:
    return "" if _limits(accuracies)[0] == 0 else " The axis of accuracy does not begin at 0."


def _draw_line(axes: Axes, x: Sequence[float], points: Sequence[Spread | None], style: Style) -> None:
    """A line with a band of one deviation, where it has points."""
    there = [(place, point) for place, point in zip(x, points, strict=True) if point is not None]
    places, means = [place for place, _ in there], [point.mean for _, point in there]
    every = max(1, len(there) // 12)  # a marker on each of a hundred tasks would hide the line
    axes.plot(places, means, markevery=every, **line_style(style))
    if there and all(point.deviation is not None for _, point in there):
        low = [point.mean - (point.deviation or 0) for _, point in there]
        high = [point.mean + (point.deviation or 0) for _, point in there]
        axes.fill_between(places, low, high, color=style.colour.light, alpha=0.13, linewidth=0)


def _class_axis(axes: Axes, seen: Sequence[int], look: Look) -> None:
    """Classes seen along x, with a tick at each task where there is room."""
    margin = 0.03 * (seen[-1] - seen[0]) or 1
    axes.set_xlim(seen[0] - margin, seen[-1] + margin)
    axes.set_xlabel("classes seen")
    if len(seen) <= 12:
        set_ticks(axes, [(count, str(count)) for count in seen], 0.8 * look.width, 0.9 * look.size)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


# Accuracy and ω against what a suite varies.


def values(section: Section, styles: Styles) -> Plot | None:
    """Average incremental accuracy and ω against the value that a suite varies."""
    if section.varies is None:
        return None
    rows = tuple(
        (group.label, None if group.value is None else f"{group.value:g}", *_value_cells(group))
        for group in section.groups
    )
    caption = (
        f"Average incremental accuracy, and ω over all stored vectors after the last task, against {section.varies}."
    )
    more = " The axes do not begin at 0."
    if any(len(group.seeds) > 1 for group in section.groups):
        more += " Whiskers are one standard deviation between seeds to either side."
    more += " Dashed across: a variant without a value." if any(group.value is None for group in section.groups) else ""
    return Plot(
        "value",
        f"Accuracy against {section.varies}",
        caption + more,
        Table("value", caption, ("", section.varies, "average accuracy", "ω"), rows),
        functools.partial(_draw_values, section, styles),
    )


def _value_cells(group: Group) -> tuple[Cell, Cell]:
    return spread_cell(measured(group, "average")), spread_cell(measured(group, "omega"))


def _scale_of(numbers: Sequence[float]) -> Scale:
    positive = [number for number in numbers if number > 0]
    if min(numbers) >= 0 and positive and max(positive) > WIDE_SPAN * min(positive):
        return log_scale(numbers, at_values=True)
    return linear_scale(numbers)


def _draw_values(section: Section, styles: Styles, look: Look) -> Figure:
    panels = [("average", "average accuracy"), ("omega", "ω")]
    panels = [panel for panel in panels if any(measured(group, panel[0]) for group in section.groups)]
    figure = new_figure(look, (0.18 + 0.34 * len(panels)) * look.width)
    scale = _scale_of([group.value for group in section.groups if group.value is not None])
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    series = list(dict.fromkeys(group.series for group in section.groups))
    drawn = {name: _series_style(name, section, styles) for name in series}
    for axes, (number, label) in zip(every, panels, strict=True):
        for name in series:
            _draw_series(axes, [group for group in section.groups if group.series == name], number, scale, drawn[name])
        axes.set_ylabel(label)
        axes.margins(y=0.12)
        set_accuracy_ticks(axes, 5)
    for axes in every[:-1]:
        _edge_rule(axes, scale)
    _scale_axis(every[-1], scale, section.varies or "", look)
    legend(figure, look, style_handles(list(drawn.values())), series)
    return figure


def _series_style(name: str, section: Section, styles: Styles) -> Style:
    """The style of a series as a whole: its method's own, or where methods make several series, its middle group's."""
    looks = {group.series: name_of_look(group) for group in section.groups}
    if list(looks.values()).count(looks[name]) == 1 and looks[name] in KNOWN:
        return KNOWN[looks[name]]
    members = [style for group, style in zip(section.groups, styles, strict=True) if group.series == name]
    return members[len(members) // 2]


def _draw_series(axes: Axes, groups: Sequence[Group], number: str, scale: Scale, style: Style) -> None:
    """A line through the groups that have a value, with whiskers; across all values for those that have none."""
    points = sorted(
        (scale.place(group.value), spread.mean, spread.deviation or 0.0)
        for group in groups
        if group.value is not None and (spread := measured(group, number)) is not None
    )
    if points:
        x, y, deviations = zip(*points, strict=True)
        axes.errorbar(x, y, yerr=deviations if any(deviations) else None, elinewidth=0.8, **line_style(style))
    for group in groups:
        if group.value is None and (spread := measured(group, number)) is not None:
            axes.axhline(spread.mean, color=style.colour.light, linestyle=(0, style.dash or (4, 2)), linewidth=1)


def _scale_axis(axes: Axes, scale: Scale, label: str, look: Look) -> None:
    """Ticks of a scale along x, with room for a zero that lies apart."""
    places = [place for place, _ in scale.ticks]
    if scale.edge is not None:
        low, high = scale.edge, max(*places, axes.get_xlim()[1])
        axes.set_xlim(low - 0.06 * (high - low), high + 0.02 * (high - low))
        _edge_rule(axes, scale)
    set_ticks(axes, scale.ticks, 0.8 * look.width, 0.9 * look.size)
    axes.set_xlabel(fitted(label, 0.7 * look.width, look.size))


def _edge_rule(axes: Axes, scale: Scale) -> None:
    """A rule between zero and the rest, where zero lies apart."""
    if scale.edge is not None:
        nearest = min(place for place, _ in scale.ticks if place > scale.edge)
        axes.axvline((scale.edge + nearest) / 2, color=RULE.light, linewidth=0.8, zorder=0)


# Accuracy against memory.


def memory(section: Section, styles: Styles) -> Plot | None:
    """Average incremental accuracy against what is kept; nothing to see where all keep the same."""
    kept = [spread.mean for group in section.groups if (spread := measured(group, "memory"))]
    if len(set(kept)) < 2:
        return None
    rows = tuple(
        (group.label, spread_cell(measured(group, "memory"), text.megabytes), spread_cell(measured(group, "average")))
        for group in section.groups
    )
    caption = (
        "Average incremental accuracy against what is kept of old classes, in MB of 2²⁰ bytes, on a logarithmic axis."
    )
    more = " What keeps nothing is at the left edge." if min(kept) == 0 else ""
    more += _from_zero([spread.mean for group in section.groups if (spread := measured(group, "average"))])
    return Plot(
        "memory",
        "Accuracy against memory",
        caption + more,
        Table("memory", caption, ("", "kept, MB", "average accuracy"), rows),
        functools.partial(_draw_memory, section, styles),
    )


def _draw_memory(section: Section, styles: Styles, look: Look) -> Figure:
    figure = new_figure(look, 0.56 * look.width)
    axes = figure.subplots()
    kept = [spread.mean / 2**20 for group in section.groups if (spread := measured(group, "memory"))]
    scale = log_scale(kept, at_values=False, zero="nothing")
    averages = [spread for group in section.groups if (spread := measured(group, "average"))]
    _join_series(axes, section, styles, [scale.place(each) for each in kept], [each.mean for each in averages])
    for count, average, style in zip(kept, averages, styles, strict=True):
        look_of_point = {**line_style(style), "linestyle": "none"}
        axes.errorbar(scale.place(count), average.mean, yerr=average.deviation or None, elinewidth=0.8, **look_of_point)
    axes.margins(x=0.06)
    axes.set_ylim(*_limits([average.mean for average in averages]))
    axes.set_ylabel("average accuracy")
    set_accuracy_ticks(axes)
    _scale_axis(axes, scale, "kept, MB", look)
    legend(figure, look, style_handles(styles, lines=False), labels(section.groups))
    return figure


def _join_series(axes: Axes, section: Section, styles: Styles, x: Sequence[float], y: Sequence[float]) -> None:
    """A thin line through the groups of one series, in the order of their memory."""
    for name in dict.fromkeys(group.series for group in section.groups):
        members = [index for index, group in enumerate(section.groups) if group.series == name]
        if len({x[index] for index in members}) > 1:
            ordered = sorted(members, key=lambda index: x[index])
            colour = _series_style(name, section, styles).colour.light
            axes.plot([x[index] for index in ordered], [y[index] for index in ordered], color=colour, linewidth=0.8)


# ω and the drift gap along the tasks.

DRIFT = (
    ("omega_previous", "ω of the previous\ntask's vectors"),
    ("omega_first", "ω of the first\ntask's vectors"),
    ("drift_gap", "drift gap"),
)

DRIFT_ROWS = (
    *(("omega", "ω, all"), ("omega_previous", "ω, previous"), ("omega_first", "ω, first")),
    *(("ceiling_curve", "ceiling"), ("drift_gap", "drift gap")),
)


def drift(section: Section, styles: Styles) -> Plot | None:
    """How well stored vectors follow the network, and what it costs where they do not."""
    chosen = [index for index, group in enumerate(section.groups) if any(curve(group, "omega_first"))]
    if not chosen:
        return None
    groups, drawn = [section.groups[index] for index in chosen], [styles[index] for index in chosen]
    rows = tuple(
        (group.label, label, *(spread_cell(point) for point in curve(group, name)))
        for group in groups
        for name, label in DRIFT_ROWS
    )
    caption = (
        "ω is the cosine between stored vectors and what the network now gives for the same images. The drift gap is "
        "what the same classifier would gain if no stored vector had drifted."
    )
    return Plot(
        "drift",
        "How well stored vectors follow the network",
        caption,
        Table("drift", caption, ("", "classes", *map(str, section.kind.classes_seen)), rows),
        functools.partial(_draw_drift, section, groups, drawn),
    )


def _draw_drift(section: Section, groups: Sequence[Group], styles: Styles, look: Look) -> Figure:
    figure = new_figure(look, 0.95 * look.width)
    seen = section.kind.classes_seen
    every = figure.subplots(len(DRIFT), 1, sharex=True)
    for axes, (name, label) in zip(every, DRIFT, strict=True):
        for group, style in zip(groups, styles, strict=True):
            _draw_line(axes, seen, curve(group, name), style)
        axes.set_ylabel(label, fontsize=0.9 * look.size)
        axes.margins(y=0.1)
        set_accuracy_ticks(axes, 4)
    _class_axis(every[-1], seen, look)
    figure.align_ylabels(every)
    legend(figure, look, style_handles(styles), labels(groups))
    return figure
