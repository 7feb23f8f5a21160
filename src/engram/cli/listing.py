"""`engram methods` and `engram datasets`: what there is, one line each."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def methods(json: Json = False) -> None:
    """List the methods, and what each keeps of old classes."""
    from engram.methods import METHODS

    rows = [{"name": name, "keeps": entry.keeps, "summary": entry.summary} for name, entry in METHODS.items()]
    show("methods", rows, json)


def datasets(json: Json = False) -> None:
    """List the data sets."""
    from engram.data import DATASETS

    show("datasets", [{"name": name, "summary": entry.description} for name, entry in DATASETS.items()], json)


def show(kind: str, rows: list[dict[str, str]], json: bool) -> None:
    """One line per row, or all of them as one JSON object."""
    if json:
        typer.echo(json_format.dumps({kind: rows}))
        return
    widths = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    for row in rows:
        typer.echo("  ".join(f"{value:{widths[name]}}" for name, value in row.items()).rstrip())
