"""`engram forget`: classes removed from a model, for good."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.options import Json, ModelPath
from engram.cli.words import counted, megabytes
from engram.errors import UsageError
from engram.text import printable

if TYPE_CHECKING:
    from engram.model import ForgetPreview

STAYS = (
    "There is no way back. The network's weights stay as they are: what they learned from these pictures is not "
    "unlearned. Copies and exports of the model elsewhere are not touched."
)


def forget(
    model: ModelPath,
    classes: Annotated[list[str], typer.Argument(metavar="CLASS...", help="The classes to forget.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove classes from a model, with every earlier generation. There is no way back.

    All that is kept of them goes, and their names; the classifier of the others is made anew. The network's weights are
    not unlearned.
    """
    from engram.model import ModelFolder, preview_forget
    from engram.model import forget as forget_classes

    folder = ModelFolder(model)
    if not yes:
        what = _what_goes(preview_forget(folder, classes), model)
        if not asked_by_a_person():
            raise UsageError(f"{what} {STAYS} To do so without being asked, add --yes.")
        typer.echo(f"{what} {STAYS}\nForget? [y/N] ", err=True, nl=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            typer.echo("Nothing was changed.", err=True)
            raise typer.Exit(1)
    try:
        done = forget_classes(folder, classes)
    except KeyboardInterrupt:
        again = f"engram verify {shlex.quote(str(model))}"
        typer.echo(f"Stopped. If it was begun, this finishes it: {again}", err=True)
        raise typer.Exit(130) from None
    if json:
        typer.echo(json_format.dumps(done.to_json()))
        return
    typer.echo(f"forgotten: {_quoted(done.details['forgotten'])}; {megabytes(done.details['bytes'])} less is kept")
    if done.details["not_in_use"]:
        typer.echo(_only_elsewhere(done.details["not_in_use"]))
    typer.echo(f"{printable(model)}, generation {done.generation}, the only one: {counted(len(done.classes), 'class')}")


def asked_by_a_person() -> bool:
    """Whether someone is there to answer."""
    return sys.stdin is not None and sys.stdin.isatty()


def _what_goes(removed: ForgetPreview, model: Path) -> str:
    kept = [counted(removed.features, "stored vector"), counted(removed.images, "stored image")]
    generations = ", ".join(map(str, removed.generations))
    return (
        f"This removes from {printable(model)} what is kept of {_quoted(removed.names)}: {kept[0]} and {kept[1]} "
        f"({megabytes(removed.bytes)}), their rows of the head and of the classifier, and their names; the details of "
        f"the history, of all classes; and every generation there is now ({generations})."
        + (f" {_only_elsewhere(removed.not_in_use)}" if removed.not_in_use else "")
    )


def _only_elsewhere(names: Sequence[str]) -> str:
    return (
        f"Only in generations that are not in use, and gone with these: {_quoted(names)}. "
        "The classes in use stay, be one of them the same by another name."
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{printable(name)}'" for name in names)
