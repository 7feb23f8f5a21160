"""`Report`: what some results say, as one HTML page that needs nothing else, as JSON, and as files for a paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

import engram
from engram.experiments.aggregate import Group, Spread, measured
from engram.experiments.report import rendering, text
from engram.experiments.report.appearance import (
    INK,
    MUTED,
    PAPER,
    RULE,
    Style,
    base_styles,
    colours_of,
    group_styles,
)
from engram.experiments.report.commands import commands, source_flags
from engram.experiments.report.figures import plots
from engram.experiments.report.plot import Plot
from engram.experiments.report.reading import read
from engram.experiments.report.sections import Section, sections
from engram.experiments.report.tables import (
    MEASURES,
    Table,
    as_csv,
    as_latex,
    cell_text,
    environment_table,
    in_blocks,
    results_table,
    settings_tables,
)
from engram.experiments.report.words import along_values, findings
from engram.storage import make_folder, writing

SCHEMA = 1


@dataclass(frozen=True)
class Part:
    """One section, worked out."""

    section: Section
    styles: list[Style]
    findings: list[str]
    values: list[str]
    results: Table
    apart: Table | None
    common: Table
    plots: list[Plot]

    @property
    def tables(self) -> list[Table]:
        """All its tables, those of the figures included."""
        settings = [table for table in (self.apart, self.common) if table is not None]
        return [self.results, *settings, *(plot.table for plot in self.plots)]


@dataclass(frozen=True)
class Report:
    """What some results say."""

    title: str
    parts: list[Part]
    environment: Table
    notes: list[str]

    def html(self) -> str:
        """The page, whole in itself: it loads nothing and runs nothing."""
        return _template().render(
            report=self,
            count=sum(len(group.results) for part in self.parts for group in part.section.groups),
            version=engram.__version__,
            stylesheet=Markup(_stylesheet(self.parts)),
            drawn=_drawn(self.parts),
            commands=commands,
            source_flags=source_flags,
        )

    def to_json(self) -> dict[str, Any]:
        """The numbers and the words, as plain values."""
        return {"schema": SCHEMA, "sections": [_plain(part) for part in self.parts], "notes": self.notes}

    def save(self, path: Path) -> None:
        """Write the page, atomically."""
        make_folder(path.parent)
        _write(path, self.html())

    def save_figures(self, folder: Path) -> list[Path]:
        """Write every figure as SVG, PDF and PNG and every table as LaTeX and CSV; gives the files."""
        make_folder(folder)
        files = []
        for part in self.parts:
            for plot in part.plots:
                for kind, content in rendering.files(plot).items():
                    files.append(folder / f"{part.section.name}-{plot.name}.{kind}")
                    _write(files[-1], content)
            for table in part.tables:
                files += _write_table(table, folder, f"{part.section.name}-{table.name}")
        return [*files, *_write_table(self.environment, folder, self.environment.name)]


def make_report(places: Sequence[Path]) -> Report:
    """A report on the results in these folders and files. Only result files are read, never a learner."""
    found = read(places)
    made = sections(found)
    everywhere = base_styles([group for section in made for group in section.groups])
    parts = [_part(section, group_styles(section.groups, everywhere)) for section in made]
    datasets = list(dict.fromkeys(section.kind.dataset for section in made))
    title = f"Learning class by class: {text.listed(datasets)}"
    return Report(title, parts, environment_table(made), list(dict.fromkeys(found.notes)))


def _part(section: Section, styles: list[Style]) -> Part:
    apart, common = settings_tables(section)
    values = along_values(section) if section.varies else []
    return Part(
        section=section,
        styles=styles,
        findings=findings(section),
        values=values,
        results=results_table(section),
        apart=apart,
        common=common,
        plots=plots(section, styles),
    )


def _plain(part: Part) -> dict[str, Any]:
    section = part.section
    return {
        "title": section.title,
        "suite": section.suite.suite if section.suite else None,
        "dataset": section.kind.dataset,
        "classes_seen": list(section.kind.classes_seen),
        "groups": [_plain_group(group) for group in section.groups],
        "findings": [text.unmarked(sentence) for sentence in [*part.values, *part.findings]],
        "notes": list(part.results.notes),
    }


def _plain_group(group: Group) -> dict[str, Any]:
    def plain(spread: Spread | None) -> dict[str, float | None] | None:
        return None if spread is None else spread._asdict()

    numbers = {measure.number: plain(measured(group, measure.number)) for measure in MEASURES}
    names = {"label": group.label, "series": group.series, "method": group.method, "value": group.value}
    return {**names, "seeds": list(group.seeds), **numbers, "top5": plain(measured(group, "top5"))}


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"cell": cell_text, "in_blocks": in_blocks}
    environment.filters |= {"integers": text.integers, "sentence": _sentence}
    source = resources.files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    return environment.from_string(source)


def _sentence(sentence: str) -> Markup:
    """A sentence as HTML, with its names set apart."""
    return Markup(str(escape(sentence)).replace(text.OPENING, "<b><bdi>").replace(text.CLOSING, "</bdi></b>"))


def _stylesheet(parts: Sequence[Part]) -> str:
    """The style sheet, with the colours in use on light paper and on dark."""
    drawn = colours_of([style for part in parts for style in part.styles])
    names = {"ink": INK, "muted": MUTED, "rule": RULE, "paper": PAPER}
    light = "".join(f"--{name}:{colour.light};" for name, colour in names.items())
    dark = "".join(f"--{name}:{colour.dark};" for name, colour in names.items())
    rules = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return (
        f":root{{{light}{rendering.colour_rules(drawn, dark=False)}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}{rendering.colour_rules(drawn, dark=True)}}}}}\n"
        f"{rules}"
    )


def _drawn(parts: Sequence[Part]) -> Callable[[Part, Plot], Markup]:
    colours = colours_of([style for part in parts for style in part.styles])

    def draw(part: Part, plot: Plot) -> Markup:
        # Markup: ElementTree has escaped every text in it.
        return Markup(rendering.page_svg(plot, f"{part.section.name}-{plot.name}", colours))

    return draw


def _write(path: Path, content: str | bytes) -> None:
    with writing(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def _write_table(table: Table, folder: Path, name: str) -> list[Path]:
    files = {folder / f"{name}.tex": as_latex(table), folder / f"{name}.csv": as_csv(table)}
    for path, content in files.items():
        _write(path, content)
    return list(files)
