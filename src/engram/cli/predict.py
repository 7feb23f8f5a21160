"""`engram predict`: what a model says of pictures."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.options import Device, Json, ModelPath, Quiet
from engram.cli.words import print_skipped
from engram.errors import DataError, UsageError
from engram.text import csv_text, printable

if TYPE_CHECKING:
    from engram.data.scanning import SkippedFile
    from engram.model import Prediction

NONE = "none of these"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # that some editors put before a list


def predict(
    model: ModelPath,
    pictures: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE|FOLDER|-...", help="Pictures, folders; - is a list on stdin, one path a line."),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to tell, likeliest first.")] = 5,
    reject: Annotated[
        float | None,
        typer.Option(metavar="T", help="Below this probability of the likeliest class, say: none of these."),
    ] = None,
    generation: Annotated[int | None, typer.Option(help="An earlier generation instead of the one in use.")] = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print a table with commas, one picture a line.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Say which classes pictures are of, and how probable that is. Exit 1 if any cannot be read."""
    if json and csv:
        raise UsageError("Choose one of --json and --csv.")
    from engram.cli.display import Display
    from engram.data.scanning import SkippedFile
    from engram.model import ModelFolder, find_images, load
    from engram.model import predict as predict_pictures

    loaded = load(ModelFolder(model), generation=generation, device=device)
    paths, skipped = find_images(_listed(pictures))
    predictions: list[Prediction] = []
    unreadable: list[SkippedFile] = []
    rejecting = reject is not None
    with Display(quiet=quiet) as display:
        outcomes = predict_pictures(loaded, paths, top=top, reject=reject, progress=display)
        if csv:
            print(_csv(_header(min(top, len(loaded.names)), rejecting)))
        for outcome in outcomes:
            if isinstance(outcome, SkippedFile):
                unreadable.append(outcome)
            elif json:
                predictions.append(outcome)
            else:
                # Not by typer, which would write past what keeps the lines above the bar.
                line = _csv(_row(outcome, rejecting)) if csv else _line(outcome, loaded.is_calibrated)
                print(line, flush=True)
    skipped += unreadable
    print_skipped(skipped)
    if json:
        plain = _object(predictions, skipped, rejecting)
        typer.echo(json_format.dumps({**plain, "calibrated": loaded.is_calibrated}))
    if not paths:
        raise DataError("There is no picture among what was named.")
    if unreadable:
        raise typer.Exit(1)


def _listed(arguments: Iterable[str]) -> list[Path]:
    """The arguments, with the lines of stdin in the place of a dash."""
    paths: list[Path] = []
    for argument in arguments:
        lines = _lines_of_stdin() if argument == "-" else [argument]
        paths += [Path(line) for line in lines if line.strip()]
    return paths


def _lines_of_stdin() -> list[str]:
    """What ends a line is a newline and nothing else: names of files may be any other bytes."""
    if sys.stdin is None:  # it was closed
        return []
    lines = sys.stdin.buffer.read().removeprefix(BYTE_ORDER_MARK).split(b"\n")
    return [os.fsdecode(line.removesuffix(b"\r")) for line in lines]


def _line(prediction: Prediction, calibrated: bool) -> str:
    """Classes with their probabilities; only in their order where probabilities were never calibrated."""
    answers = ", ".join(
        f"{printable(answer.name)} {answer.probability:.3f}" if calibrated else printable(answer.name)
        for answer in prediction.top
    )
    return f"{printable(prediction.path)}: {f'{NONE} ({answers})' if prediction.rejected else answers}"


def _csv(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv_format.writer(line, lineterminator="").writerow(csv_text(printable(cell)) for cell in cells)
    return line.getvalue()


def _header(top: int, rejecting: bool) -> list[str]:
    columns = [f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "p")]
    return ["path", *(["rejected"] if rejecting else []), *columns]


def _row(prediction: Prediction, rejecting: bool) -> list[str]:
    answers = [cell for answer in prediction.top for cell in (answer.name, f"{answer.probability:.6f}")]
    return [str(prediction.path), *([str(prediction.rejected).lower()] if rejecting else []), *answers]


def _object(predictions: list[Prediction], skipped: list[SkippedFile], rejecting: bool) -> dict[str, object]:
    def one(prediction: Prediction) -> dict[str, object]:
        top = [{"class": answer.name, "probability": answer.probability} for answer in prediction.top]
        return {
            "path": str(prediction.path),
            "top": top,
            **({"rejected": prediction.rejected} if rejecting else {}),
        }

    unreadable = [each.to_json() for each in skipped]
    return {"predictions": [one(prediction) for prediction in predictions], "skipped": unreadable}
