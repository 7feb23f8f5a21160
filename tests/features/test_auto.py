"""The automatic choice of a classifier, the random projection, and how candidates are judged."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from features_made import overlapping
from safetensors.torch import load_file, save_file
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor
from torch.nn.functional import normalize

from engram.errors import DataError, TrainingError
from engram.features import LDA, Auto, NearestMean, RandomProjection, Ridge
from engram.features.classifiers import closed_form
from engram.features.classifiers.closed_form import balanced_accuracy, judged_rows
from engram.features.classifiers.linear import CANDIDATES, random_signs


def separable() -> tuple[Tensor, Tensor]:
    return overlapping([10] * 4, 300, noise=0.3)


def in_a_row(distance: float = 0.5) -> tuple[Tensor, Tensor]:
    """Seven classes along a line: least squares predicts the outer ones for those between them (masking)."""
    labels = torch.arange(350) % 7
    features = 0.03 * torch.randn(350, 300, generator=torch.Generator().manual_seed(0))
    features[:, 0] += 1
    features[:, 1] += distance * (labels / 3 - 1)
    return normalize(features), labels


def in_a_short_row() -> tuple[Tensor, Tensor]:
    return in_a_row(0.3)


def checkerboard() -> tuple[Tensor, Tensor]:
    """Exclusive or, which no linear classifier solves."""
    points = torch.rand(300, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return normalize(torch.cat([points, torch.ones(300, 1)], dim=1)), (points[:, 0] * points[:, 1] > 0).long()


@pytest.mark.parametrize(
    ("make", "kind"),
    [(separable, Ridge), (in_a_row, LDA), (in_a_short_row, NearestMean), (checkerboard, RandomProjection)],
)
def test_the_most_accurate_candidate_is_chosen(make: Callable[[], tuple[Tensor, Tensor]], kind: type) -> None:
    assert type(Auto().fit(*make()).chosen_) is kind


@pytest.mark.parametrize("seed", range(5))
def test_another_candidate_must_be_significantly_more_accurate_than_the_first(seed: int) -> None:
    features, labels = overlapping([60, 12, 3, 40, 1], 24, noise=2.5, seed=seed)
    judged = labels != 15  # all but the class of one sample

    def right(classifier: object) -> Tensor:
        predicted = classifier.held_out_scores(features, labels).argmax(dim=1)  # type: ignore[attr-defined]
        return labels.unique()[predicted][judged] == labels[judged]

    def balanced(correct: Tensor) -> float:
        return float(torch.stack([correct[labels[judged] == each].double().mean() for each in (3, 6, 9, 12)]).mean())

    found = [right(candidate) for candidate in CANDIDATES]
    accuracies = []
    for each in found:
        wins, losses = int((each & ~found[0]).sum()), int((found[0] & ~each).sum())
        accuracies.append(balanced(each) if each is found[0] or wins - losses > 2 * (wins + losses) ** 0.5 else 0.0)
    assert Auto().fit(features, labels).chosen_ == CANDIDATES[accuracies.index(max(accuracies))]


def test_of_equally_accurate_candidates_the_first_is_chosen() -> None:
    features, labels = separable()
    fitted = Auto().fit(features, labels)
    assert (fitted.held_out_scores(features, labels).argmax(dim=1) == labels // 3 - 1).all()
    assert fitted.chosen_ == Ridge(1.0) and fitted.description == "ridge (penalty 1)"


def test_scores_are_those_of_the_chosen_classifier() -> None:
    features, labels = in_a_row()
    fitted = Auto().fit(features, labels)
    alone = LDA(fitted.chosen_.shrinkage).fit(features, labels)  # type: ignore[attr-defined]
    assert torch.equal(fitted.scores(features), alone.scores(features))
    assert torch.equal(fitted.weight_, alone.weight_) and torch.equal(fitted.intercept_, alone.intercept_)
    expected = alone.held_out_scores(features, labels)
    assert torch.equal(fitted.held_out_scores(features, labels), expected)
    assert torch.equal(Auto().held_out_scores(features, labels), expected)  # it chooses, if nothing was chosen


def test_held_out_scores_of_other_samples_are_not_those_of_the_fit() -> None:
    features, labels = in_a_row()
    fitted = Auto().fit(features, labels)
    expected = LDA(fitted.chosen_.shrinkage).held_out_scores(features[10:], labels[10:])  # type: ignore[attr-defined]
    assert torch.equal(fitted.held_out_scores(features[10:], labels[10:]), expected)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [6]])
def test_without_two_samples_of_a_class_the_nearest_mean_is_chosen(sizes: list[int]) -> None:
    assert Auto().fit(*overlapping(sizes, 8)).chosen_ == NearestMean()


def test_random_projections_are_considered_for_few_dimensions_only() -> None:
    features, labels = checkerboard()
    assert type(Auto().fit(features, labels).chosen_) is RandomProjection
    wide = torch.cat([features, torch.zeros(300, 257)], dim=1)  # the same, in more dimensions
    assert type(Auto().fit(wide, labels).chosen_) is not RandomProjection


@pytest.mark.parametrize("make", [separable, in_a_row, in_a_short_row, checkerboard])
def test_a_saved_choice_is_restored(make: Callable[[], tuple[Tensor, Tensor]], tmp_path: Path) -> None:
    features, labels = make()
    fitted = Auto().fit(features, labels)
    save_file(fitted.state(), tmp_path / "classifier.safetensors")
    restored = Auto().restore(load_file(tmp_path / "classifier.safetensors"))
    assert restored.chosen_ == fitted.chosen_ and restored.description == fitted.description
    assert torch.equal(restored.scores(features), fitted.scores(features))
    found, expected = (each.held_out_scores(features, labels) for each in (restored, fitted))
    assert torch.equal(found, expected)


def test_the_indices_of_the_candidates_do_not_change() -> None:
    """Saved models store the indices: only add candidates at the end."""
    assert list(CANDIDATES) == [
        *(Ridge(1.0), Ridge(0.3), Ridge(3.0), LDA(0.2), LDA(0.5), NearestMean(), RandomProjection(2000)),
    ]


def test_an_unknown_choice_is_refused() -> None:
    state = Auto().fit(*separable()).state()
    with pytest.raises(DataError, match="99"):
        Auto().restore({**state, "chosen": torch.tensor(99)})
    with pytest.raises(DataError, match="chosen"):
        Auto().restore({name: tensor for name, tensor in state.items() if name != "chosen"})


@pytest.mark.parametrize("threads", [1, 3])
def test_fitting_does_not_change_the_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Auto().fit(*separable())
        assert torch.get_num_threads() == threads
        with pytest.raises(TrainingError):
            Auto().fit(torch.full((10, 3), 1e300, dtype=torch.float64), torch.arange(10) % 2)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_choice_does_not_depend_on_the_number_of_threads() -> None:
    features, labels = in_a_row()
    alone = Auto().fit(features, labels)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = Auto().fit(features, labels)
    finally:
        torch.set_num_threads(before)
    assert together.chosen_ == alone.chosen_
    assert torch.equal(together.weight_, alone.weight_)


# How candidates are judged


def test_balanced_accuracy_matches_scikit_learn() -> None:
    draws = torch.Generator().manual_seed(0)
    members = torch.randint(0, 5, (200,), generator=draws) ** 2 // 4  # unbalanced, and one of them is missing
    scores = torch.randn(200, 5, generator=draws)
    scores[torch.arange(200), members] += 1
    predicted = scores.argmax(dim=1)
    known = np.isin(predicted, members)  # scikit-learn warns of predicted that are no class
    expected = balanced_accuracy_score(members[known], predicted[known])
    assert balanced_accuracy(scores[known], members[known]) == pytest.approx(expected)


def test_all_samples_are_judged_if_they_are_few() -> None:
    members = torch.tensor([0, 1, 1, 2, 0, 3])
    assert judged_rows(members).tolist() == [0, 1, 2, 4]  # but those that are alone in their class
    assert judged_rows(torch.arange(3)).tolist() == []


def test_many_samples_are_judged_by_some_of_each_class_evenly_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "MOST_JUDGED", 50)
    members = torch.arange(4).repeat_interleave(torch.tensor([400, 100, 7, 1]))
    rows = judged_rows(members)
    assert torch.bincount(members[rows]).tolist() == [21, 21, 7]  # 7 is all there are, and 22 of the others too many
    assert rows[:21].diff().tolist().count(19) + rows[:21].diff().tolist().count(20) == 20
    many_classes = judged_rows(torch.arange(120).repeat(2))
    assert len(many_classes) <= 50 and many_classes.unique().numel() == len(many_classes)


def test_some_of_the_samples_are_enough_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = checkerboard()
    monkeypatch.setattr(closed_form, "MOST_JUDGED", 100)
    assert type(Auto().fit(features, labels).chosen_) is RandomProjection


# Random projections


@pytest.mark.parametrize(("count", "width"), [(100, 40), (10, 100)])  # solved in the space of the features, or samples
def test_a_random_projection_is_ridge_on_rectified_products(count: int, width: int) -> None:
    features, labels = overlapping([count, count // 2, count // 5], 12)
    fitted = RandomProjection(width, relative_penalty=0.3).fit(features, labels)
    signs = random_signs(12, width).double().numpy()
    lifted = np.maximum(features.double().numpy() @ signs / np.sqrt(12), 0)
    theirs = RidgeClassifier(alpha=0.3 * width / 24, class_weight="balanced").fit(lifted, labels.numpy())
    np.testing.assert_allclose(fitted.scores(features).numpy(), theirs.decision_function(lifted), atol=1e-4)


def test_a_random_projection_chooses_its_penalty_by_leave_one_out() -> None:
    features, labels = checkerboard()
    chosen = RandomProjection(400).held_out_scores(features, labels)
    found = [RandomProjection(400, penalty).held_out_scores(features, labels) for penalty in (0.001, 0.01, 0.1, 1.0)]
    accuracies = [balanced_accuracy(scores, labels) for scores in (chosen, *found)]
    assert accuracies[0] == max(accuracies) > min(accuracies)


def test_a_random_projection_is_no_wider_than_ten_features_a_sample() -> None:
    features, labels = overlapping([4, 3], 12)
    fitted = RandomProjection().fit(features, labels)
    assert fitted.weight_.shape == (2, 70) and fitted.description == "random projection (width 70)"
    assert sorted(fitted.state()) == ["classes", "dimension", "intercept", "weight"]


def test_the_random_signs_never_change() -> None:
    signs = random_signs(70, 33)
    assert signs.shape == (70, 33) and signs.abs().eq(1).all() and signs.mean().abs() < 0.1
    bits = np.packbits((signs.T > 0).numpy()).tobytes()
    assert hashlib.sha256(bits).hexdigest() == "514c8531b0856e5b0afc6fbdf174fa5c455d535629fb65e386f27c5b386f69e9"
    assert torch.equal(random_signs(70, 5), signs[:, :5])
