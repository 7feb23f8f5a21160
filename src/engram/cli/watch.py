"""`engram watch`: learn new images of a folder as they settle."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import engram
from engram.cli.options import Device, Force, NewModelPath
from engram.cli.output import accuracy_text, print_json
from engram.text import format_duration, plural, printable

if TYPE_CHECKING:
    from engram.model import WatchEvent

INCOMPLETE = ("rejected", "failed", "busy")  # events after which --once exits with 1


def watch(
    model: NewModelPath,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One sub-folder per class.")],
    settle: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="A file is complete if it has not changed for so long.")
    ] = 5.0,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two scans.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Learn what is there and end; exits with 1 if not all could be learned.")
    ] = False,
    force: Force = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
    device: Device = "auto",
) -> None:
    """Learn new images of a folder as they settle, one update at a time, until Ctrl-C.

    The model's folder records what was learned, so that no image is learned twice, also after a restart. A file that
    is changed is learned again. Files that cannot be read are reported once and skipped.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options, complete = engram.model.LearnOptions(device=device, force=force), True
    try:
        for event in engram.model.watch(
            engram.model.ModelFolder(model), folder, options, settle=settle, interval=every, once=once
        ):
            complete &= event.event not in INCOMPLETE
            now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            if json:
                print_json({"time": now, **event.to_json()})
            else:
                typer.echo(f"{now} {_line(event)}")
    except KeyboardInterrupt:  # the usual end; an unfinished update changes nothing and is repeated next time
        raise typer.Exit(0) from None
    raise typer.Exit(0 if complete else 1)


def _line(event: WatchEvent) -> str:
    if (update := event.update) is None:
        return f"{event.event} {printable(event.path)}{f': {printable(event.reason)}' if event.reason else ''}"
    counts = ", ".join(f"{printable(name)} {count:,}" for name, count in {**update.new, **update.more}.items())
    measured, classes = update.held_out_classes, update.classes
    accuracy = accuracy_text(update.accuracy, update.interval, update.held_out, measured, classes, update.estimated)
    return (
        f"learned {counts} in {format_duration(update.seconds)}: version {update.version}, "
        f"{plural(classes, 'class')}; accuracy {accuracy}"
    )
