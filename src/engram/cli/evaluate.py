"""`engram evaluate`: the accuracy of a model on labelled images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

import engram
from engram.cli.options import Device, Json, LabelledImages, ModelPath, Quiet, Version
from engram.cli.output import Display, print_json, print_skipped, share, table
from engram.text import plural, printable

if TYPE_CHECKING:
    from engram.model import Evaluation

NAME_WIDTH = 12  # characters that the confusion matrix leaves for class names
MOST_MISTAKES = 10
MOST_UNKNOWN = 5  # names of unknown classes that are printed


def evaluate(
    model: ModelPath,
    source: LabelledImages,
    version: Version = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Classify labelled images; print accuracy, overall and per class, and the confusion matrix.

    Images of classes that the model does not know are counted, but are not part of the accuracy.
    """
    loaded = engram.model.load(engram.model.ModelFolder(model), version=version, device=device)
    with Display(quiet=quiet) as display:
        evaluation = engram.model.evaluate(loaded, source, display)
    print_skipped(evaluation.skipped)
    if json:
        print_json(evaluation.to_json())
        return
    sections = [_summary(evaluation), _unknown(evaluation), _classes(evaluation), _matrix(evaluation)]
    typer.echo("\n\n".join(filter(None, [*sections, _mistakes(evaluation)])))


def _summary(evaluation: Evaluation) -> str:
    low, high = evaluation.interval
    return (
        f"accuracy {evaluation.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}) on "
        f"{plural(evaluation.images, 'image')}; mean over classes {evaluation.mean_accuracy:.3f}\n"
        f"expected calibration error {evaluation.error_calibrated:.3f} "
        f"({evaluation.error_uncalibrated:.3f} before calibration)"
    )


def _unknown(evaluation: Evaluation) -> str:
    if not evaluation.unknown:
        return ""
    names = [printable(each.name) for each in evaluation.unknown]
    images = plural(sum(each.images for each in evaluation.unknown), "image")
    return (
        f"not counted: {images} of {plural(len(names), 'class')} that the model does not know: "
        f"{', '.join(names[:MOST_UNKNOWN])}{', …' if len(names) > MOST_UNKNOWN else ''}"
    )


def _classes(evaluation: Evaluation) -> str:
    counts = evaluation.confusion.sum(dim=1).tolist()
    rows = zip(counts, evaluation.per_class(), evaluation.precision(), evaluation.names, strict=True)
    cells = [
        (f"{count:,}" if count else "–", share(recall), share(precision), name)
        for count, recall, precision, name in rows
    ]
    return table([("images", "recall", "precision", "class"), *cells], right=range(3))


def _matrix(evaluation: Evaluation) -> str:
    """The confusion matrix, if the terminal is wide enough for it."""
    counts = evaluation.confusion.tolist()
    width = max(len(str(count)) for row in counts for count in row) + 2
    if len(counts) * width + NAME_WIDTH > Console().width:
        return f"The confusion matrix of {len(counts)} classes is wider than the terminal; --json prints it."
    rows = [(*(str(count or "·") for count in row), name) for row, name in zip(counts, evaluation.names, strict=True)]
    title = "true classes (rows) and predicted classes (columns, in the same order)"
    return f"{title}\n{table(rows, right=range(len(counts)))}"


def _mistakes(evaluation: Evaluation) -> str:
    mistakes = evaluation.mistakes()[:MOST_MISTAKES]
    lines = [f"{count:,} × {printable(true)} classified as {printable(said)}" for true, said, count in mistakes]
    return "\n".join(["most frequent mistakes", *lines]) if lines else ""
