"""What all figures share: their look, ticks, legends, and labels that fit."""

from __future__ import annotations

import functools
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from engram.experiments.report.appearance import INK, MUTED, PAPER, RULE, Style


@dataclass(frozen=True)
class Look:
    """The size of a figure and of its text, in points, and whether text stays text."""

    width: float
    size: float
    paper: str  # the background
    text_as_text: bool


PAGE = Look(width=425, size=10, paper="none", text_as_text=True)
COLUMN = Look(width=245, size=7, paper=PAPER.light, text_as_text=False)  # a column of a paper with two


@contextmanager
def drawing(look: Look) -> Iterator[None]:
    """The settings of matplotlib for as long as a figure is made and saved, whatever a user's own are."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name may hold characters that the font lacks. A browser shows them; elsewhere a box does.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_settings(look))
        yield


def _settings(look: Look) -> Any:  # a mapping; matplotlib has a type of its own for its keys
    return {
        "text.parse_math": False,  # a name may hold $
        "text.usetex": False,
        "svg.fonttype": "none" if look.text_as_text else "path",
        "svg.hashsalt": "engram",  # ids that are the same every time
        "pdf.fonttype": 42,  # whole TrueType fonts, embedded
        "font.family": "DejaVu Sans",
        "font.size": look.size,
        "text.color": INK.light,
        "axes.labelcolor": MUTED.light,
        "axes.edgecolor": MUTED.light,
        "axes.linewidth": 0.08 * look.size,
        "axes.facecolor": "none",
        "figure.facecolor": look.paper,
        "savefig.facecolor": look.paper,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": RULE.light,
        "grid.linewidth": 0.07 * look.size,
        **{f"{axis}tick.{what}": value for axis in "xy" for what, value in _ticks(look).items()},
        "lines.linewidth": 0.17 * look.size,
        "lines.markersize": 0.55 * look.size,
        "legend.frameon": False,
        "legend.handlelength": 2.4,
        "legend.handletextpad": 0.7,
        "legend.labelspacing": 0.6,
        "legend.borderaxespad": 0.3,
        "legend.borderpad": 0.2,
    }


def _ticks(look: Look) -> dict[str, Any]:
    return {"color": MUTED.light, "labelsize": 0.9 * look.size, "major.size": 0.3 * look.size, "major.width": 0.6}


def new_figure(look: Look, height: float) -> Figure:
    """An empty figure of the look's width and so many points high."""
    pad = 0.4 * look.size / 72
    layout = ConstrainedLayoutEngine(w_pad=pad, h_pad=pad, hspace=0.03, wspace=0.03)
    return Figure(figsize=(look.width / 72, height / 72), dpi=72, layout=layout)


def text_width(words: str, size: float) -> float:
    """How wide a text may become, in points: as the widest of the usual fonts has it."""
    width = float(text_to_path.get_text_width_height_descent(words, _font(size), ismath=False)[0])
    # Characters of double width are drawn by another font, which is not measured here.
    return width + 0.7 * size * sum(unicodedata.east_asian_width(each) in "WF" for each in words)


@functools.cache
def _font(size: float) -> FontProperties:
    return FontProperties(family="DejaVu Sans", size=size)


def fitted(words: str, points: float, size: float) -> str:
    """The text, or as much of its beginning and end as fits so many points, with an ellipsis between."""
    words = words[:400]
    if text_width(words, size) <= points:
        return words
    for kept in range(min(len(words) - 1, int(points / (0.2 * size))), 1, -1):
        tail = kept // 3
        short = words[: kept - tail] + "…" + words[len(words) - tail :]
        if text_width(short, size) <= points:
            return short
    return "…"


def fitted_all(labels: Sequence[str], points: float, size: float) -> list[str]:
    """Labels that fit, with a number where two would look the same."""
    short = [fitted(label, points, size) for label in labels]
    return [
        label if short.count(label) == 1 else f"{fitted(label, points - 2.5 * size, size)} ({number})"
        for number, label in enumerate(short, start=1)
    ]


def line_style(style: Style) -> dict[str, Any]:
    """What `plot` needs to know of a style."""
    return {
        "color": style.colour.light,
        "marker": style.marker,
        "linestyle": (0, style.dash) if style.dash else "-",
        "markerfacecolor": PAPER.light if style.hollow else style.colour.light,
        "markeredgecolor": style.colour.light,
        "markeredgewidth": 0.9,
    }


def legend(figure: Figure, look: Look, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend below the axes in as many columns as fit; the figure grows by its height."""
    size = 0.9 * look.size
    handle = 3.6 * size
    room = look.width - 2 * look.size
    short = fitted_all(labels, room - handle, size)
    widest = max(text_width(label, size) for label in short) + handle
    columns = max(1, min(int(room // widest), len(short), 4))
    rows = math.ceil(len(short) / columns)
    columns = math.ceil(len(short) / rows)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + (rows * 1.65 * size + look.size) / 72)
    spacing = (room - columns * widest) / columns / size + 0.4
    figure.legend(handles, short, loc="outside lower left", ncols=columns, fontsize=size, columnspacing=spacing)


def style_handles(styles: Sequence[Style], lines: bool = True) -> list[Line2D]:
    """A short line of each style for a legend, or its marker alone."""
    return [Line2D([], [], **line_style(style) | ({} if lines else {"linestyle": "none"})) for style in styles]


def plain(value: float) -> str:
    """A tick's number, without the zero before the point: .25, 1, 40."""
    shown = f"{value:,.10g}"
    return shown.replace("0.", ".", 1) if shown.startswith(("0.", "-0.")) else shown


def set_ticks(axes: Axes, ticks: Sequence[tuple[float, str]], points: float, size: float) -> None:
    """Ticks along x, which is about `points` long, as (place, label); those whose labels would touch are left out."""
    low, high = axes.get_xlim()
    kept: list[tuple[float, str]] = []
    end = -math.inf
    for place, label in sorted(ticks):
        half = text_width(label, size) / 2
        middle = (place - low) / (high - low) * points
        if middle - half > end + 0.6 * size:
            kept.append((place, label))
            end = middle + half
    axes.set_xticks([place for place, _ in kept], [label for _, label in kept])


def set_accuracy_ticks(axes: Axes, most: int = 6) -> None:
    """Ticks along y, as few and round as can be."""
    axes.yaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: plain(value))


@dataclass(frozen=True)
class Scale:
    """Where values lie along an axis: linear, or logarithmic with zero at the left edge, apart."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]  # (place, label)
    edge: float | None  # where zero is, if it is at the edge


def log_scale(values: Sequence[float], at_values: bool, zero: str = "0") -> Scale:
    """A logarithmic scale for values of which some may be 0; ticks at the values or at round numbers between."""
    positive = sorted({value for value in values if value > 0})
    low, high = math.log10(positive[0]), math.log10(positive[-1])
    edge = low - max(0.5, 0.22 * (high - low)) if min(values) <= 0 else None
    ticks = positive if at_values else _round_numbers(positive[0], positive[-1])
    marks = [(math.log10(tick), plain(tick)) for tick in ticks]

    def place(value: float) -> float:
        return math.log10(value) if value > 0 else float(edge if edge is not None else low)

    return Scale(place, [(edge, zero), *marks] if edge is not None else marks, edge)


def linear_scale(values: Sequence[float]) -> Scale:
    """A linear scale with a tick at each value."""
    return Scale(lambda value: value, [(value, plain(value)) for value in sorted(set(values))], None)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten in a range; the powers alone where it is wide, one number where it is narrow."""
    steps = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [step * 10.0**power for power in powers for step in steps]
    inside = [number for number in numbers if low * 0.999 <= number <= high * 1.001]
    return inside if len(inside) > 1 else [float(f"{low:.2g}"), *([float(f"{high:.2g}")] if high > low else [])]
