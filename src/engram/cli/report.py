"""`engram report`: tables and figures of results, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.options import Json
from engram.cli.output import print_json
from engram.errors import UsageError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Folders with results at any depth, or result files.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="A folder for every figure (SVG, PDF, PNG) and table (LaTeX, CSV).")
    ] = None,
    json: Json = False,
) -> None:
    """Make one page with tables and figures of results. It needs nothing but a browser."""
    if out.is_dir() or out.suffix == ".json":  # results are .json: none is overwritten by mistake
        raise UsageError(f"The report cannot be written to '{out}'. Name a file, such as -o report.html.")
    from engram.experiments.report import make_report

    made = make_report(runs)
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    made.save(out)
    files = [] if figures is None else made.save_figures(figures)
    if json:
        print_json({"report": str(out), **made.to_json()})
        return
    typer.echo(f"report: {out}")
    if figures is not None:
        typer.echo(f"figures and tables: {len(files)} files in {figures}")
