"""How well a model tells labelled pictures apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.data.left_out import LeftOut
from engram.data.pictures import read, scan
from engram.errors import DataError, UsageError
from engram.model.calibration import calibration_error
from engram.model.model import Model
from engram.progress import SILENT, Progress
from engram.text import shown

AT_A_TIME = 500


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """What came out. Of the confusion matrix, rows are what pictures are, columns what the model says they are."""

    names: tuple[str, ...]  # all classes of the model, in the order of the matrix
    confusion: Tensor  # int64 (K, K)
    error_uncalibrated: float  # expected calibration error of plain scores
    error_calibrated: float  # and of the model's probabilities
    left_out: tuple[LeftOut, ...]

    @property
    def pictures(self) -> int:
        """How many were answered."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share that was answered rightly."""
        return float(self.confusion.trace()) / self.pictures

    @property
    def mean_accuracy(self) -> float:
        """The mean over the classes that occurred of the share answered rightly, so that small ones count too."""
        right = [accuracy for accuracy in self.per_class() if accuracy is not None]
        return sum(right) / len(right)

    def per_class(self) -> list[float | None]:
        """Of the pictures of each class, the share answered rightly; None where there were none."""
        return _shares(self.confusion.diagonal(), self.confusion.sum(dim=1))

    def precision(self) -> list[float | None]:
        """Of the answers that named each class, the share that was right; None where there were none."""
        return _shares(self.confusion.diagonal(), self.confusion.sum(dim=0))

    def mistakes(self) -> list[tuple[str, str, int]]:
        """(what it is, what was said, how often), most frequent first."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        pairs = [(row, column, int(wrong[row, column])) for row, column in wrong.nonzero().tolist()]
        pairs.sort(key=lambda pair: -pair[2])
        return [(self.names[row], self.names[column], count) for row, column, count in pairs]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        counts = self.confusion.sum(dim=1).tolist()
        rows = zip(self.names, counts, self.per_class(), self.precision(), strict=True)
        return {
            "pictures": self.pictures,
            "accuracy": self.accuracy,
            "mean_accuracy": self.mean_accuracy,
            "classes": [
                {"name": name, "pictures": count, "accuracy": accuracy, "precision": precision}
                for name, count, accuracy, precision in rows
            ],
            "confusion": self.confusion.tolist(),
            "calibration_error": self.error_calibrated,
            "calibration_error_uncalibrated": self.error_uncalibrated,
            "left_out": [left.to_json() for left in self.left_out],
        }


def evaluate(model: Model, source: Path, progress: Progress = SILENT) -> Evaluation:
    """Answer the pictures of a folder with one sub-folder per class, or of a CSV list, and compare."""
    if model.image_size is None:
        raise UsageError("This model has learned vectors, not pictures. Evaluate it from Python.")
    found = scan(source, progress)
    strange = [name for name in found.class_names if name not in model.names]
    if strange:
        raise DataError(
            f"The model does not know {len(strange)} of the classes in {shown(source)}: "
            f"{', '.join(map(shown, strange[:5]))}{', …' if len(strange) > 5 else ''}. "
            f"It knows: {', '.join(map(shown, model.names[:20]))}{', …' if len(model.names) > 20 else ''}. "
            "Name them as it does, leave them out, or teach it these first."
        )
    pictures = read(found, model.image_size, progress)
    samples = pictures.samples
    columns = torch.tensor([model.column(name) for name in found.class_names])[samples.labels]
    parts = []
    with progress.phase("evaluate", len(samples)) as phase:
        for positions in torch.arange(len(samples)).split(AT_A_TIME):
            parts.append(model.scores(samples.batch(positions)))
            phase.advance(len(positions))
    scores = torch.cat(parts)
    size = len(model.names)
    confusion = torch.bincount(columns * size + scores.argmax(dim=1), minlength=size * size).reshape(size, size)
    return Evaluation(
        names=model.names,
        confusion=confusion,
        error_uncalibrated=calibration_error(torch.softmax(scores, dim=1), columns),
        error_calibrated=calibration_error(model.calibrated(scores), columns),
        left_out=(*found.left_out, *pictures.unreadable),
    )


def _shares(parts: Tensor, wholes: Tensor) -> list[float | None]:
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [part / whole if whole else None for part, whole in pairs]
