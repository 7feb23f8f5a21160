"""What a model says of pictures: for each the likeliest classes, with probabilities."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram.data.labelled import decode_files, images_below
from engram.data.scanning import SkippedFile
from engram.errors import UsageError
from engram.model.calibration import FEWEST
from engram.model.model import Model
from engram.progress import SILENT, Progress

BATCH = 64


@dataclass(frozen=True)
class ClassProbability:
    """A class, and how likely the model thinks it is."""

    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a model says of one picture, likeliest first. Rejected: it is probably none of them."""

    path: Path
    top: tuple[ClassProbability, ...]
    rejected: bool


def predict(
    model: Model,
    paths: Sequence[Path],
    *,
    top: int = 5,
    reject: float | None = None,
    progress: Progress = SILENT,
) -> Iterator[Prediction | SkippedFile]:
    """What a model says of each picture, in order, or why it cannot be read. A few are in memory at a time.

    With `reject`, a picture whose likeliest class is less probable than that is said to be none of them. This needs a
    calibrated model.
    """
    if model.image_size is None:
        raise UsageError("This model has learned vectors, not pictures. Ask it from Python.")
    _check(top, reject)
    if reject is not None and not model.is_calibrated:
        raise UsageError(
            "This model's probabilities were never calibrated, so no image can be rejected by them. Calibration needs "
            f"{FEWEST} held-out images, of classes with at least two: teach it more images."
        )
    return _predictions(model, paths, model.image_size, top, reject, progress)


def _predictions(
    model: Model, paths: Sequence[Path], size: int, top: int, reject: float | None, progress: Progress
) -> Iterator[Prediction | SkippedFile]:
    with progress.phase("predict", len(paths)) as phase:
        outcomes = zip(paths, decode_files(paths, size), strict=True)
        while batch := list(itertools.islice(outcomes, BATCH)):
            images = [image for _, image in batch if isinstance(image, Tensor)]
            answers = iter(top_classes(model, torch.stack(images), top) if images else [])
            for path, outcome in batch:
                if isinstance(outcome, SkippedFile):
                    yield outcome
                else:
                    best = next(answers)
                    yield Prediction(path, best, reject is not None and best[0].probability < reject)
                phase.advance()


def top_classes(model: Model, inputs: Tensor, top: int = 5) -> list[tuple[ClassProbability, ...]]:
    """The `top` likeliest classes of each raw input, likeliest first; of equal ones the one learned first."""
    _check(top)
    probabilities = model.probabilities(inputs)
    best = probabilities.sort(dim=1, descending=True, stable=True)
    return [
        tuple(
            ClassProbability(model.names[class_index], float(value))
            for value, class_index in zip(values, class_indices, strict=True)
        )
        for values, class_indices in zip(best.values[:, :top].tolist(), best.indices[:, :top].tolist(), strict=True)
    ]


def _check(top: int, reject: float | None = None) -> None:
    """Refuse what is no number of classes, and what is no probability."""
    if top < 1:
        raise UsageError(f"At least the likeliest class is told; found {top}.")
    if reject is not None and not 0 <= reject <= 1:
        raise UsageError(f"The probability below which a picture is none of the classes is 0 to 1; found {reject}.")


def find_images(arguments: Iterable[Path]) -> tuple[list[Path], list[SkippedFile]]:
    """The pictures that files and folders name, and what was left out: a file is taken as it is, a folder searched."""
    pictures: list[Path] = []
    skipped: list[SkippedFile] = []
    for argument in arguments:
        if os.path.isdir(argument):  # what may not be looked at is none, and is told of when it is opened
            found, others = images_below(argument)
            pictures += found
            skipped += others
        else:
            pictures.append(argument)
    return pictures, skipped
