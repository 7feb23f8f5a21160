"""`evaluate`: how well a model classifies labelled pictures."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.data.labelled import LabelledFiles, read_images, scan
from engram.data.scanning import SkippedFile
from engram.errors import DataError, UsageError
from engram.model.accuracy import Accuracy
from engram.model.calibration import calibration_error
from engram.model.model import Model
from engram.progress import SILENT, Progress
from engram.text import printable

AT_A_TIME = 500


@dataclass(frozen=True)
class UnknownClass:
    """A class of the evaluated folder that the model does not know; its pictures are counted, but not classified."""

    name: str
    images: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """The result of `evaluate`. In the confusion matrix, rows are true classes and columns are predicted ones."""

    names: tuple[str, ...]  # all classes of the model, in the order of the matrix
    confusion: Tensor  # int64 (K, K)
    error_uncalibrated: float  # expected calibration error of the softmax of the scores
    error_calibrated: float  # and of the model's calibrated probabilities
    skipped: tuple[SkippedFile, ...]
    unknown: tuple[UnknownClass, ...] = ()  # classes that the model does not know; not part of any other number here

    @property
    def images(self) -> int:
        """How many pictures were classified."""
        return int(self.confusion.sum())

    @property
    def overall(self) -> Accuracy:
        """The number of correct predictions and of pictures."""
        return Accuracy(int(self.confusion.trace()), self.images)

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return self.overall.value

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy."""
        return self.overall.low, self.overall.high

    @property
    def mean_accuracy(self) -> float:
        """The mean of the accuracies of the classes that occurred, so that each class counts the same."""
        accuracies = [accuracy for accuracy in self.per_class() if accuracy is not None]
        return sum(accuracies) / len(accuracies)

    def per_class(self) -> list[float | None]:
        """Recall of each class: the share of its pictures that was recognised; None without pictures."""
        return _shares(self.confusion.diagonal(), self.confusion.sum(dim=1))

    def precision(self) -> list[float | None]:
        """Precision of each class: the share of predictions of it that was correct; None without predictions."""
        return _shares(self.confusion.diagonal(), self.confusion.sum(dim=0))

    def mistakes(self) -> list[tuple[str, str, int]]:
        """(true class, predicted class, count), most frequent first."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        pairs = [(row, class_index, int(wrong[row, class_index])) for row, class_index in wrong.nonzero().tolist()]
        pairs.sort(key=lambda pair: -pair[2])
        return [(self.names[row], self.names[class_index], count) for row, class_index, count in pairs]

    def to_json(self) -> dict[str, Any]:
        """All numbers as plain values."""
        counts = self.confusion.sum(dim=1).tolist()
        rows = zip(self.names, counts, self.per_class(), self.precision(), strict=True)
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "mean_accuracy": self.mean_accuracy,
            "classes": [
                {"name": name, "images": count, "accuracy": accuracy, "precision": precision}
                for name, count, accuracy, precision in rows
            ],
            "unknown": [asdict(each) for each in self.unknown],
            "confusion": self.confusion.tolist(),
            "calibration_error": self.error_calibrated,
            "calibration_error_uncalibrated": self.error_uncalibrated,
            "skipped": [left.to_json() for left in self.skipped],
        }


def evaluate(model: Model, source: Path, progress: Progress = SILENT) -> Evaluation:
    """Classify the pictures of a folder with one sub-folder per class, or of a CSV list, and compare with the labels.

    Classes that the model does not know are reported in `unknown`; their pictures are not classified.
    """
    if model.image_size is None:
        raise UsageError("This model has learned vectors, not pictures. Evaluate it from Python.")
    found, unknown = _split(scan(source, progress), model)
    pictures = read_images(found, model.image_size, progress)
    samples = pictures.samples
    class_indices = torch.tensor([model.class_index(name) for name in found.class_names])[samples.labels]
    parts = []
    with progress.phase("evaluate", len(samples)) as phase:
        for positions in torch.arange(len(samples)).split(AT_A_TIME):
            parts.append(model.scores(samples.batch(positions)))
            phase.advance(len(positions))
    scores = torch.cat(parts)
    size = len(model.names)
    confusion = torch.bincount(class_indices * size + scores.argmax(dim=1), minlength=size * size).reshape(size, size)
    return Evaluation(
        names=model.names,
        confusion=confusion,
        error_uncalibrated=calibration_error(torch.softmax(scores, dim=1), class_indices),
        error_calibrated=calibration_error(model.calibrated(scores), class_indices),
        skipped=(*found.skipped, *pictures.unreadable),
        unknown=unknown,
    )


def _split(found: LabelledFiles, model: Model) -> tuple[LabelledFiles, tuple[UnknownClass, ...]]:
    """The pictures of classes that the model knows, and the classes that it does not know."""
    pictures = Counter(found.class_names[label] for label in found.labels)
    unknown = tuple(UnknownClass(name, pictures[name]) for name in found.class_names if name not in model.names)
    known = tuple(name for name in found.class_names if name in model.names)
    if not known:
        raise DataError(
            f"The model knows none of the classes in {printable(found.source)}: "
            f"{', '.join(printable(each.name) for each in unknown[:5])}{', …' if len(unknown) > 5 else ''}. "
            f"It knows: {', '.join(map(printable, model.names[:20]))}{', …' if len(model.names) > 20 else ''}. "
            "Use the same names, or teach the model these classes first."
        )
    label_of = {name: label for label, name in enumerate(known)}
    named = [(path, found.class_names[label]) for path, label in zip(found.paths, found.labels, strict=True)]
    labelled = [(path, label_of[name]) for path, name in named if name in label_of]
    paths, labels = zip(*labelled, strict=True)
    return replace(found, class_names=known, paths=paths, labels=labels), unknown


def _shares(parts: Tensor, wholes: Tensor) -> list[float | None]:
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [part / whole if whole else None for part, whole in pairs]
