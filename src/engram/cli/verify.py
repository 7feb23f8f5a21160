"""`engram verify`: whether a model is whole."""

from __future__ import annotations

import json as json_format

import typer

from engram.cli.options import Json, ModelPath
from engram.cli.words import counted, megabytes
from engram.text import printable


def verify(model: ModelPath, json: Json = False) -> None:
    """Check every file of a model against its checksum, and whether what it says agrees with itself.

    This finds damage, not forgery. Nothing is loaded that can run code. What a killed writer left is removed. Exit 1 if
    anything is wrong.
    """
    from engram.model import ModelFolder
    from engram.model import verify as verify_model

    found = verify_model(ModelFolder(model))
    if json:
        typer.echo(json_format.dumps(found.to_json()))
    elif found.intact:
        generations = counted(len(found.generations), "generation")
        typer.echo(f"whole: {generations}, number {found.in_use} in use, {megabytes(found.bytes)}")
        typer.echo("Checksums find damage, not forgery: who can write the folder can write those too.")
    for problem in found.problems if not json else ():
        typer.echo(printable(problem))
    raise typer.Exit(0 if found.intact else 1)
