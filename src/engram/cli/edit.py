"""`engram rename`, `merge`, `rollback` and `forget`: changes to a model that need no images."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import engram
from engram.cli.options import Json, ModelPath
from engram.cli.output import Display, print_json
from engram.errors import UsageError
from engram.text import format_bytes, plural, printable

if TYPE_CHECKING:
    from engram.model import EditResult, ForgetPreview


def rename(
    model: ModelPath,
    old: Annotated[str, typer.Argument(metavar="OLD", help="The present name of the class.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    json: Json = False,
) -> None:
    """Rename a class. The history and earlier versions keep the old name."""
    with Display():
        done = engram.model.rename(engram.model.ModelFolder(model), old, new)
    _print(done, f"'{printable(done.details['from'])}' is now '{printable(done.details['to'])}'", model, json)


def merge(
    model: ModelPath,
    name: Annotated[str, typer.Argument(metavar="CLASS", help="The class to merge into another.")],
    into: Annotated[str, typer.Argument(metavar="INTO", help="The class that stands for both from now on.")],
    json: Json = False,
) -> None:
    """Merge two classes, such as two names of one thing. `engram rollback` undoes it."""
    with Display():
        done = engram.model.merge(engram.model.ModelFolder(model), name, into)
    stored = f"{plural(done.details['features'], 'stored feature')} and {plural(done.details['images'], 'exemplar')}"
    merged = f"'{printable(done.details['class'])}' is merged into '{printable(done.details['into'])}'"
    _print(done, f"{merged}: {stored}", model, json)


def rollback(
    model: ModelPath,
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", help="A version. Default: the parent of the current one.")
    ] = None,
    json: Json = False,
) -> None:
    """Make an earlier version current. None is lost: return to a later one with --to.

    This also repairs a damaged current.json. `engram inspect` lists the versions.
    """
    with Display():
        done = engram.model.rollback(engram.model.ModelFolder(model), to)
    before = done.details["from"]
    how = f"; it was {before}" if before not in (None, done.version) else ""
    how = "; current.json was damaged and is repaired" if before is None else how
    _print(done, f"version {done.version} of {done.details['created']} is current{how}", model, json)


def forget(
    model: ModelPath,
    classes: Annotated[list[str], typer.Argument(metavar="CLASS...", help="The classes to forget.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: Json = False,
) -> None:
    """Remove classes from a model, with every earlier version. This cannot be undone.

    Their stored features, exemplars and names are deleted, and the classifier is fitted again. The network's weights
    are not unlearned.
    """
    folder = engram.model.ModelFolder(model)
    if not yes:
        _confirm(_warning(engram.model.preview_forget(folder, classes), model))
    try:
        with Display():
            done = engram.model.forget(folder, classes)
    except KeyboardInterrupt:
        command = f"engram verify {shlex.quote(str(model))}"
        typer.echo(f"Interrupted. To see whether the classes were forgotten and files are left: {command}", err=True)
        raise typer.Exit(130) from None
    lines = [f"forgotten: {_quoted(done.details['forgotten'])}; {format_bytes(done.details['bytes'])} less memory"]
    if done.details["not_in_use"]:
        lines.append(_only_in_earlier(done.details["not_in_use"]))
    _print(done, "\n".join(lines), model, json)


def _confirm(warning: str) -> None:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{warning} To do this without confirmation, add --yes.")
    typer.echo(f"{warning}\nForget? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)


def _warning(removed: ForgetPreview, model: Path) -> str:
    memory = f"{plural(removed.features, 'stored feature')} and {plural(removed.images, 'exemplar')}"
    versions = ", ".join(map(str, removed.versions))
    only_in_earlier = f"{_only_in_earlier(removed.not_in_use)} " if removed.not_in_use else ""
    return (
        f"This removes {_quoted(removed.names)} from {printable(model)}: {memory} ({format_bytes(removed.bytes)}), "
        f"their weights in head and classifier, their names, the details of the history, and all versions up to now "
        f"({versions}). {only_in_earlier}This cannot be undone. The network keeps its weights: what they learned "
        "from these images is not unlearned. Copies and exports of the model elsewhere are not touched."
    )


def _only_in_earlier(names: Sequence[str]) -> str:
    return (
        f"Only in earlier versions, and removed with them: {_quoted(names)}. Classes in the current version are "
        "kept, even if they were renamed."
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{printable(name)}'" for name in names)


def _print(done: EditResult, what: str, model: Path, json: bool) -> None:
    if json:
        print_json(done.to_json())
        return
    typer.echo(what)
    typer.echo(f"{printable(model)}, version {done.version}: {plural(len(done.classes), 'class')}")
