"""`engram evaluate`: how well a model tells labelled pictures apart."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.run import Device
from engram.cli.words import left_out_lines
from engram.text import shown

if TYPE_CHECKING:
    from engram.model import Evaluation

LARGEST_MATRIX = 20  # classes that fit a line
MISTAKES = 10


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")],
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER|LIST.csv", help="One sub-folder per class, or a list: path,label.")
    ],
    generation: Annotated[int | None, typer.Option(help="An earlier generation instead of the one in use.")] = None,
    device: Annotated[Device, typer.Option(help="What to compute on.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Answer labelled pictures, and say how many were right: in all, for each class, and what is taken for what."""
    from engram.cli.display import Display
    from engram.model import ModelFolder, load
    from engram.model import evaluate as evaluate_pictures

    loaded = load(ModelFolder(model), generation=generation, device=device)
    with Display(quiet=quiet) as display:
        try:
            evaluation = evaluate_pictures(loaded, source, display)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        for line in left_out_lines(evaluation.left_out):
            display.say(line)
    if json:
        typer.echo(json_format.dumps(evaluation.to_json(), ensure_ascii=False))
        return
    typer.echo("\n".join(_lines(evaluation)))


def _lines(evaluation: Evaluation) -> list[str]:
    names = [shown(name) for name in evaluation.names]
    width = max(len("class"), *map(len, names))
    counts = evaluation.confusion.sum(dim=1).tolist()
    lines = [
        f"accuracy {evaluation.accuracy:.3f} on {evaluation.pictures} pictures; "
        f"mean over classes {evaluation.mean_accuracy:.3f}",
        f"probabilities off by {evaluation.error_calibrated:.3f} on average "
        f"({evaluation.error_uncalibrated:.3f} uncalibrated)",
        "",
        f"{'class':{width}}  pictures  right  precision",
    ]
    rows = zip(names, counts, evaluation.per_class(), evaluation.precision(), strict=True)
    for name, count, right, precision in rows:
        lines.append(f"{name:{width}}  {count:8}  {_share(right, 5)}  {_share(precision, 9)}")
    if len(names) <= LARGEST_MATRIX:
        cell = max(4, *(len(str(count)) + 1 for count in evaluation.confusion.flatten().tolist()))
        lines += ["", "what it is (rows), what was said (columns, in the same order)"]
        for name, row in zip(names, evaluation.confusion.tolist(), strict=True):
            lines.append(f"{name:{width}}  " + "".join(f"{count or '·':>{cell}}" for count in row))
    mistakes = evaluation.mistakes()[:MISTAKES]
    if mistakes:
        lines += ["", "most frequent mistakes"]
        lines += [f"{count:4} × {shown(true)} taken for {shown(said)}" for true, said, count in mistakes]
    return lines


def _share(value: float | None, width: int) -> str:
    return f"{value:{width}.3f}" if value is not None else f"{'–':>{width}}"
