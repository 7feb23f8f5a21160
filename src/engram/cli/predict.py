"""`engram predict`: what a model says of pictures."""

from __future__ import annotations

import csv as csv_format
import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.run import Device
from engram.cli.words import left_out_lines
from engram.errors import UsageError
from engram.text import csv_text, shown

if TYPE_CHECKING:
    from engram.data.pictures import LeftOut
    from engram.model import Prediction

NONE = "none of these"


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")],
    pictures: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGE|FOLDER|-...", help="Pictures, or folders; - is a list on stdin."),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to tell, likeliest first.")] = 5,
    reject: Annotated[
        float | None,
        typer.Option(metavar="T", help="Below this probability of the likeliest class, say: none of these."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print a table with commas, one picture a line.")] = False,
    device: Annotated[Device, typer.Option(help="What to compute on.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Say which classes pictures are of, with calibrated probabilities. Exit 1 if any cannot be read."""
    if json and csv:
        raise UsageError("Choose one of --json and --csv.")
    from engram.cli.display import Display
    from engram.data.pictures import LeftOut
    from engram.model import ModelFolder, load, pictures_among
    from engram.model import predict as predict_pictures

    paths, left_out = pictures_among(_listed(pictures))
    loaded = load(ModelFolder(model), device=device)
    predictions: list[Prediction] = []
    unreadable: list[LeftOut] = []
    writer = csv_format.writer(sys.stdout, lineterminator="\n")
    if csv:
        columns = [f"{what}_{rank}" for rank in range(1, min(top, len(loaded.names)) + 1) for what in ("class", "p")]
        writer.writerow(["path", *(["rejected"] if reject is not None else []), *columns])
    with Display(quiet=quiet) as display:
        try:
            for outcome in predict_pictures(loaded, paths, top=top, reject=reject, progress=display):
                if isinstance(outcome, LeftOut):
                    unreadable.append(outcome)
                elif csv:
                    writer.writerow(_row(outcome, reject is not None))
                elif json:
                    predictions.append(outcome)
                else:
                    typer.echo(_line(outcome))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        for line in left_out_lines([*left_out, *unreadable]):
            display.say(line)
    if json:
        typer.echo(json_format.dumps(_object(predictions, [*left_out, *unreadable], reject is not None)))
    if not paths:
        raise UsageError("There is no picture among what was named.")
    if unreadable:
        raise typer.Exit(1)


def _listed(arguments: list[Path]) -> list[Path]:
    """The arguments, with the lines of stdin in the place of a dash."""
    paths: list[Path] = []
    for argument in arguments:
        lines = sys.stdin.read().splitlines() if str(argument) == "-" else [str(argument)]
        paths += [Path(line) for line in lines if line.strip()]
    return paths


def _line(prediction: Prediction) -> str:
    answers = ", ".join(f"{shown(answer.name)} {answer.probability:.3f}" for answer in prediction.top)
    return f"{shown(prediction.path)}: {f'{NONE} ({answers})' if prediction.rejected else answers}"


def _row(prediction: Prediction, rejecting: bool) -> list[str]:
    cells = [csv_text(str(prediction.path)), *([str(prediction.rejected).lower()] if rejecting else [])]
    for answer in prediction.top:
        cells += [csv_text(answer.name), f"{answer.probability:.6f}"]
    return cells


def _object(predictions: list[Prediction], left_out: list[LeftOut], rejecting: bool) -> dict[str, object]:
    def one(prediction: Prediction) -> dict[str, object]:
        top = [{"class": answer.name, "probability": answer.probability} for answer in prediction.top]
        return {
            "path": str(prediction.path),
            "top": top,
            **({"rejected": prediction.rejected} if rejecting else {}),
        }

    unreadable = [{"path": str(each.path), "reason": each.reason} for each in left_out]
    return {"predictions": [one(prediction) for prediction in predictions], "left_out": unreadable}
