"""Every figure of a report, drawn with matplotlib at the width of a paper's column."""

from __future__ import annotations

import io
import itertools
import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Bbox

from engram.experiments.report.runs import Section, distinct
from engram.experiments.report.tables import AVERAGES, CURVES, DRIFT, amount

WIDTH, SIZE, SMALL = 288.0, 7.0, 6.3  # in points: of a figure, of its text, of ticks and legends
MOST_MATRICES = 16
MOST_BANDS = 8  # of one deviation, in a panel: more hide each other
MOST_TASKS = 20  # of a matrix that is drawn cell by cell
WIDE_SPAN = 50  # values that span more are on a logarithmic axis

# By colour on a light page, the colour on a dark page: after Okabe and Ito, with a contrast of at least 3 to the page.
INK, MUTED, RULE, PAGE = "#1d2126", "#5a626c", "#d8dce1", "#ffffff"
HUES = {
    **{"#0a6cb0": "#4aa8ee", "#c9510c": "#ff8e57", "#0b8560": "#35c596", "#a07500": "#e3b341", "#6b4fbb": "#ab95f7"},
    **{"#b9488c": "#f190c6", "#147f94": "#52c7da", "#6d7680": "#98a2ad", "#33383e": "#d5d9de"},
}
COLOURS = {INK: "#e7e9ec", MUTED: "#a3abb5", RULE: "#343a42", PAGE: "#15181c", **HUES}
MARKERS = "os^DvPX<ph>d*"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)))
# These keep their hue on every page. An ablation has the hue of its method, dashed and hollow.
METHODS = (
    *("features", "hybrid", "gamma-lwf", "gamma-icarl", "eeil", "lucir", "bic", "finetune", "engram"),
    *("sdc", "ldc", "adc", "dpcr", "fecam", "fetril", "gaussian-replay", "ewc", "mas"),
    *("gem", "lwm", "il2m", "threshold-moving"),
)
ABLATIONS = {
    **{"features-unadapted": "features", "lwf": "gamma-lwf", "icarl": "gamma-icarl", "bic-uncorrected": "bic"},
    **{"joint": "finetune", "a-gem": "gem"},
}

Styles = dict[str, dict[str, Any]]  # by group, arguments of `Axes.plot`


def make_styles(section: Section, methods: Sequence[str]) -> Styles:
    """How groups are drawn: the first of a method in the method's hue, others in the next that are free."""
    styles: Styles = {}
    repeated = section.groups["method"].duplicated()
    places = {method: methods.index(ABLATIONS.get(method, method)) for method in section.groups["method"]}
    taken = {place % len(HUES) for place in places.values()}
    free = (n for n in itertools.count(len(methods)) if n % len(HUES) not in taken or len(taken) == len(HUES))
    for label, method in section.groups["method"].items():
        hollow = method in ABLATIONS and not repeated[label]
        place = next(free) if repeated[label] else places[method]
        colour = list(HUES)[place % len(HUES)]
        styles[label] = {
            **{"color": colour, "markeredgecolor": colour, "markerfacecolor": PAGE if hollow else colour},
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": DASHES[(place // len(HUES) + hollow) % len(DASHES)],
        }
    return styles


@contextmanager
def drawing(**settings: Any) -> Iterator[None]:
    """The settings of matplotlib while a figure is made or saved, whatever a user's own are."""
    ticks = {"color": MUTED, "labelsize": SMALL, "major.size": 2.1, "major.width": 0.6}
    chosen = {
        **{"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": SIZE, "text.color": INK},
        **{"pdf.fonttype": 42, "svg.hashsalt": "engram"},  # fonts embedded; the same ids every time
        **{"axes.labelcolor": MUTED, "axes.edgecolor": MUTED, "axes.linewidth": 0.6, "axes.facecolor": "none"},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False},
        **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": RULE, "grid.linewidth": 0.5},
        **{f"{axis}tick.{name}": value for axis in "xy" for name, value in ticks.items()},
        **{"lines.linewidth": 1.2, "lines.markersize": 3.8, "lines.markeredgewidth": 0.8},
        **{"legend.frameon": False, "legend.fontsize": SMALL, "legend.handlelength": 2.2, "legend.labelspacing": 0.6},
    }
    with matplotlib.style.context(["default", {**chosen, **settings}]), warnings.catch_warnings():
        # A browser has the characters that the font lacks; elsewhere a box takes their place.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


@dataclass(frozen=True)
class Plot:
    """A figure with its caption."""

    name: str  # for files and ids
    title: str
    caption: str
    figure: Figure

    def save(self, kind: str, **settings: Any) -> bytes:
        """The figure as svg, pdf or png, without a date."""
        dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}}
        output = io.BytesIO()
        with drawing(**settings):
            self.figure.savefig(output, format=kind, dpi=300, metadata=dates.get(kind), transparent=kind == "svg")
        return output.getvalue()

    def inline_svg(self, name: str) -> str:
        """The figure as part of an HTML page: text is text, colours are variables, ids differ from other names' ids."""
        svg = self.save("svg", **{"svg.fonttype": "none", "svg.hashsalt": name}).decode()
        svg = re.sub("<(style|metadata).*?</(style|metadata)>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        # Tags alone are changed: matplotlib escapes < and > in texts and attributes.
        labelled = f'<svg role="img" aria-label="{escape(self.title)}"'
        return re.sub("<[^>]+>", _page_tag, svg).replace("<svg", labelled, 1)


def _page_tag(found: re.Match[str]) -> str:
    """Without namespaces, so that the page mentions no address, and without ids that nothing refers to."""
    dropped = r"xmlns[\w:]*|id|version|width|height" if found[0].startswith(("<svg", "<g")) else "xmlns"
    tag = re.sub(rf'\s({dropped})="[^"]*"', "", found[0]).replace("xlink:href", "href")
    return re.sub("#[0-9a-f]{6}", lambda hue: f"var(--c{hue[0][1:]})" if hue[0] in COLOURS else hue[0], tag)


def make_figures(section: Section, styles: Styles) -> list[Plot]:
    """Every figure that the section's runs have numbers for; the leading accuracy is top-5 on ImageNet."""
    several_tasks = len(section.first["classes_seen"]) > 1
    average = {AVERAGES[section.metrics[0]]: section.metrics[0]}
    leading = CURVES[section.metrics[0]][0].capitalize()
    top1 = "accuracy" if leading == "Accuracy" else "top-1 accuracy"  # of matrices and forgetting
    values, memory, varies = section.groups["value"], section.spread("memory")["mean"], section.varies
    storing = {label: styles[label] for label in section.spread("last_omega")["mean"].dropna().index}
    plots: list[Plot] = []

    with drawing():
        for name, column in (CURVES[metric] for metric in section.metrics):
            shown = name.capitalize()
            bands = "; bands: ± one standard deviation" if len(styles) <= MOST_BANDS else ""
            caption = f"{shown} on all classes seen so far after each task{bands}."
            figure = _by_task(section, styles, {name: column})
            plots.append(Plot(name.replace(" ", "-"), f"{shown} against the number of classes", caption, figure))
        if varies:
            panels = {**average, **({"ω": "last_omega"} if storing else {})}
            log = values.min() >= 0 and values.max() > WIDE_SPAN * values[values > 0].min()
            caption = f"{leading}, and ω after the last task, against {varies}; dashed: groups without a value."
            figure = _against(section, styles, varies, values, panels, log)
            plots.append(Plot("value", f"{leading} against {varies}", caption, figure))
        if memory.nunique() > 1:
            caption = f"{leading} against the memory for old classes, in MB of 2²⁰ bytes on a logarithmic axis; "
            caption += "grey line: the best with at most this memory."
            figure = _against(section, styles, "memory, MB", memory, average, log=True, front=section.front)
            plots.append(Plot("memory", f"{leading} against memory", caption, figure))
        if storing and several_tasks:
            caption = f"ω: cosine similarity of stored to current features; drift gap: {top1} that drift costs."
            plots.append(Plot("drift", "Drift of stored features", caption, _by_task(section, storing, DRIFT)))
        if several_tasks:
            caption = f"{top1.capitalize()} on each task's classes (across) after each task (down), mean over seeds."
            plots.append(Plot("matrix", f"{top1.capitalize()} by task", caption, _matrices(section)))
            caption = f"The {top1} that earlier tasks have lost since their best, on average; less is better."
            plots.append(Plot("forgetting", "Forgetting", caption, _forgetting(section, styles)))
        if section.runs["seconds"].map(bool).any():
            caption = "Mean minutes of a run by phase; a network that another run has trained takes no time here."
            plots.append(Plot("time", "Time by phase", caption, _times(section)))
    return plots


def _by_task(section: Section, styles: Styles, panels: Mapping[str, str]) -> Figure:
    """A line for each group along the tasks with a band of one standard deviation, in a panel for each column."""
    figure, every = _panels((0.4 + 0.15 * len(panels)) * WIDTH, len(panels))
    for [axes], (label, column) in zip(every, panels.items(), strict=True):
        stats = section.spread_by_task(column)
        for group, style in styles.items():
            points = stats.loc[group].assign(seen=section.first["classes_seen"]).dropna(subset="mean")
            axes.plot(points["seen"], points["mean"], markevery=max(1, len(points) // 12), **style)
            if points["std"].notna().any() and len(styles) <= MOST_BANDS:
                low, high = points["mean"] - points["std"], points["mean"] + points["std"]
                axes.fill_between(points["seen"], low, high, color=style["color"], alpha=0.13, linewidth=0)
        _accuracy_axis(axes, label, 6 if len(panels) == 1 else 4)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("classes seen")
    _legend(figure, {label: Line2D([], [], **style) for label, style in styles.items()})
    return figure


def _against(
    section: Section,
    styles: Styles,
    xlabel: str,
    x: pd.Series[float],
    panels: Mapping[str, str],
    log: bool,
    front: Sequence[str] = (),
) -> Figure:
    """Points with whiskers of one standard deviation; where a setting is swept, a line for each series.

    A grey line steps from each group of the front to the next; they are named.
    """
    figure, every = _panels((0.2 + 0.35 * len(panels)) * WIDTH, len(panels))
    by = section.groups["series"] if section.varies else section.groups.index
    lines = {str(name): groups.index for name, groups in section.groups.groupby(by, sort=False)}
    place, named = _log_axis(every[-1, 0], x) if log else x, []
    for [axes], (label, column) in zip(every, panels.items(), strict=True):
        stats = section.spread(column).assign(x=place)
        for groups in lines.values():
            points = stats.loc[groups].sort_values("x").dropna(subset=["x", "mean"])
            style, deviation = styles[groups[0]], points["std"].fillna(0.0)
            axes.errorbar(points["x"], points["mean"], deviation, elinewidth=0.8, **style)
            for mean in stats.loc[groups].query("x.isna()")["mean"].dropna():
                axes.axhline(mean, color=style["color"], linestyle="--", linewidth=1)
        leaders = stats.loc[[*front]]
        axes.step(leaders["x"], leaders["mean"], where="post", color=MUTED, linewidth=0.8, zorder=1)
        named.append((axes, leaders))
        _accuracy_axis(axes, label)
    axes.set_xlabel(fit([xlabel], 0.7 * WIDTH, SIZE)[0])
    _legend(figure, {name: Line2D([], [], **styles[groups[0]]) for name, groups in lines.items()})
    figure.draw_without_rendering()  # only now are the axes where they will be
    for axes, leaders in named:
        _name(axes, leaders)
    return figure


def _name(axes: Axes, points: pd.DataFrame) -> None:
    """Write the name of each point, from left to right, above or below it, if it touches no other name there."""
    taken: list[Bbox] = []
    for name, (x, y) in zip(points.index, axes.transData.transform(points[["x", "mean"]]), strict=True):
        (short,) = fit([name], 0.3 * WIDTH)
        width, height = text_width(short, SMALL), 1.3 * SMALL
        for side, up in itertools.product(("left", "right"), (5, -5 - height)):
            box = Bbox.from_bounds(x if side == "left" else x - width, y + up, width, height)
            if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and not any(box.overlaps(other) for other in taken):
                point = (points.at[name, "x"], points.at[name, "mean"])
                axes.annotate(short, point, (0, up), textcoords="offset points", ha=side, va="bottom", size=SMALL)
                taken.append(box)
                break


def _log_axis(axes: Axes, x: pd.Series[float]) -> pd.Series[float]:
    """A logarithmic axis with 0 at its left end; returns where the values are on it."""
    low, high = x[x > 0].min(), x.max()
    zero = low / max(3, (high / low) ** 0.2)
    ticks = LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=12).tick_values(low, high)
    inside = [tick for tick in ticks if low <= tick <= high]
    inside = inside if len(inside) > 1 else sorted({low, high})
    axes.set_xscale("log")
    axes.set_xticks([zero, *inside] if x.min() <= 0 else inside)
    axes.xaxis.set_major_formatter(lambda tick, _: "0" if tick < low else amount(tick))
    axes.minorticks_off()
    return x.mask(x <= 0, zero)


def _matrices(section: Section) -> Figure:
    tasks, labels = len(section.first["classes_seen"]), list(section.groups.index[:MOST_MATRICES])
    full = np.array([[row + [np.nan] * (tasks - len(row)) for row in rows] for rows in section.runs["accuracy_matrix"]])
    across = 4 if len(labels) > 6 else 3
    side, down = WIDTH / (across + 0.5), math.ceil(len(labels) / across)
    figure, every = _panels(down * (side + 1.2 * SIZE) + SIZE, down, across)
    # Cividis looks the same to all kinds of colour vision; its darkest end would be lost on a dark page.
    shades = ScalarMappable(Normalize(0, 1), ListedColormap(matplotlib.colormaps["cividis"](np.linspace(0.12, 1, 256))))
    edges: Any = {"edgecolors": PAGE, "linewidth": 2.5 / tasks} if tasks <= MOST_TASKS else {"rasterized": True}
    for axes, label, title in zip(every.flat, labels, fit(labels, 0.9 * side, 0.8 * SIZE), strict=False):
        mean = full[section.runs["group"] == label].mean(axis=0)
        axes.pcolormesh(mean, cmap=shades.cmap, norm=shades.norm, **edges)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([0.5, tasks - 0.5], ["1", str(tasks)])
        axes.set_title(title, fontsize=0.8 * SIZE, loc="left")
        axes.set(aspect="equal", ylim=(tasks, 0))
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    for axes in every.flat[len(labels) :]:
        axes.set_visible(False)
    figure.colorbar(shades, ax=every, fraction=0.03, pad=0.02, aspect=30, anchor=(0, 1)).outline.set_visible(False)
    return figure


def _forgetting(section: Section, styles: Styles) -> Figure:
    stats = section.spread("forgetting")
    edges, faces = ([style[key] for style in styles.values()] for key in ("color", "markerfacecolor"))
    whiskers = {"xerr": stats["std"].fillna(0.0), "error_kw": {"ecolor": INK, "elinewidth": 0.8}}
    return _bars(stats[["mean"]], "forgetting", {"mean": faces}, edgecolor=edges, **whiskers)


def _times(section: Section) -> Figure:
    runs = pd.DataFrame(list(section.runs["seconds"]), index=section.runs["group"]).fillna(0.0) / 60
    means = runs[runs.sum().sort_values(ascending=False).index].groupby(level=0, sort=False).mean()
    colours = dict(zip(means, itertools.cycle(HUES), strict=False))
    figure = _bars(means, "minutes", colours)
    _legend(figure, {name: Patch(color=colour) for name, colour in colours.items()})
    return figure


def _bars(widths: pd.DataFrame, xlabel: str, colours: Mapping[str, Any], **options: Any) -> Figure:
    """A bar for each row, its columns one behind the other."""
    figure, [[axes]] = _panels((len(widths) * 1.9 + 4.2) * SIZE)
    starts = widths.cumsum(axis="columns") - widths
    for name, colour in colours.items():
        axes.barh(range(len(widths)), widths[name], left=starts[name], height=0.62, color=colour, **options)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_yticks(range(len(widths)), fit(widths.index, 0.4 * WIDTH))
    axes.set(ylim=(len(widths) - 0.5, -0.5), xlabel=xlabel)
    return figure


def _panels(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=columns == 1, squeeze=False)


def _accuracy_axis(axes: Axes, label: str, ticks: int = 6) -> None:
    """From 0 where the lowest value is less than half of the highest, to 1 at most."""
    axes.margins(y=0.08)
    low, high = axes.get_ylim()
    axes.set(ylim=(0 if 0 < low < high / 2 else low, min(high, 1.02)), ylabel=label.replace(", ", ",\n"))
    axes.yaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))


def _legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """A legend below the axes in as many columns as fit; the figure grows by its height."""
    room, handle = WIDTH - 2 * SIZE, 3.6 * SMALL
    labels = fit(handles, room - handle)
    widths = [text_width(label, SMALL) + handle for label in labels]
    for columns in (4, 3, 2, 1):  # filled one after the other, each as wide as its widest label
        rows = math.ceil(len(labels) / columns)
        needed = sum(max(widths[first : first + rows]) for first in range(0, len(labels), rows))
        if needed <= room:
            break
    columns = math.ceil(len(labels) / rows)
    figure.set_figheight(figure.get_figheight() + (rows * 1.65 * SMALL + SIZE) / 72)
    spacing = max(0.4, (room - needed) / columns / SMALL)
    figure.legend([*handles.values()], labels, loc="outside lower left", ncols=columns, columnspacing=spacing)


def fit(labels: Iterable[str], points: float, size: float = SMALL) -> list[str]:
    """The labels, shortened in the middle to this width in points, and numbered where two would be the same."""

    def shorten(label: str, points: float) -> str:
        lengths = range(min(len(label), int(points)), 0, -1)
        texts = (f"{label[: kept - kept // 3]}…{label[len(label) - kept // 3 :]}" for kept in lengths)
        return next((text for text in itertools.chain([label], texts) if text_width(text, size) <= points), "…")

    short = [shorten(label[:400], points) for label in labels]
    return short if len({*short}) == len(short) else distinct(shorten(label, points - 3 * size) for label in short)


def text_width(text: str, size: float) -> float:
    """The width of a text in points, in a font wider than the usual ones of a page."""
    font = FontProperties(family="DejaVu Sans", size=size)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)  # drawn by another font
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) + 0.7 * size * wide
