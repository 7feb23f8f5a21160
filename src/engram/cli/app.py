"""The commands. Heavy imports happen inside commands, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

import engram
from engram.cli import edit, evaluate, export, inspect, learn, listing, predict, report, run, serve, suite, watch

app = typer.Typer(
    help="Teach an image classifier new classes over time, without keeping the images of the old ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"engram {engram.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `engram` itself."""


for function in (
    *(run.run, listing.methods, listing.datasets, listing.networks, listing.suites, suite.suite, report.report),
    *(learn.learn, predict.predict, evaluate.evaluate, export.export, inspect.inspect, inspect.verify),
    *(edit.forget, edit.rename, edit.merge, edit.rollback, serve.serve, watch.watch),
):
    app.command()(function)
