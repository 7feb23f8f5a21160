"""The commands. Heavy imports happen inside commands, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

import engram
from engram.cli import (
    edit,
    evaluate,
    export,
    inspect,
    learn,
    listing,
    predict,
    report,
    run,
    serve,
    suite,
)

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


app.command("run")(run.run)
app.command("methods")(listing.methods)
app.command("datasets")(listing.datasets)
app.command("networks")(listing.networks)
app.command("suites")(listing.suites)
app.command("suite")(suite.suite)
app.command("report")(report.report)
app.command("learn")(learn.learn)
app.command("predict")(predict.predict)
app.command("evaluate")(evaluate.evaluate)
app.command("export")(export.export)
app.command("inspect")(inspect.inspect)
app.command("verify")(inspect.verify)
app.command("forget")(edit.forget)
app.command("rename")(edit.rename)
app.command("merge")(edit.merge)
app.command("rollback")(edit.rollback)
app.command("serve")(serve.serve)
