"""Each loss against its equation, worked out number by number in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from engram.network.losses import (
    feature_distillation,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    softmax_distillation,
)

SCORES = [[0.5, -1.0, 2.0], [3.0, 0.0, -0.25]]
TEACHER = [[1.5, -2.0, 0.0], [-1.0, 0.5, 0.75]]


def tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def test_sigmoid_cross_entropy_of_one_hot_targets() -> None:
    targets = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    total = 0.0
    for scores, row in zip(SCORES, targets, strict=True):
        for score, target in zip(scores, row, strict=True):
            total -= math.log(sigmoid(score) if target else 1 - sigmoid(score))
    loss = sigmoid_cross_entropy(tensor(SCORES), tensor(targets))
    assert loss.item() == pytest.approx(total / 2, rel=1e-12)


def test_sigmoid_cross_entropy_of_zero_scores_by_hand() -> None:
    # Every sigmoid is a half, so each of the 4 × 5 answers costs log 2, whatever is asked.
    loss = sigmoid_cross_entropy(torch.zeros(4, 5), torch.eye(5)[:4])
    assert loss.item() == pytest.approx(5 * math.log(2), rel=1e-6)


def test_sigmoid_cross_entropy_of_a_teachers_answers() -> None:
    total = 0.0
    for scores, answers in zip(SCORES, TEACHER, strict=True):
        for score, answer in zip(scores, answers, strict=True):
            p, q = sigmoid(answer), sigmoid(score)
            total -= p * math.log(q) + (1 - p) * math.log(1 - q)
    loss = sigmoid_cross_entropy(tensor(SCORES), tensor(TEACHER).sigmoid())
    assert loss.item() == pytest.approx(total / 2, rel=1e-12)


def test_sigmoid_cross_entropy_stays_finite_for_extreme_scores() -> None:
    scores = torch.tensor([[1000.0, -1000.0]])
    assert sigmoid_cross_entropy(scores, torch.tensor([[1.0, 0.0]])).item() == 0
    assert sigmoid_cross_entropy(scores, torch.tensor([[0.0, 1.0]])).item() == 2000


def test_the_gradient_of_sigmoid_cross_entropy_is_answer_minus_target_over_the_batch() -> None:
    scores = tensor(SCORES).requires_grad_()
    targets = [[0.0, 0.3, 1.0], [1.0, 0.0, 0.6]]
    sigmoid_cross_entropy(scores, tensor(targets)).backward()
    expected = [
        [(sigmoid(score) - target) / 2 for score, target in zip(row, wanted, strict=True)]
        for row, wanted in zip(SCORES, targets, strict=True)
    ]
    torch.testing.assert_close(scores.grad, tensor(expected), rtol=1e-12, atol=0)


def test_softmax_cross_entropy_is_the_mean_over_the_batch() -> None:
    expected = -(math.log(softmax(SCORES[0])[2]) + math.log(softmax(SCORES[1])[0])) / 2
    assert softmax_cross_entropy(tensor(SCORES), torch.tensor([2, 0])).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_softmax_distillation_is_the_cross_entropy_against_the_teachers_probabilities(temperature: float) -> None:
    total = 0.0
    for scores, answers in zip(SCORES, TEACHER, strict=True):
        wanted = softmax([answer / temperature for answer in answers])
        found = softmax([score / temperature for score in scores])
        total -= sum(p * math.log(q) for p, q in zip(wanted, found, strict=True))
    loss = softmax_distillation(tensor(SCORES), tensor(TEACHER), temperature)
    assert loss.item() == pytest.approx(total / 2, rel=1e-12)


def test_softmax_distillation_is_least_where_student_and_teacher_agree() -> None:
    student = tensor(TEACHER).requires_grad_()
    softmax_distillation(student, tensor(TEACHER)).backward()
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


def test_feature_distillation_is_one_minus_the_mean_cosine() -> None:
    features = tensor([[3.0, 4.0], [1.0, 0.0], [2.0, 2.0]])
    teacher = tensor([[4.0, 3.0], [0.0, 5.0], [-1.0, -1.0]])
    cosines = [24 / 25, 0.0, -1.0]
    assert feature_distillation(features, teacher).item() == pytest.approx(1 - sum(cosines) / 3, rel=1e-12)


def test_feature_distillation_is_computed_in_float32() -> None:
    old = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = (old.float() + 0.03 * torch.randn(64, 32, generator=torch.Generator().manual_seed(1))).bfloat16()
    exact = feature_distillation(new.double(), old.double())
    assert float(feature_distillation(new, old)) == pytest.approx(float(exact), rel=1e-3)


def test_feature_distillation_does_not_depend_on_lengths() -> None:
    features, teacher = tensor(SCORES), tensor(TEACHER)
    loss = feature_distillation(features, teacher)
    torch.testing.assert_close(feature_distillation(features * 7, teacher * 0.01), loss, rtol=1e-12, atol=0)
    assert feature_distillation(features, features * 3).item() == pytest.approx(0, abs=1e-12)
