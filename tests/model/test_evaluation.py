"""`evaluate`: accuracy and confusion matrix, compared with scikit-learn and the definitions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from images_made import encoded
from models_made import DAISY, FORMULA, NAMES, TULIP
from PIL import Image
from sklearn.metrics import classification_report, confusion_matrix
from torch import Tensor

from engram.data.labelled import SkippedFile
from engram.errors import DataError, UsageError
from engram.model import Evaluation, ModelFolder, evaluate, load
from engram.model.held_out import Accuracy
from engram.model.prediction import EVALUATION_BATCH, UnknownClass

CLASSES = ("emu", "ant", "cat", "dog", "bee")  # unsorted, as they were learned
SIDE = 6
WEIGHTS = torch.tensor(np.random.default_rng(3).normal(0, 0.02, (3, len(CLASSES))))
TEMPERATURE = 0.4


class ByColour:
    """A model that classifies by the mean colour of an image, and is often wrong."""

    names = CLASSES
    image_size = SIDE

    def class_index(self, name: str) -> int:
        return self.names.index(name)

    def scores(self, inputs: Tensor) -> Tensor:
        return (inputs.double().mean((1, 2)) - 128) @ WEIGHTS

    def calibrated(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores / TEMPERATURE, dim=1)


def paint(folder: Path, counts: dict[str, int], seed: int = 0) -> dict[str, list[np.ndarray]]:
    """Images of one colour each; the colours, by class."""
    draws = np.random.default_rng(seed)
    colours: dict[str, list[np.ndarray]] = {}
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        colours[name] = [draws.integers(0, 256, 3) for _ in range(count)]
        for number, colour in enumerate(colours[name]):
            pixels = np.broadcast_to(colour, (SIDE, SIDE, 3)).astype(np.uint8)
            (folder / name / f"{number:04}.png").write_bytes(encoded(pixels, "PNG"))
    return colours


def answers(colours: dict[str, list[np.ndarray]]) -> tuple[list[str], list[str], np.ndarray]:
    """True and predicted class of each image and its scores, computed without engram."""
    true = [name for name, own in sorted(colours.items()) for _ in own]
    scores = np.array([(colour - 128.0) @ WEIGHTS.numpy() for _, own in sorted(colours.items()) for colour in own])
    return true, [CLASSES[class_index] for class_index in scores.argmax(1)], scores


def calibration_error(scores: np.ndarray, true: list[str]) -> float:
    """|accuracy − confidence| in fifteen bins of confidence, weighted by their samples: the definition."""
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    confidence, predicted = shares.max(1), shares.argmax(1)
    right = np.array([CLASSES[class_index] for class_index in predicted]) == np.array(true)
    total = 0.0
    for lower in np.arange(15) / 15:
        inside = (confidence >= lower) & (confidence < lower + 1 / 15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return float(total)


COUNTS = {"ant": 40, "bee": 3, "cat": 25, "dog": 1, "emu": 31}


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, dict[str, list[np.ndarray]]]:
    folder = tmp_path_factory.mktemp("painted")
    colours = paint(folder, COUNTS)
    return evaluate(ByColour(), folder), colours  # type: ignore[arg-type]


def test_confusion_matrix_matches_scikit_learn(painted: tuple[Evaluation, dict[str, list[np.ndarray]]]) -> None:
    evaluation, colours = painted
    true, predicted, _ = answers(colours)
    assert evaluation.names == CLASSES
    assert evaluation.confusion.tolist() == confusion_matrix(true, predicted, labels=CLASSES).tolist()
    assert evaluation.images == 100 and 0 < evaluation.accuracy < 1


def test_accuracies_match_scikit_learn(painted: tuple[Evaluation, dict[str, list[np.ndarray]]]) -> None:
    evaluation, colours = painted
    true, predicted, _ = answers(colours)
    report = classification_report(true, predicted, labels=CLASSES, output_dict=True, zero_division=np.nan)
    recalls = [report[name]["recall"] for name in CLASSES]
    precisions = [report[name]["precision"] for name in CLASSES]
    assert evaluation.accuracy == pytest.approx(np.mean(np.array(true) == np.array(predicted)))
    assert evaluation.mean_accuracy == pytest.approx(np.mean(recalls))
    assert evaluation.per_class() == pytest.approx(recalls)
    assert [np.nan if each is None else each for each in evaluation.precision()] == pytest.approx(
        precisions, nan_ok=True
    )


def test_calibration_errors_match_the_definition(
    painted: tuple[Evaluation, dict[str, list[np.ndarray]]],
) -> None:
    evaluation, colours = painted
    true, _, scores = answers(colours)
    assert evaluation.error_uncalibrated == pytest.approx(calibration_error(scores, true), abs=1e-9)
    assert evaluation.error_calibrated == pytest.approx(calibration_error(scores / TEMPERATURE, true), abs=1e-9)
    assert evaluation.error_calibrated != pytest.approx(evaluation.error_uncalibrated, abs=0.01)


def test_all_confusions_are_listed_most_frequent_first(painted: tuple[Evaluation, dict[str, list[np.ndarray]]]) -> None:
    evaluation, colours = painted
    true, predicted, _ = answers(colours)
    pairs = [pair for pair in zip(true, predicted, strict=True) if pair[0] != pair[1]]
    mistakes = evaluation.mistakes()
    assert {(one, other): count for one, other, count in mistakes} == {pair: pairs.count(pair) for pair in pairs}
    counts = [count for *_, count in mistakes]
    assert counts == sorted(counts, reverse=True)


def test_evaluation_survives_json(painted: tuple[Evaluation, dict[str, list[np.ndarray]]]) -> None:
    evaluation, _ = painted
    output = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    assert output["confusion"] == evaluation.confusion.tolist() and output["images"] == 100
    assert [each["images"] for each in output["classes"]] == [COUNTS[name] for name in CLASSES]
    assert output["accuracy"] == evaluation.accuracy and output["skipped"] == []


def test_absent_classes_have_no_accuracy_and_do_not_count(tmp_path: Path) -> None:
    colours = paint(tmp_path, {"cat": 12, "ant": 5})
    evaluation = evaluate(ByColour(), tmp_path)  # type: ignore[arg-type]
    true, predicted, _ = answers(colours)
    assert evaluation.confusion.tolist() == confusion_matrix(true, predicted, labels=CLASSES).tolist()
    shares = dict(zip(CLASSES, evaluation.per_class(), strict=True))
    assert {name for name, share in shares.items() if share is None} == {"emu", "dog", "bee"}
    assert evaluation.mean_accuracy == pytest.approx((shares["cat"] + shares["ant"]) / 2)  # type: ignore[operator]
    never_predicted = [name for name in CLASSES if name not in predicted]
    assert [name for name, each in zip(CLASSES, evaluation.precision(), strict=True) if each is None] == never_predicted


def test_more_images_than_a_batch_are_all_evaluated(tmp_path: Path) -> None:
    count = EVALUATION_BATCH + 3
    draws = np.random.default_rng(1)
    photo = Image.fromarray(draws.integers(0, 256, (2, 2, 3), dtype=np.uint8))
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        photo.save(tmp_path / name / "0.png")
    for number in range(1, count):
        (tmp_path / "ant" / f"{number}.png").symlink_to("0.png")
    evaluation = evaluate(ByColour(), tmp_path)  # type: ignore[arg-type]
    assert evaluation.images == count + 1
    assert sorted(evaluation.confusion.sum(1).tolist()) == [0, 0, 0, 1, count]


def test_unreadable_images_are_listed_and_do_not_count(tmp_path: Path) -> None:
    paint(tmp_path, {"ant": 4, "bee": 2})
    (tmp_path / "ant" / "0001.png").write_bytes(b"")
    (tmp_path / "bee" / "notes.txt").touch()
    evaluation = evaluate(ByColour(), tmp_path)  # type: ignore[arg-type]
    assert evaluation.images == 5
    assert [left.path.name for left in evaluation.skipped] == ["notes.txt", "0001.png"]
    assert evaluation.skipped[1] == SkippedFile(tmp_path / "ant" / "0001.png", "It is empty. Copy it again.")
    assert evaluation.to_json()["skipped"][1] == {
        "path": str(tmp_path / "ant" / "0001.png"),
        "reason": "It is empty. Copy it again.",
    }


def test_unknown_classes_are_counted_and_change_no_other_number(tmp_path: Path) -> None:
    counts = {"cat": 12, "ant": 5, "bee": 9}
    paint(tmp_path / "known", counts)
    expected = evaluate(ByColour(), tmp_path / "known")  # type: ignore[arg-type]
    paint(tmp_path / "all", counts)
    paint(tmp_path / "all", {"yak\u202e": 3, "Emu": 1, "aardvark": 2}, seed=1)
    found = evaluate(ByColour(), tmp_path / "all")  # type: ignore[arg-type]
    assert found.unknown == (UnknownClass("Emu", 1), UnknownClass("aardvark", 2), UnknownClass("yak\u202e", 3))
    assert found.images == 26 and found.confusion.tolist() == expected.confusion.tolist()
    output = found.to_json()
    assert output.pop("unknown") == [
        {"name": "Emu", "images": 1},
        {"name": "aardvark", "images": 2},
        {"name": "yak\u202e", "images": 3},
    ]
    assert expected.unknown == ()
    assert output == {key: value for key, value in expected.to_json().items() if key != "unknown"}


def test_images_of_unknown_classes_are_not_read(tmp_path: Path) -> None:
    paint(tmp_path, {"ant": 2, "yak": 1})
    (tmp_path / "yak" / "0000.png").write_bytes(b"")
    evaluation = evaluate(ByColour(), tmp_path)  # type: ignore[arg-type]
    assert evaluation.unknown == (UnknownClass("yak", 1),) and evaluation.skipped == ()


def test_a_folder_without_any_known_class_is_refused(tmp_path: Path) -> None:
    paint(tmp_path, {"yak\u202e": 1, "Bee": 1})
    with pytest.raises(DataError) as caught:
        evaluate(ByColour(), tmp_path)  # type: ignore[arg-type]
    for fact in (str(tmp_path), r"Bee, yak\u202e.", "emu, ant, cat, dog, bee."):
        assert fact in str(caught.value)
    paint(tmp_path, {f"new {number}": 1 for number in range(8)})
    with pytest.raises(DataError, match=r": Bee, new 0, new 1, new 2, new 3, …\. It"):
        evaluate(ByColour(), tmp_path)  # type: ignore[arg-type]


def test_interval_is_over_all_images_of_known_classes(painted: tuple[Evaluation, dict[str, list[np.ndarray]]]) -> None:
    evaluation, colours = painted
    true, predicted, _ = answers(colours)
    right = sum(one == other for one, other in zip(true, predicted, strict=True))
    assert evaluation.interval == Accuracy(right, 100).interval
    assert evaluation.to_json()["interval"] == list(evaluation.interval)


def test_a_model_of_vectors_cannot_evaluate_images(tmp_path: Path) -> None:
    model = ByColour()
    model.image_size = None  # type: ignore[assignment]
    with pytest.raises(UsageError, match="vectors"):
        evaluate(model, tmp_path)  # type: ignore[arg-type]


def test_a_real_model_is_evaluated_on_its_training_images(small_model: ModelFolder) -> None:
    model = load(small_model)
    evaluation = evaluate(model, small_model.path.parent / "1")
    assert evaluation.names == NAMES and evaluation.images == 48
    assert evaluation.confusion.sum(1).tolist() == [24, 24, 0]
    assert evaluation.accuracy > 0.9
    assert dict(zip(NAMES, evaluation.per_class(), strict=True))[FORMULA] is None
    only = evaluate(load(small_model, version=1), small_model.path.parent / "1")
    assert only.names == (TULIP, DAISY)
