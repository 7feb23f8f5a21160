"""`engram evaluate`: how well a model classifies labelled pictures."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.options import Device, Json, ModelPath, Quiet
from engram.cli.words import columns_there_are, counted, print_skipped, table
from engram.text import printable

if TYPE_CHECKING:
    from engram.model import Evaluation

NAME = 12  # columns that the confusion matrix leaves for the names beside it
MISTAKES = 10  # that are printed
UNKNOWN = 5  # names of unknown classes that are printed


def evaluate(
    model: ModelPath,
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER|LIST.csv", help="One sub-folder per class, or a list: path,label.")
    ],
    generation: Annotated[int | None, typer.Option(help="An earlier generation instead of the one in use.")] = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Classify labelled pictures and print the accuracy, overall and per class, and the confusion matrix.

    Pictures of classes that the model does not know are counted, but are not part of the accuracy.
    """
    from engram.cli.display import Display
    from engram.model import ModelFolder, load
    from engram.model import evaluate as evaluate_pictures

    loaded = load(ModelFolder(model), generation=generation, device=device)
    with Display(quiet=quiet) as display:
        evaluation = evaluate_pictures(loaded, source, display)
    print_skipped(evaluation.skipped)
    if json:
        typer.echo(json_format.dumps(evaluation.to_json()))
        return
    typer.echo("\n\n".join(_parts(evaluation)))


def _parts(evaluation: Evaluation) -> list[str]:
    parts = [_summary(evaluation)]
    if evaluation.unknown:
        parts.append(_unknown(evaluation))
    parts += [_classes(evaluation), _matrix(evaluation)]
    if mistakes := evaluation.mistakes()[:MISTAKES]:
        lines = [f"{count:,} × {printable(true)} taken for {printable(said)}" for true, said, count in mistakes]
        parts.append("\n".join(["most frequent mistakes", *lines]))
    return parts


def _summary(evaluation: Evaluation) -> str:
    low, high = evaluation.interval
    return (
        f"accuracy {evaluation.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}) on "
        f"{counted(evaluation.images, 'picture')}; mean over classes {evaluation.mean_accuracy:.3f}\n"
        f"expected calibration error {evaluation.error_calibrated:.3f} "
        f"({evaluation.error_uncalibrated:.3f} before calibration)"
    )


def _unknown(evaluation: Evaluation) -> str:
    names = [printable(each.name) for each in evaluation.unknown]
    pictures = counted(sum(each.images for each in evaluation.unknown), "picture")
    return (
        f"not counted: {pictures} of {counted(len(names), 'class')} that the model does not know: "
        f"{', '.join(names[:UNKNOWN])}{', …' if len(names) > UNKNOWN else ''}"
    )


def _classes(evaluation: Evaluation) -> str:
    counts = evaluation.confusion.sum(dim=1).tolist()
    rows = zip(counts, evaluation.per_class(), evaluation.precision(), evaluation.names, strict=True)
    cells = [
        (f"{count:,}" if count else "–", _share(right), _share(precision), name)
        for count, right, precision, name in rows
    ]
    return table([("pictures", "right", "precision", "class"), *cells], right=range(3))


def _matrix(evaluation: Evaluation) -> str:
    """The confusion matrix, if the terminal is wide enough for it."""
    counts = evaluation.confusion.tolist()
    width = max(len(str(count)) for row in counts for count in row) + 2
    if len(counts) * width + NAME > columns_there_are():
        return f"The confusion matrix of {len(counts)} classes is wider than the terminal; --json has it."
    rows = [[str(count or "·") for count in row] for row in counts]
    named = [(*row, name) for row, name in zip(rows, evaluation.names, strict=True)]
    return "true classes (rows) and predicted classes (columns, in the same order)\n" + table(
        named, right=range(len(counts))
    )


def _share(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "–"
