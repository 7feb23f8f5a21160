"""A report on result files: one HTML page that needs nothing else, its numbers as JSON, and files for a paper."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import engram
from engram.experiments.report.figures import COLOURS, METHODS, Plot, Styles, make_figures, make_styles
from engram.experiments.report.runs import Section, make_sections, read_runs
from engram.experiments.report.tables import Table, commands, environment_table, make_tables, ranges
from engram.storage import make_folder, write_file


@dataclass(frozen=True)
class Part:
    """A section with its tables and figures, which are made when they are asked for."""

    section: Section
    styles: Styles

    @cached_property
    def tables(self) -> dict[str, Table]:
        """The tables by name."""
        return make_tables(self.section)

    @cached_property
    def plots(self) -> list[Plot]:
        """The figures."""
        return make_figures(self.section, self.styles)


@dataclass(frozen=True)
class Report:
    """Tables and figures of some results."""

    parts: list[Part]
    environment: Table
    notes: list[str]

    def html(self) -> str:
        """The page. It loads nothing and runs nothing."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
        environment.filters |= {"ranges": ranges, "base64": lambda text: base64.b64encode(text.encode()).decode()}
        environment.filters["svg"] = lambda plot, name: Markup(plot.inline_svg(name))  # matplotlib escapes texts
        source = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        given = {"report": self, "version": engram.__version__, "colours": COLOURS, "commands": commands}
        return environment.from_string(source).render(given)

    def to_json(self) -> dict[str, Any]:
        """The numbers of the results tables by group."""
        sections = []
        for part in self.parts:
            groups = part.section.groups[["method", "series", "value", "seeds"]]
            numbers = groups.join(part.tables["results"].numbers.drop(columns="seeds"))
            values = json.loads(numbers.to_json(orient="index", double_precision=15))
            sections.append({"title": part.section.title, "groups": values})
        return {"schema": 1, "sections": sections, "notes": self.notes}

    def save(self, path: Path) -> None:
        """Write the page."""
        make_folder(path.parent)
        write_file(path, self.html().encode())

    def save_figures(self, folder: Path) -> list[Path]:
        """Write every figure as SVG, PDF and PNG and every table as LaTeX and CSV; returns the paths."""
        make_folder(folder)
        tables = {"environment": self.environment}
        files: dict[Path, bytes] = {}
        for part in self.parts:
            tables |= {f"{part.section.name}-{name}": table for name, table in part.tables.items()}
            for plot in part.plots:
                name = f"{part.section.name}-{plot.name}"
                files |= {folder / f"{name}.{kind}": plot.save(kind) for kind in ("svg", "pdf", "png")}
        for name, table in tables.items():
            files |= {folder / f"{name}.tex": table.latex.encode(), folder / f"{name}.csv": table.csv.encode()}
        for path, content in files.items():
            write_file(path, content)
        return list(files)


def make_report(places: Sequence[Path]) -> Report:
    """A report on the results in these folders and files."""
    runs, suites, notes = read_runs(places)
    methods = [*METHODS, *sorted({*runs["method"]} - {*METHODS})]
    parts = [Part(section, make_styles(section, methods)) for section in make_sections(runs, suites, notes)]
    return Report(parts, environment_table(runs), list(dict.fromkeys(notes)))
