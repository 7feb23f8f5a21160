"""`engram rename`, `engram merge` and `engram rollback`: changes of a model that can be undone."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.options import Json, ModelPath
from engram.text import printable

if TYPE_CHECKING:
    from engram.model import EditResult


def rename(
    model: ModelPath,
    old: Annotated[str, typer.Argument(metavar="OLD", help="The class, by its present name.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name to give it.")],
    json: Json = False,
) -> None:
    """Give a class another name. The history and earlier generations still have the old one."""
    from engram.model import ModelFolder
    from engram.model import rename as rename_class

    done = rename_class(ModelFolder(model), old, new)
    _show(done, f"'{printable(done.details['from'])}' is now called '{printable(done.details['to'])}'", model, json)


def merge(
    model: ModelPath,
    name: Annotated[str, typer.Argument(metavar="CLASS", help="The class that is joined into another.")],
    into: Annotated[str, typer.Argument(metavar="INTO", help="The class that answers for both from then on.")],
    json: Json = False,
) -> None:
    """Make one class of two, such as two names of one thing.

    As much is kept as of the larger. `engram rollback` brings the two back.
    """
    from engram.model import ModelFolder
    from engram.model import merge as merge_classes

    done = merge_classes(ModelFolder(model), name, into)
    kept = f"{done.details['features']:,} vectors and {done.details['images']:,} images are kept of both"
    _show(done, f"'{printable(done.details['class'])}' is now '{printable(done.details['into'])}'; {kept}", model, json)


def rollback(
    model: ModelPath,
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", help="A generation; by default the one the present came from.")
    ] = None,
    json: Json = False,
) -> None:
    """Put an earlier generation of a model in use again. None is lost: return to a later one with --to.

    A damaged current.json is repaired as well. `engram inspect` lists the generations.
    """
    from engram.model import ModelFolder
    from engram.model import rollback as roll_back

    done = roll_back(ModelFolder(model), to)
    before = done.details["from"]
    was = "again; current.json was damaged, and is mended" if before is None else f"instead of {before}"
    was = "as it was before" if before == done.generation else was
    _show(done, f"generation {done.generation} of {done.details['created']} is in use {was}", model, json)


def _show(done: EditResult, what: str, model: Path, json: bool) -> None:
    if json:
        typer.echo(json_format.dumps(done.to_json()))
        return
    classes = "1 class" if len(done.classes) == 1 else f"{len(done.classes)} classes"
    typer.echo(what)
    typer.echo(f"{printable(model)}, generation {done.generation}: {classes}")
