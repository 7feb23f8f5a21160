"""Statistics of classes: checked against numpy, and against the same computed from all samples at once."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.nn.functional import normalize

from engram.features import CLASSIFIERS, LDA, NearestMean, Ridge, Statistics, statistics_bytes

every_covariance = pytest.mark.parametrize("covariance", ["none", "shared", "class"])


def drawn(count: int = 90, classes: int = 3, dimension: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    mixing = torch.randn(classes, dimension, dimension, generator=draws)
    rows = (torch.randn(count, 1, dimension, generator=draws) @ mixing[labels]).squeeze(1)
    return normalize(rows + 4 * torch.randn(classes, dimension, generator=draws)[labels]), labels


def same(left: Statistics, right: Statistics) -> bool:
    pairs = zip(left.tensors().values(), right.tensors().values(), strict=True)
    return all(torch.allclose(one.double(), other.double(), atol=1e-6) for one, other in pairs)


def test_means_and_covariances_are_those_of_numpy() -> None:
    rows, labels = drawn()
    found = Statistics.of(rows, labels, 3, "class")
    for class_index in range(3):
        own = rows[labels == class_index].numpy().astype(np.float64)
        assert np.allclose(found.means[class_index], own.mean(0), atol=1e-6)
        assert np.allclose(found.covariances[class_index], np.cov(own.T, bias=True), atol=1e-6)


@every_covariance
def test_statistics_of_two_parts_join_to_those_of_the_whole(covariance: str) -> None:
    rows, labels = drawn()
    first = labels < 2
    first[60:] = False  # later, class 0 and 1 get more samples, and class 2 is new
    parts = [
        Statistics.of(rows[part], labels[part], classes, covariance)  # type: ignore[arg-type]
        for part, classes in ((first, 2), (~first, 3))
    ]
    assert same(parts[0].joined(parts[1]), Statistics.of(rows, labels, 3, covariance))  # type: ignore[arg-type]


def test_an_affine_map_moves_statistics_as_it_moves_samples() -> None:
    rows, labels = drawn()
    linear, offset = torch.randn(5, 5).double(), torch.randn(5).double()
    moved = Statistics.of(rows, labels, 3, "class").moved(linear[None], offset[None])
    assert same(moved, Statistics.of(rows.double() @ linear + offset, labels, 3, "class"))


def test_merged_classes_have_the_statistics_of_their_samples() -> None:
    rows, labels = drawn()
    merged = Statistics.of(rows, labels, 3, "class").regrouped([[0, 2], [1]])
    assert same(merged, Statistics.of(rows, torch.tensor([0, 1, 0])[labels], 2, "class"))


def test_samples_have_the_moments_that_they_are_drawn_from() -> None:
    rows, labels = drawn()
    statistics = Statistics.of(rows, labels, 3, "class")
    samples, classes = statistics.sampled(50_000, torch.Generator().manual_seed(0))
    again = Statistics.of(samples, classes, 3, "class")
    assert torch.allclose(again.means, statistics.means, atol=0.01)
    assert torch.allclose(again.covariances, statistics.covariances, atol=0.01)


@every_covariance
def test_bytes_are_counted_before_and_after(covariance: str) -> None:
    rows, labels = drawn()
    found = Statistics.of(rows, labels, 3, covariance)  # type: ignore[arg-type]
    assert found.nbytes == statistics_bytes(3, 5, covariance)  # type: ignore[arg-type]
    assert found.nbytes == 4 * (15 + {"none": 0, "shared": 15, "class": 45}[covariance])
    assert same(Statistics.restored(found.tensors()), found)


@pytest.mark.parametrize("classifier", [NearestMean(), LDA(), Ridge()])
def test_closed_forms_need_only_the_statistics(classifier: NearestMean | LDA | Ridge) -> None:
    rows, labels = drawn()
    from_samples = classifier.fit(rows, labels).scores(rows)
    statistics = Statistics.of(rows, labels, 3, "class")
    assert torch.allclose(classifier.fit_statistics(statistics).scores(rows), from_samples, atol=1e-4)


def test_lda_of_statistics_is_scikit_learns() -> None:
    rows, labels = drawn()
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.05, priors=[1 / 3] * 3).fit(rows, labels)
    ours = LDA(shrinkage=0.05).fit_statistics(Statistics.of(rows, labels, 3, "shared")).scores(rows)
    assert np.array_equal(ours.argmax(1).numpy(), oracle.predict(rows))


def test_fecam_is_the_mahalanobis_distance_of_normalised_shrunk_covariances() -> None:
    rows, labels = drawn()
    found = CLASSIFIERS["fecam"](tukey=0.5).fit(rows, labels).scores(rows[:4])  # type: ignore[call-arg]
    tukey = rows.sign() * rows.abs() ** 0.5
    tukey = (tukey / tukey.norm(dim=1, keepdim=True)).double().numpy()
    for class_index in range(3):
        own = tukey[labels == class_index]
        covariance = np.cov(own.T, bias=True)
        variance = np.trace(covariance) / 5
        others = (covariance.sum() - np.trace(covariance)) / 20
        shrunk = covariance + variance * np.eye(5) + others * (1 - np.eye(5))
        deviations = np.sqrt(np.diag(shrunk))
        precision = np.linalg.inv(shrunk / np.outer(deviations, deviations) + 1e-6 * np.eye(5))
        for row in range(4):
            centred = tukey[row] - own.mean(0)
            assert float(found[row, class_index]) == pytest.approx(-centred @ precision @ centred, rel=1e-3)
