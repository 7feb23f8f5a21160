"""`engram methods`, `datasets`, `networks` and `suites`: what there is, one line each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from engram.cli.options import NETWORK_METAVAR, Json
from engram.cli.output import print_json, table


def methods(
    name: Annotated[str | None, typer.Argument(metavar="METHOD", help="List the settings of this method.")] = None,
    json: Json = False,
) -> None:
    """List the methods and what each stores of old classes, or the settings of one."""
    from engram.methods import METHODS, make

    if name is None:
        rows = [{"name": name, "keeps": entry.keeps, "summary": entry.summary} for name, entry in METHODS.items()]
        _print("methods", rows, json)
        return
    settings = make(name).settings()
    if json:
        print_json({"method": name, "settings": settings})
        return
    typer.echo(table([(key, _setting_text(value)) for key, value in settings.items()], overflow="none"))
    typer.echo("Presets may change these defaults. The reference of methods describes each.", err=True)


def datasets(json: Json = False) -> None:
    """List the data sets."""
    from engram.data import DATASETS

    _print("datasets", [{"name": name, "summary": entry.summary} for name, entry in DATASETS.items()], json)


def networks(
    name: Annotated[
        str | None, typer.Argument(metavar=NETWORK_METAVAR, help="Only this one; nothing is downloaded.")
    ] = None,
    json: Json = False,
) -> None:
    """List the networks: parameters, feature dimension, input size, weights, licence, whether they are available."""
    from engram.network import NETWORKS, describe_network

    rows = [describe_network(each) for each in (NETWORKS if name is None else [name])]
    if json:
        print_json({"networks": rows})
        return
    typer.echo(table([_network_row(row) for row in rows], overflow="none"))
    if name is None:
        typer.echo(
            "Also: hf:OWNER/NAME, a vision backbone of the Hugging Face hub (extra: hub), or a local folder in its "
            "layout; from Python, your own torch.nn.Module.",
            err=True,
        )


def suites(json: Json = False) -> None:
    """List the suites: tables and figures of the paper."""
    from engram.experiments.suites import SUITES

    _print("suites", [{"name": name, "summary": suite.summary} for name, suite in SUITES.items()], json)


def _network_row(row: dict[str, Any]) -> tuple[str, ...]:
    licence = f", {row['licence']}" if row["licence"] else ""
    return (
        row["name"],
        f"{row['parameters'] / 1e6:.1f} M" if row["parameters"] else "–",
        f"d = {row['dimension'] or ('inputs' if row['name'] == 'identity' else '?')}",
        f"{row['input_size']} px" if row["input_size"] else "any size",
        "here" if row["offline"] else "not here",
        f"{row['summary']}; weights: {row['weights']}{licence}",
    )


def _setting_text(value: object) -> str:
    """A value as --set takes it."""
    if isinstance(value, list):
        return ",".join(map(_setting_text, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print(kind: str, rows: list[dict[str, str]], json: bool) -> None:
    """One line per row, or all rows as one JSON object."""
    if json:
        print_json({kind: rows})
    else:
        typer.echo(table([list(row.values()) for row in rows], overflow="none"))
