"""`engram predict`: classify images."""

from __future__ import annotations

import codecs
import csv as csv_format
import gc
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.cli.options import Device, Json, ModelPath, Quiet, Version
from engram.cli.output import Display, print_json, print_skipped
from engram.errors import DataError, UsageError
from engram.text import csv_text, printable

if TYPE_CHECKING:
    from engram.data.scanning import SkippedFile
    from engram.model import Model, Prediction

NONE = "none of these"


def parse_reject(text: str) -> float | str:
    """`auto`, a rate such as `5%`, or a probability."""
    text = text.strip()
    if text == "auto" or re.fullmatch(r"\d{1,2}(\.\d{1,6})?%", text):
        return text
    try:
        return float(text)
    except ValueError:
        what = f"'{printable(text)}' is not a probability, a rate such as 5%, or auto."
        raise typer.BadParameter(what) from None


Paths = Annotated[
    list[str],
    typer.Argument(metavar="IMAGE|FOLDER|-...", help="Images and folders; - reads paths from stdin, one per line."),
]
Reject = Annotated[
    Any | None,  # what `parse_reject` returns
    typer.Option(
        metavar="T|auto|R%",
        parser=parse_reject,
        help=f"Answer '{NONE}' if the most likely class has a probability below T, or so that about R % (auto: 5 %) of "
        "images of unknown classes are accepted.",
    ),
]


def predict(
    model: ModelPath,
    paths: Paths,
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print, most likely first.")] = 5,
    reject: Reject = None,
    version: Version = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, one image per line.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Classify images. Exits with 1 if any of them cannot be read."""
    if json and csv:
        raise UsageError("Choose one of --json and --csv.")
    with _without_collection():
        import engram.model
        from engram.data.scanning import SkippedFile

    loaded = engram.model.load(engram.model.ModelFolder(model), version=version, device=device)
    images, skipped = engram.model.find_images(_with_stdin(paths))
    predictions: list[Prediction] = []
    unreadable: list[SkippedFile] = []
    with Display(quiet=quiet) as display:
        outcomes = engram.model.predict(loaded, images, top=top, reject=reject, progress=display)
        if csv:
            print(_csv(_header(loaded, top, reject)))
        for outcome in outcomes:
            if isinstance(outcome, SkippedFile):
                unreadable.append(outcome)
            elif json:
                predictions.append(outcome)
            else:  # printed by print, which rich keeps above the progress bar
                line = _csv(_row(outcome, reject)) if csv else _line(outcome, loaded.is_calibrated)
                print(line, flush=True)
    skipped += unreadable
    print_skipped(skipped)
    if json:
        plain = [_to_json(prediction, reject) for prediction in predictions]
        skipped_files = [each.to_json() for each in skipped]
        print_json({"predictions": plain, "skipped": skipped_files, "calibrated": loaded.is_calibrated})
    if not images:
        raise DataError(f"There is no image in {', '.join(map(printable, paths))}.")
    if unreadable:
        raise typer.Exit(1)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection inside: imports leave no garbage, but several searches among 300,000 objects (0.2 s)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # nor is it searched for later
        if was_enabled:
            gc.enable()


def _with_stdin(arguments: Iterable[str]) -> list[Path]:
    """The arguments, with `-` replaced by the paths on stdin."""
    lines = [line for each in arguments for line in (_stdin_lines() if each == "-" else [each])]
    return [Path(line) for line in lines if line.strip()]


def _stdin_lines() -> list[str]:
    """Lines end with a newline alone: names of files may contain any other byte."""
    if sys.stdin is None:  # closed
        return []
    lines = sys.stdin.buffer.read().removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [os.fsdecode(line.removesuffix(b"\r")) for line in lines]


def _line(prediction: Prediction, calibrated: bool) -> str:
    """Classes with their probabilities; without them if they were never calibrated."""
    answers = ", ".join(
        f"{printable(answer.name)} {answer.probability:.3f}" if calibrated else printable(answer.name)
        for answer in prediction.top
    )
    return f"{printable(prediction.path)}: {f'{NONE} ({answers})' if prediction.rejected else answers}"


def _csv(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv_format.writer(line, lineterminator="").writerow(csv_text(printable(cell)) for cell in cells)
    return line.getvalue()


def _header(model: Model, top: int, reject: float | str | None) -> list[str]:
    probability = "p" if model.is_calibrated else "uncalibrated_p"
    ranks = range(1, min(top, len(model.names)) + 1)
    columns = [f"{what}_{rank}" for rank in ranks for what in ("class", probability)]
    return ["path", *(["rejected"] if reject is not None else []), *columns]


def _row(prediction: Prediction, reject: float | str | None) -> list[str]:
    answers = [cell for answer in prediction.top for cell in (answer.name, f"{answer.probability:.6f}")]
    return [str(prediction.path), *([str(prediction.rejected).lower()] if reject is not None else []), *answers]


def _to_json(prediction: Prediction, reject: float | str | None) -> dict[str, object]:
    top = [{"class": answer.name, "probability": answer.probability} for answer in prediction.top]
    rejected = {"rejected": prediction.rejected} if reject is not None else {}
    return {"path": str(prediction.path), "top": top, **rejected}
