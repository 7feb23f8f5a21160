"""`engram evaluate`: how well a model tells labelled pictures apart."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.arguments import Json, ModelPath
from engram.cli.run import Device
from engram.cli.words import columns_there_are, counted, table, tell_left_out
from engram.text import shown

if TYPE_CHECKING:
    from engram.model import Evaluation

NAME = 12  # columns that are left for the names beside the matrix
MISTAKES = 10


def evaluate(
    model: ModelPath,
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER|LIST.csv", help="One sub-folder per class, or a list: path,label.")
    ],
    generation: Annotated[int | None, typer.Option(help="An earlier generation instead of the one in use.")] = None,
    device: Annotated[Device, typer.Option(help="What to compute on.")] = "auto",
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Answer labelled pictures, and say how many were right: in all, for each class, and what is taken for what."""
    from engram.cli.display import Display
    from engram.model import ModelFolder, load
    from engram.model import evaluate as evaluate_pictures

    loaded = load(ModelFolder(model), generation=generation, device=device)
    with Display(quiet=quiet) as display:
        evaluation = evaluate_pictures(loaded, source, display)
    tell_left_out(evaluation.left_out)
    if json:
        typer.echo(json_format.dumps(evaluation.to_json()))
        return
    typer.echo("\n\n".join(_parts(evaluation)))


def _parts(evaluation: Evaluation) -> list[str]:
    sums = (
        f"accuracy {evaluation.accuracy:.3f} on {counted(evaluation.pictures, 'picture')}; "
        f"mean over classes {evaluation.mean_accuracy:.3f}\n"
        f"probabilities off by {evaluation.error_calibrated:.3f} on average "
        f"({evaluation.error_uncalibrated:.3f} uncalibrated)"
    )
    counts = evaluation.confusion.sum(dim=1).tolist()
    rows = zip(counts, evaluation.per_class(), evaluation.precision(), evaluation.names, strict=True)
    classes = [
        (f"{count:,}" if count else "–", _share(right), _share(precision), name)
        for count, right, precision, name in rows
    ]
    parts = [sums, table([("pictures", "right", "precision", "class"), *classes], right=range(3)), _matrix(evaluation)]
    if mistakes := evaluation.mistakes()[:MISTAKES]:
        lines = [f"{count:,} × {shown(true)} taken for {shown(said)}" for true, said, count in mistakes]
        parts.append("\n".join(["most frequent mistakes", *lines]))
    return parts


def _matrix(evaluation: Evaluation) -> str:
    """The confusion matrix, if the terminal is wide enough for it."""
    counts = evaluation.confusion.tolist()
    width = max(len(str(count)) for row in counts for count in row) + 2
    if len(counts) * width + NAME > columns_there_are():
        return f"The confusion matrix of {len(counts)} classes is wider than the terminal; --json has it."
    rows = [[str(count or "·") for count in row] for row in counts]
    named = [(*row, name) for row, name in zip(rows, evaluation.names, strict=True)]
    return "what it is (rows), what was said (columns, in the same order)\n" + table(named, right=range(len(counts)))


def _share(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "–"
