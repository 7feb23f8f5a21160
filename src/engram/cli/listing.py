"""`engram methods`, `engram datasets` and `engram networks`: what there is, one line each."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import typer

from engram.cli.options import Json


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="METHOD", help="Of this one, list the settings and their defaults.")
    ] = None,
    json: Json = False,
) -> None:
    """List the methods, and what each keeps of old classes; or all settings of one."""
    from engram.methods import METHODS, make

    if name is not None:
        learner = make(name)
        settings = learner.settings()
        if json:
            typer.echo(json_format.dumps({"method": name, "settings": settings}))
            return
        show("settings", [{"name": key, "default": _said(value)} for key, value in settings.items()], json)
        typer.echo("These hold where the preset does not say otherwise. docs/guide.md tells what they do.", err=True)
        return
    rows = [{"name": name, "keeps": entry.keeps, "summary": entry.summary} for name, entry in METHODS.items()]
    show("methods", rows, json)


def datasets(json: Json = False) -> None:
    """List the data sets."""
    from engram.data import DATASETS

    show("datasets", [{"name": name, "summary": entry.description} for name, entry in DATASETS.items()], json)


def networks(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|hf:OWNER/NAME|FOLDER", help="Only this one; nothing is downloaded.")
    ] = None,
    json: Json = False,
) -> None:
    """List the networks: parameters, d, input size, where the weights come from, licence, whether they are here."""
    from engram.network import describe_network
    from engram.network import networks as all_networks

    rows = all_networks() if name is None else [describe_network(name)]
    if json:
        typer.echo(json_format.dumps({"networks": rows}))
        return
    show("networks", [_network_row(row) for row in rows], json)
    if name is not None:
        return
    typer.echo(
        "Also: hf:OWNER/NAME, a vision backbone of the Hugging Face hub (extra: hub), or a local folder in its layout; "
        "from Python, your own torch.nn.Module.",
        err=True,
    )


def _network_row(row: dict[str, Any]) -> dict[str, str]:
    millions = f"{row['parameters'] / 1e6:.1f} M" if row["parameters"] else "–"
    where = row["weights"] + (f", {row['licence']}" if row["licence"] else "")
    return {
        "name": row["name"],
        "parameters": millions,
        "dimension": f"d = {row['dimension'] or ('inputs' if row['name'] == 'identity' else '?')}",
        "size": f"{row['input_size']} px" if row["input_size"] else "any size",
        "offline": "here" if row["offline"] else "not here",
        "weights": f"{row['summary']}; weights: {where}",
    }


def _said(value: object) -> str:
    """A value as --set takes it."""
    if isinstance(value, list):
        return ",".join(map(_said, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def show(kind: str, rows: list[dict[str, str]], json: bool) -> None:
    """One line per row, or all of them as one JSON object."""
    if json:
        typer.echo(json_format.dumps({kind: rows}))
        return
    widths = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    for row in rows:
        typer.echo("  ".join(f"{value:{widths[name]}}" for name, value in row.items()).rstrip())
