"""How groups look: a colour that each method keeps everywhere, and a marker and a dash for who sees no colour."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engram.experiments.aggregate import Group


class Colour(NamedTuple):
    """The same colour on light paper and on dark, as #rrggbb."""

    light: str
    dark: str


INK = Colour("#1d2126", "#e7e9ec")
MUTED = Colour("#5a626c", "#a3abb5")
RULE = Colour("#d8dce1", "#343a42")
PAPER = Colour("#ffffff", "#15181c")

# After Okabe and Ito's palette for all kinds of colour vision, with every colour at least 3 : 1 against its paper.
HUES: Mapping[str, Colour] = {
    "blue": Colour("#0a6cb0", "#4aa8ee"),
    "vermilion": Colour("#c9510c", "#ff8e57"),
    "green": Colour("#0b8560", "#35c596"),
    "gold": Colour("#a07500", "#e3b341"),
    "purple": Colour("#6b4fbb", "#ab95f7"),
    "pink": Colour("#b9488c", "#f190c6"),
    "teal": Colour("#147f94", "#52c7da"),
    "grey": Colour("#6d7680", "#98a2ad"),
    "ink": Colour("#33383e", "#d5d9de"),
}

MOST_SHADES = 5  # of one colour
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d", "*")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 1.5), (8, 2, 1.5, 2, 1.5, 2))


@dataclass(frozen=True)
class Style:
    """How one group is drawn."""

    colour: Colour
    marker: str
    dash: tuple[float, ...]  # lengths of strokes and gaps in line widths; none: solid
    hollow: bool = False  # the marker is an outline


# A method and the one it derives from share a hue; the one without the idea is dashed and hollow.
KNOWN: Mapping[str, Style] = {
    "features": Style(HUES["blue"], "o", ()),
    "features-unadapted": Style(HUES["blue"], "o", (5, 2), hollow=True),
    "hybrid": Style(HUES["vermilion"], "D", ()),
    "engram": Style(HUES["ink"], "p", ()),
    "gamma-lwf": Style(HUES["green"], "^", ()),
    "lwf": Style(HUES["green"], "^", (5, 2), hollow=True),
    "gamma-icarl": Style(HUES["gold"], "s", ()),
    "icarl": Style(HUES["gold"], "s", (5, 2), hollow=True),
    "eeil": Style(HUES["purple"], "P", (6, 2, 1.5, 2)),
    "lucir": Style(HUES["pink"], "v", (3, 1.5)),
    "bic": Style(HUES["teal"], "X", ()),
    "bic-uncorrected": Style(HUES["teal"], "X", (5, 2), hollow=True),
    "finetune": Style(HUES["grey"], "<", (1.5, 1.5)),
    "joint": Style(HUES["grey"], "*", (1.5, 1.5), hollow=True),
}

# By phase of a run, for bars that are stacked: neighbours differ in lightness too.
PHASES: Mapping[str, Colour] = {
    "train": Colour("#2f4b6e", "#5f8fc4"),
    "fine-tune": HUES["teal"],
    "correct": HUES["pink"],
    "adapt": HUES["vermilion"],
    "extract": Colour("#8fa9c4", "#35526f"),
    "herd": HUES["gold"],
    "classify": HUES["purple"],
    "measure": Colour("#b6bcc4", "#5b646e"),
}


def phase_colours(names: Sequence[str]) -> dict[str, Colour]:
    """A colour for each phase: its own, or for one that is not known the next that is free."""
    others = [name for name in names if name not in PHASES]
    free = [HUES[hue] for hue in ("green", "blue", "grey", "ink")]
    return {name: PHASES[name] if name in PHASES else free[others.index(name) % len(free)] for name in names}


def name_of_look(group: Group) -> str:
    """What a group owes its colour to: its series or its method where that is a known one, or else its series."""
    return group.method if group.series not in KNOWN and group.method in KNOWN else group.series


def base_styles(groups: Sequence[Group]) -> dict[str, Style]:
    """A style for each look: a known method's own, or else the next that is free, in alphabetical order."""
    names = {name_of_look(group) for group in groups}
    others = sorted(names - set(KNOWN))
    hues = [*HUES.values()]
    drawn = {
        name: Style(hues[index % len(hues)], MARKERS[(index + 3) % len(MARKERS)], DASHES[(index + 1) % len(DASHES)])
        for index, name in enumerate(others)
    }
    return {name: KNOWN.get(name) or drawn[name] for name in sorted(names)}


def group_styles(groups: Sequence[Group], base: Mapping[str, Style]) -> list[Style]:
    """A style for each group of a section: that of its look; where several share one, shades of its colour.

    Many shades could not be told apart: there, the hues in turn that no other has.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(name_of_look(group), []).append(index)
    styles = [base[name_of_look(group)] for group in groups]
    for indices in members.values():
        others = {style.colour for index, style in enumerate(styles) if index not in indices}
        hues = [hue for hue in HUES.values() if hue not in others] or list(HUES.values())
        for place, index in enumerate(indices if len(indices) > 1 else ()):
            style = styles[index]
            lift = place / (len(indices) - 1) - 0.5  # from -0.5, nearest the ink, to 0.5, nearest the paper
            shade = Colour(_lifted(style.colour.light, 0.3 * lift), _lifted(style.colour.dark, -0.3 * lift))
            if len(indices) > MOST_SHADES:
                shade = hues[place % len(hues)]
            styles[index] = Style(shade, MARKERS[place % len(MARKERS)], DASHES[place % len(DASHES)], style.hollow)
    return styles


def _lifted(colour: str, amount: float) -> str:
    """A colour made lighter, or darker where `amount` is negative."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    lifted = colorsys.hls_to_rgb(hue, min(1.0, max(0.0, lightness + amount)), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in lifted)


def colours_of(styles: Sequence[Style]) -> dict[str, str]:
    """For every colour that may be drawn, as on light paper, the one that takes its place on dark."""
    used = [INK, MUTED, RULE, PAPER, *PHASES.values(), *HUES.values(), *(style.colour for style in styles)]
    return {colour.light: colour.dark for colour in used}
