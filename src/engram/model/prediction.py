"""`predict`: the most likely classes of images. `evaluate`: how well a model classifies labelled images."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram.data.labelled import LabelledFiles, decode_files, images_below, read_images, scan
from engram.data.scanning import SkippedFile
from engram.errors import DataError, UsageError
from engram.model.held_out import (
    DEFAULT_RATE,
    MIN_CALIBRATION,
    MIN_CLASSES,
    Accuracy,
    calibration_error,
    confusion_matrix,
)
from engram.model.model import Model
from engram.progress import SILENT, Progress
from engram.text import printable

BATCH = 64  # images that `predict` classifies at a time; as many are decoded meanwhile
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class ClassProbability:
    """A class and its probability."""

    name: str
    probability: float


class Answer(NamedTuple):
    """The most likely classes of an input, most likely first, and its similarity to the nearest class mean."""

    top: tuple[ClassProbability, ...]
    similarity: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of an image, most likely first. Rejected: it is probably none of them."""

    path: Path
    top: tuple[ClassProbability, ...]
    rejected: bool


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """When an image is answered with none of the classes."""

    probability: float = 0.0  # of the most likely class; an image below it is rejected
    similarity: float = -math.inf  # to the nearest class mean; an image below it is rejected

    def rejects(self, probability: float, similarity: float | None) -> bool:
        """Whether an image is rejected; its similarity may be None only if none is required."""
        return probability < self.probability or (similarity is not None and similarity < self.similarity)


def predict(
    model: Model,
    paths: Sequence[Path],
    *,
    top: int = 5,
    reject: float | str | None = None,
    progress: Progress = SILENT,
) -> Iterator[Prediction | SkippedFile]:
    """The prediction for each image, in order, or why it cannot be read. A few images are in memory at a time.

    `reject`: a number rejects images whose most likely class has a lower probability; `"auto"` or a rate such as `"5%"`
    rejects images so that about this share of those of unknown classes is accepted. See `rejection`.
    """
    size = _image_size(model)
    if top < 1:
        raise UsageError(f"The number of classes to predict must be at least 1; found {top}.")
    return _predictions(model, paths, size, top, rejection(model, reject), progress)


def rejection(model: Model, reject: float | str | None) -> Rejection:
    """The rejection that a user asked for: a probability, `auto`, or the rate of accepted unknown images (`5%`)."""
    if reject is None:
        return Rejection()
    if isinstance(reject, str):
        if (similarity := model.class_similarity) is None:
            raise UsageError(
                "For this model it cannot be estimated how many images of unknown classes are accepted. That needs "
                f"stored features of at least {MIN_CLASSES} classes, and a network that was not trained on them. "
                "Give a probability instead, such as 0.9."
            )
        rate = DEFAULT_RATE if reject == "auto" else float(reject.removesuffix("%")) / 100
        return Rejection(similarity=similarity.threshold(rate).similarity)
    if not 0 <= reject <= 1:
        raise UsageError(f"The probability below which an image is rejected must lie between 0 and 1; found {reject}.")
    if not model.is_calibrated:
        raise UsageError(
            "This model's probabilities were never calibrated, so no image can be rejected by them. Calibration needs "
            f"{MIN_CALIBRATION} held-out images, of classes with at least two: teach it more images."
        )
    return Rejection(probability=reject)


def _predictions(
    model: Model, paths: Sequence[Path], size: int, top: int, rejected: Rejection, progress: Progress
) -> Iterator[Prediction | SkippedFile]:
    with progress.phase("predict", len(paths)) as phase:
        outcomes = zip(paths, decode_files(paths, size, ahead=BATCH), strict=True)  # the next batch meanwhile
        while batch := list(itertools.islice(outcomes, BATCH)):
            images = [image for _, image in batch if isinstance(image, Tensor)]
            found = iter(answers(model, torch.stack(images), top, [rejected]) if images else [])
            for path, outcome in batch:
                if isinstance(outcome, SkippedFile):
                    yield outcome
                else:
                    answer = next(found)
                    yield Prediction(path, answer.top, rejected.rejects(answer.top[0].probability, answer.similarity))
                phase.advance()


def answers(model: Model, inputs: Tensor, top: int = 5, rejections: Iterable[Rejection] = ()) -> list[Answer]:
    """The `top` most likely classes of each raw input; of equal ones the one learned first.

    With its similarity to the nearest class mean if a rejection needs it.
    """
    needs_similarity = any(each.similarity > -math.inf for each in rejections)
    probabilities, similarities = model.classify(inputs) if needs_similarity else (model.probabilities(inputs), None)
    best = probabilities.sort(dim=1, descending=True, stable=True)
    rows = zip(
        best.values[:, :top].tolist(),
        best.indices[:, :top].tolist(),
        [None] * len(inputs) if similarities is None else similarities.tolist(),
        strict=True,
    )
    return [
        Answer(tuple(ClassProbability(model.names[i], p) for p, i in zip(values, indices, strict=True)), similarity)
        for values, indices, similarity in rows
    ]


def find_images(arguments: Iterable[Path]) -> tuple[list[Path], list[SkippedFile]]:
    """The images that files and folders name, and the skipped files. A file is taken as it is, a folder searched."""
    images: list[Path] = []
    skipped: list[SkippedFile] = []
    for argument in arguments:
        if os.path.isdir(argument):  # one without permission is none, and fails when it is opened
            found, others = images_below(argument)
            images += found
            skipped += others
        else:
            images.append(argument)
    return images, skipped


def _image_size(model: Model) -> int:
    if model.image_size is None:
        raise UsageError("This model has learned vectors, not images. Use it from Python.")
    return model.image_size


@dataclass(frozen=True)
class UnknownClass:
    """A class of the evaluated folder that the model does not know; its images are counted, but not classified."""

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
        """How many images were classified."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return int(self.confusion.trace()) / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy."""
        return Accuracy(int(self.confusion.trace()), self.images).interval

    @property
    def mean_accuracy(self) -> float:
        """The mean of the accuracies of the classes that occurred, so that each class counts the same."""
        accuracies = [accuracy for accuracy in self.per_class() if accuracy is not None]
        return sum(accuracies) / len(accuracies)

    def per_class(self) -> list[float | None]:
        """Recall of each class: the share of its images that was recognised; None without images."""
        return self._shares(1)

    def precision(self) -> list[float | None]:
        """Precision of each class: the share of predictions of it that was correct; None without predictions."""
        return self._shares(0)

    def _shares(self, dim: int) -> list[float | None]:
        pairs = zip(self.confusion.diagonal().tolist(), self.confusion.sum(dim=dim).tolist(), strict=True)
        return [correct / total if total else None for correct, total in pairs]

    def mistakes(self) -> list[tuple[str, str, int]]:
        """(true class, predicted class, count), most frequent first."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        pairs = [(self.names[row], self.names[column], int(wrong[row, column])) for row, column in wrong.nonzero()]
        return sorted(pairs, key=lambda pair: -pair[2])

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
            "skipped": [file.to_json() for file in self.skipped],
        }


def evaluate(model: Model, source: Path, progress: Progress = SILENT) -> Evaluation:
    """Classify the images of a folder with one sub-folder per class, or of a CSV list, and compare with the labels.

    Classes that the model does not know are reported in `unknown`; their images are not classified.
    """
    size = _image_size(model)
    found, unknown = _split(scan(source, progress), model)
    images = read_images(found, size, progress)
    samples = images.samples
    class_indices = torch.tensor([model.class_index(name) for name in found.class_names])[samples.labels]
    parts = []
    with progress.phase("evaluate", len(samples)) as phase:
        for positions in torch.arange(len(samples)).split(EVALUATION_BATCH):
            parts.append(model.scores(samples.batch(positions)))
            phase.advance(len(positions))
    return evaluate_scores(model, torch.cat(parts), class_indices, (*found.skipped, *images.unreadable), unknown)


def evaluate_scores(
    model: Model,
    scores: Tensor,
    class_indices: Tensor,
    skipped: tuple[SkippedFile, ...] = (),
    unknown: tuple[UnknownClass, ...] = (),
) -> Evaluation:
    """Compare scores (n, K) of images with their classes (n,)."""
    return Evaluation(
        names=model.names,
        confusion=confusion_matrix(class_indices, scores.argmax(dim=1), len(model.names)),
        error_uncalibrated=calibration_error(torch.softmax(scores, dim=1), class_indices),
        error_calibrated=calibration_error(model.calibrated(scores), class_indices),
        skipped=skipped,
        unknown=unknown,
    )


def _split(found: LabelledFiles, model: Model) -> tuple[LabelledFiles, tuple[UnknownClass, ...]]:
    """The images of classes that the model knows, and the classes that it does not know."""
    known, images = set(model.names), Counter(found.class_names[label] for label in found.labels)
    unknown = tuple(UnknownClass(name, images[name]) for name in found.class_names if name not in known)
    if len(unknown) == len(found.class_names):
        raise DataError(
            f"The model knows none of the classes in {printable(found.source)}: "
            f"{', '.join(printable(each.name) for each in unknown[:5])}{', …' if len(unknown) > 5 else ''}. "
            f"It knows: {', '.join(map(printable, model.names[:20]))}{', …' if len(model.names) > 20 else ''}. "
            "Use the same names, or teach the model these classes first."
        )
    return found.where(lambda path, name: name in known), unknown
