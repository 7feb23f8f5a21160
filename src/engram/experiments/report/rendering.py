"""Figures as files, and as SVG that lives in a page: in the page's colours and with ids of its own."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping

from matplotlib.figure import Figure

from engram.experiments.report.drawing import COLUMN, PAGE, Look, drawing
from engram.experiments.report.plot import Plot

FORMATS = ("svg", "pdf", "png")
NO_DATES = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}, "png": {}}
SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


def files(plot: Plot) -> dict[str, bytes]:
    """The figure for a paper's column, in each of FORMATS."""
    made = {}
    with drawing(COLUMN):
        figure = _laid_out(plot, COLUMN)
        for kind in FORMATS:
            output = io.BytesIO()
            figure.savefig(output, format=kind, dpi=300, metadata=NO_DATES[kind])
            made[kind] = output.getvalue()
    return made


def _laid_out(plot: Plot, look: Look) -> Figure:
    """The figure with everything in its place, once: matplotlib would work it out twice for every file."""
    figure = plot.draw(look)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")
    return figure


def page_svg(plot: Plot, name: str, colours: Mapping[str, str]) -> str:
    """The figure as an SVG element of an HTML page; `name` begins all its ids, `colours` become CSS variables.

    No namespace is written: inside HTML none is needed, and so the page mentions no address at all.
    """
    output = io.BytesIO()
    with drawing(PAGE):
        _laid_out(plot, PAGE).savefig(output, format="svg", metadata=NO_DATES["svg"])
    root = ElementTree.fromstring(output.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{SVG}style", f"{SVG}metadata"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        _rewrite(element, name, colours)
    _introduce(root, plot, name)
    return ElementTree.tostring(root, encoding="unicode")


def _introduce(root: ElementTree.Element, plot: Plot, name: str) -> None:
    """Give the drawing a name and a description, for those who hear it."""
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    title = ElementTree.Element("title", {"id": f"{name}-title"})
    title.text = plot.title
    description = ElementTree.Element("desc", {"id": f"{name}-desc"})
    description.text = f"{plot.caption} The numbers are in the table below it."
    root[:0] = [title, description]


def _rewrite(element: ElementTree.Element, name: str, colours: Mapping[str, str]) -> None:
    attributes = element.attrib
    if "id" in attributes:
        attributes["id"] = f"{name}-{attributes['id']}"
    if LINK in attributes:
        target = attributes.pop(LINK)
        attributes["href"] = f"#{name}-{target[1:]}" if target.startswith("#") else target
    for key in ("clip-path", "style"):
        if key in attributes:
            attributes[key] = attributes[key].replace("url(#", f"url(#{name}-")
    if "style" in attributes:
        attributes["style"] = _restyle(attributes["style"], element.tag == "text", colours)
    for key in ("d", "x", "y", "transform", "points"):
        if key in attributes:
            attributes[key] = re.sub(r"-?\d+\.\d{3,}", _rounded, attributes[key])


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _restyle(style: str, is_text: bool, colours: Mapping[str, str]) -> str:
    """Colours as variables, so that they follow the page; text without a font, so that it has the page's."""
    if is_text:
        size = re.search(r"([\d.]+)px", style)
        kept = [part.strip() for part in style.split(";") if part.strip().startswith(("text-anchor", "fill"))]
        style = "; ".join([f"font-size: {size[1] if size else 10}px", *kept])
    return re.sub(r"#[0-9a-f]{6}", lambda found: variable(found[0]) if found[0] in colours else found[0], style)


def variable(colour: str) -> str:
    """The CSS variable that stands for a colour."""
    return f"var(--c{colour[1:]})"


def colour_rules(colours: Mapping[str, str], dark: bool) -> str:
    """What the variables are on light paper or on dark."""
    return "".join(f"--c{light[1:]}:{dark_one if dark else light};" for light, dark_one in sorted(colours.items()))
