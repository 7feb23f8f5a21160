"""Evidence from stored features: confusions, learning curve, near-duplicates, and advice."""

from __future__ import annotations

import pytest

from engram.model import ModelFolder, evidence, load
from engram.model.evidence import advice
from engram.model.held_out import HeldOutScores


def test_evidence_counts_the_leave_one_out_predictions(calibrated_model: ModelFolder) -> None:
    model = load(calibrated_model, device="cpu")
    scores = HeldOutScores.of(model.learner)
    assert scores is not None
    predicted = scores.scores.argmax(1)
    found = evidence(model)
    assert found.accuracy == pytest.approx(float((predicted == scores.class_indices).double().mean()))
    for index, each in enumerate(found.classes):
        own = scores.class_indices == index
        assert each.held_out == int(own.sum())
        assert each.seen == model.metadata.seen[index]
        wrong = int((predicted[own] != index).sum())
        assert sum(other.images for other in each.confused_with) <= wrong
        assert each.curve[-1] == pytest.approx(each.accuracy)
    assert evidence(model) == found


@pytest.mark.parametrize(
    ("curve", "images", "expected"),
    [
        ((0.9, 1.0, 1.0), 30, "enough"),
        ((0.5, 0.7, 0.8), 30, "more"),
        ((0.8, 0.8, 0.8), 30, "different"),
        ((0.8, 0.78, 0.8), 10, "different"),  # a fifth of an image
        ((0.5, 0.7, 0.8), 5, "unknown"),
        ((), 30, "unknown"),
    ],
)
def test_more_images_are_advised_while_accuracy_rises(curve: tuple[float, ...], images: int, expected: str) -> None:
    assert advice(curve, images) == expected
