"""Scores of held-out samples against refitting without each of them."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from features_made import overlapping
from torch import Tensor
from torch.nn.functional import normalize

from engram.errors import DataError, TrainingError
from engram.features import CLASSIFIERS, LDA, Auto, LinearSVM, NearestMean, RandomProjection, Ridge, Softmax
from engram.features.classifiers import base, closed_form
from engram.features.classifiers.closed_form import ClosedForm, Moments
from engram.features.classifiers.linear import project, random_signs
from engram.network import parallel

CASES = {
    "balanced": ([9, 9, 9], 6),
    "unbalanced": ([12, 5, 2, 7], 6),
    "two classes": ([6, 11], 4),
    "a class of one sample": ([20, 1, 3], 5),
    "fewer samples than dimensions": ([4, 3, 2], 40),
    "fewer samples than dimensions, one of them alone": ([4, 3, 1, 2], 40),
}


def samples(case: str) -> tuple[Tensor, Tensor]:
    features, labels = overlapping(*CASES[case])
    return features.double(), labels


def class_weights(labels: Tensor) -> dict[int, float]:
    """n / (K n_c) of all samples, which leaving one out does not change."""
    counts = {label: int((labels == label).sum()) for label in labels.unique().tolist()}
    return {label: len(labels) / (len(counts) * count) for label, count in counts.items()}


def ridge_without(features: Tensor, labels: Tensor, skipped: int, penalty: float) -> Tensor:
    """Weighted least squares with an unpenalised constant, on all other samples."""
    weights = class_weights(labels)
    others = torch.arange(len(labels)) != skipped
    rows = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], dim=1)
    scales = torch.tensor([weights[label] for label in labels.tolist()], dtype=torch.float64)[others, None]
    targets = torch.where(labels[others, None] == labels.unique(), 1.0, -1.0).double()
    penalties = torch.tensor([penalty] * features.shape[1] + [0.0], dtype=torch.float64).diag()
    normal = rows[others].T @ (scales * rows[others]) + penalties
    return rows[skipped] @ torch.linalg.solve(normal, rows[others].T @ (scales * targets))


def scatter_without(features: Tensor, labels: Tensor, skipped: int | None) -> tuple[Tensor, Tensor]:
    """The class means and the weighted within-class covariance, divided by the number of all samples."""
    weights, means = class_weights(labels), []
    covariance = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for label in labels.unique().tolist():
        rows = [x for i, x in enumerate(features) if labels[i] == label and i != skipped]
        mean = torch.stack(rows).mean(dim=0) if rows else torch.zeros(features.shape[1], dtype=torch.float64)
        means.append(mean)
        for x in rows:
            covariance += weights[label] / len(labels) * torch.outer(x - mean, x - mean)
    return torch.stack(means), covariance


def lda_without(features: Tensor, labels: Tensor, skipped: int, shrinkage: float) -> Tensor:
    dimension = features.shape[1]
    variance = scatter_without(features, labels, None)[1].trace() / dimension  # of all samples
    means, covariance = scatter_without(features, labels, skipped)
    shrunk = (1 - shrinkage) * covariance + shrinkage * variance * torch.eye(dimension, dtype=torch.float64)
    x = features[skipped]
    return torch.stack([-(x - mean) @ torch.linalg.solve(shrunk, x - mean) / 2 for mean in means])


def nearest_mean_without(features: Tensor, labels: Tensor, skipped: int) -> Tensor:
    distances = []
    for label in labels.unique().tolist():
        rows = [x / x.norm() for i, x in enumerate(features) if labels[i] == label and i != skipped]
        mean = normalize(torch.stack(rows).mean(dim=0), dim=0) if rows else torch.zeros_like(features[0])
        distances.append(-(features[skipped] / features[skipped].norm() - mean).square().sum())
    return torch.stack(distances)


def by_refitting(features: Tensor, labels: Tensor, refit: Callable[[int], Tensor]) -> Tensor:
    """The scores of each sample by a classifier that was fitted without it, and -inf for a class without samples."""
    scores = torch.stack([refit(i) for i in range(len(features))])
    for i, label in enumerate(labels):
        if (labels == label).sum() == 1:
            scores[i, labels.unique().tolist().index(int(label))] = -torch.inf
    return scores


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("penalty", [0.1, 1.0, 30.0])
def test_ridge_leaves_out_one_sample_as_a_refit_does(case: str, penalty: float) -> None:
    features, labels = samples(case)
    expected = by_refitting(features, labels, lambda i: ridge_without(features, labels, i, penalty))
    found = Ridge(penalty).held_out_scores(features, labels)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shrinkage", [0.05, 0.5, 1.0])
def test_lda_leaves_out_one_sample_as_a_refit_does(case: str, shrinkage: float) -> None:
    features, labels = samples(case)
    expected = by_refitting(features, labels, lambda i: lda_without(features, labels, i, shrinkage))
    found = LDA(shrinkage).held_out_scores(features, labels)
    # The scores of LDA are log-likelihoods up to a term that all classes share.
    torch.testing.assert_close(found.double().log_softmax(dim=1), expected.log_softmax(dim=1), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_nearest_mean_leaves_out_one_sample_as_a_refit_does(case: str) -> None:
    features, labels = samples(case)
    features = features * torch.linspace(0.5, 3, len(features))[:, None]  # it normalises them itself
    expected = by_refitting(features, labels, lambda i: nearest_mean_without(features, labels, i))
    torch.testing.assert_close(NearestMean().held_out_scores(features, labels).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [8, 500])  # fewer and more than samples
def test_a_random_projection_leaves_out_one_sample_as_a_refit_does(case: str, width: int) -> None:
    features, labels = samples(case)
    width = min(width, 10 * len(features))
    lifted = project(features, random_signs(features.shape[1], width)).double()
    penalty = 0.1 * width / (2 * features.shape[1])
    expected = by_refitting(features, labels, lambda i: ridge_without(lifted, labels, i, penalty))
    found = RandomProjection(width, relative_penalty=0.1).held_out_scores(features, labels)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classifier", [LinearSVM(), Softmax()])
def test_without_a_closed_form_each_of_five_folds_is_held_out(classifier: LinearSVM | Softmax) -> None:
    features, labels = overlapping([12, 5, 2, 1], 6)
    folds = []
    for i, label in enumerate(labels):
        earlier = int((labels[:i] == label).sum())
        folds.append(earlier % 5 if (labels == label).sum() > 1 else None)  # None: never held out
    found = classifier.held_out_scores(features, labels)
    for i, fold in enumerate(folds):
        training = torch.tensor([other != fold or other is None for other in folds])
        if fold is None:
            assert found[i].isinf().tolist() == [False, False, False, True]
        else:
            expected = dataclasses.replace(classifier).fit(features[training], labels[training]).scores(features[[i]])
            torch.testing.assert_close(found[[i]], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "classifier", [Ridge(), Ridge(0.3), LDA(0.2), LDA(0.5), NearestMean(), RandomProjection(100, 0.1)]
)
@pytest.mark.parametrize("sizes", [[40, 30, 5], [4, 4]])
def test_coarse_scores_are_close_to_those_in_float64(classifier: ClosedForm, sizes: list[int]) -> None:
    features, labels = overlapping(sizes, 32)
    shared, rows = Moments(features, labels), torch.arange(len(labels))
    exact, coarse = classifier.held_out(shared, rows), classifier.held_out(shared, rows, coarse=True)
    torch.testing.assert_close(coarse, exact, rtol=1e-4, atol=1e-3)


def test_float32_is_not_used_for_badly_conditioned_systems() -> None:
    features, labels = overlapping([40, 30, 50], 8, noise=0.1)
    shared, rows = Moments(features, labels), torch.arange(len(labels))
    exact, coarse = Ridge(1e-7).held_out(shared, rows), Ridge(1e-7).held_out(shared, rows, coarse=True)
    assert torch.equal(exact, coarse)


@pytest.mark.parametrize("name", CLASSIFIERS)
class TestEveryClassifier:
    def test_its_shape_and_type_are_those_of_scores(self, name: str) -> None:
        features, labels = overlapping([9, 7, 5], 6)
        scores = CLASSIFIERS[name]().held_out_scores(features, labels)
        assert scores.shape == (21, 3) and scores.dtype == torch.float32 and bool(scores.isfinite().all())

    def test_selected_rows_are_those_of_all(self, name: str) -> None:
        features, labels = overlapping([9, 7, 5], 6)
        rows = torch.tensor([20, 3, 3, 0])
        scores = CLASSIFIERS[name]().held_out_scores(features, labels)
        torch.testing.assert_close(
            CLASSIFIERS[name]().held_out_scores(features, labels, rows), scores[rows], rtol=1e-5, atol=1e-5
        )

    def test_the_only_sample_of_a_class_is_never_credited(self, name: str) -> None:
        features, labels = overlapping([9, 1, 5, 1], 6)
        scores = CLASSIFIERS[name]().held_out_scores(features, labels)
        alone = (labels == 6) | (labels == 12)
        assert scores[labels == 6].isinf().tolist() == [[False, True, False, False]]
        assert scores[labels == 12].isinf().tolist() == [[False, False, False, True]]
        assert bool(scores[~alone].isfinite().all())

    def test_one_sample_in_all_is_not_credited_either(self, name: str) -> None:
        assert CLASSIFIERS[name]().held_out_scores(torch.ones(1, 4), torch.tensor([7])).tolist() == [[-torch.inf]]

    def test_held_out_scores_do_not_change_the_fitted_state(self, name: str) -> None:
        features, labels = overlapping([9, 7, 5], 6)
        classifier = CLASSIFIERS[name]().fit(features, labels)
        before = {key: tensor.clone() for key, tensor in classifier.state().items()}
        classifier.held_out_scores(features[:12], labels[:12])
        assert all(torch.equal(tensor, before[key]) for key, tensor in classifier.state().items())

    def test_held_out_scores_are_less_certain_of_random_labels(self, name: str) -> None:
        features = normalize(torch.randn(60, 30, generator=torch.Generator().manual_seed(0)))
        labels = torch.arange(60) % 3
        classifier = CLASSIFIERS[name]().fit(features, labels)
        held_out = (classifier.held_out_scores(features, labels).argmax(dim=1) == labels).float().mean()
        assert held_out < 0.5 < (classifier.scores(features).argmax(dim=1) == labels).float().mean()

    def test_only_rank_0_computes(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        inside = []

        def once(compute: Callable[[], object]) -> object:
            assert not inside, "the other processes would wait for ever"
            inside.append(True)
            value = compute()
            inside.clear()
            calls.append(True)
            return value

        calls: list[bool] = []
        monkeypatch.setattr(parallel, "broadcast", once)
        features, labels = overlapping([9, 7, 5], 6)
        CLASSIFIERS[name]().fit(features, labels).held_out_scores(features, labels)
        assert len(calls) == 2

    def test_wrong_input_is_refused(self, name: str) -> None:
        with pytest.raises(DataError, match=r"\(3, 4\) and \(2,\)"):
            CLASSIFIERS[name]().held_out_scores(torch.ones(3, 4), torch.tensor([0, 1]))
        with pytest.raises(TrainingError, match="NaN"):
            CLASSIFIERS[name]().held_out_scores(torch.full((3, 4), torch.inf), torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("classifier", [Ridge(), LDA(), NearestMean(), RandomProjection(20), Auto()])
def test_results_do_not_depend_on_the_block_size(
    classifier: ClosedForm | Auto, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, labels = overlapping([30, 8, 12], 10)
    weight, scores = classifier.fit(features, labels).weight_, classifier.held_out_scores(features, labels)
    monkeypatch.setattr(closed_form, "BLOCK_ROWS", 7)
    monkeypatch.setattr(base, "CHECKED_ROWS", 3)
    monkeypatch.setattr("engram.features.memory.SUMMED_ROWS", 3)
    torch.testing.assert_close(classifier.fit(features, labels).weight_, weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(classifier.held_out_scores(features, labels), scores, rtol=1e-4, atol=1e-5)


def test_only_one_block_of_samples_is_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = overlapping([60, 50, 40], 10)
    monkeypatch.setattr(closed_form, "BLOCK_ROWS", 16)
    converted = []

    def record(rows: Tensor) -> Tensor:
        converted.append(len(rows))
        return rows

    shared = Moments(features, labels, lift=record)
    for classifier in (Ridge(), LDA(), NearestMean()):
        classifier.solve(shared)
        classifier.held_out(shared, torch.arange(len(labels)))
    assert max(converted) == 16
