"""How accurate `IncrementalClassifier` is by default, beside classifiers that see all classes at once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize

from engram.data import Samples
from engram.data.labelled import read_images, scan
from engram.estimator import IncrementalClassifier
from engram.network import extract, make_network

Array = NDArray[Any]
Split = tuple[Array, Array, Array, Array]  # training inputs, test inputs, training labels, test labels

OBJECTS = Path(os.environ.get("ENGRAM_DATA", "nowhere")) / "objects"


def in_updates(classifier: IncrementalClassifier, X: Array, y: Array, order: Array, size: int) -> IncrementalClassifier:
    """Teach classes in this order, `size` at a time."""
    for start in range(0, len(order), size):
        new = np.isin(y, order[start : start + size])
        classifier.partial_fit(X[new], y[new])
    return classifier


def nearest_mean(X: Array, rest: Array, y: Array, others: Array) -> float:
    """The accuracy of the nearest class mean of unit vectors."""
    means = normalize(np.stack([normalize(X[y == label]).mean(axis=0) for label in np.unique(y)]))
    return float((np.unique(y)[(normalize(rest) @ means.T).argmax(axis=1)] == others).mean())


def accuracy_at_once(X: Array, rest: Array, y: Array, others: Array) -> float:
    """The accuracy of logistic regression on standardised vectors of all classes."""
    return float(make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(X, y).score(rest, others))


@pytest.mark.parametrize(
    ("load", "size", "tolerance"),
    [(load_digits, 2, 0.0), (load_iris, 1, 0.02), (load_wine, 1, 0.02), (load_breast_cancer, 1, 0.015)],
    ids=["digits", "iris", "wine", "breast cancer"],
)
def test_vectors_in_updates_are_classified_as_well_as_all_at_once(
    load: Callable[..., tuple[Array, Array]], size: int, tolerance: float
) -> None:
    """The mean over splits and class orders; `tolerance` is about twice its standard error."""
    X, y = load(return_X_y=True)
    gains = []
    for seed in range(2 if load is load_digits else 8):
        split: Split = train_test_split(X, y, test_size=0.5, stratify=y, random_state=seed)
        order = np.random.RandomState(seed).permutation(np.unique(y))
        ours = in_updates(IncrementalClassifier(random_state=0), split[0], split[2], order, size)
        gains.append(ours.score(split[1], split[3]) - accuracy_at_once(*split))
    assert np.mean(gains) >= -tolerance, gains


@pytest.mark.parametrize("change", ["offset", "units"])
def test_offsets_and_units_of_columns_do_not_matter(change: str) -> None:
    X, y = load_wine(return_X_y=True)
    draws = np.random.RandomState(0)
    other = X + 20 * X.std(axis=0) if change == "offset" else X * 10 ** draws.uniform(-3, 3, X.shape[1])
    split: Split = train_test_split(other, y, test_size=0.5, stratify=y, random_state=1)
    ours = in_updates(IncrementalClassifier(random_state=0), split[0], split[2], np.arange(3), 1)
    assert ours.score(split[1], split[3]) > accuracy_at_once(*split) - 0.04


def test_classes_may_differ_in_length_alone() -> None:
    """Two classes in one direction: large ones and small ones."""
    draws = np.random.RandomState(0)
    y = np.repeat([0, 1], 50)
    X = np.array([1.0, 2.0, 3.0]) * (1 + y)[:, np.newaxis] + 0.1 * draws.normal(size=(100, 3))
    assert in_updates(IncrementalClassifier(random_state=0), X, y, np.arange(2), 1).score(X, y) == 1.0


def test_accuracy_on_digits_in_five_updates() -> None:
    X, y = load_digits(return_X_y=True)
    X, rest, y, others = train_test_split(X, y, test_size=0.6, stratify=y, random_state=0)

    def taught(method: str, network: str = "auto") -> IncrementalClassifier:
        return in_updates(IncrementalClassifier(method, network=network, random_state=0), X, y, np.arange(10), 2)

    ours = taught(IncrementalClassifier().method)
    evidence = ours.model_.metadata.held_out_counts.accuracy()
    assert ours.score(rest, others) > 0.96
    assert evidence is not None and evidence.total == len(X) and abs(evidence.value - ours.score(rest, others)) < 0.02
    assert taught("features", "mlp").score(rest, others) > 0.65  # trained in every update, and adapted
    assert taught("finetune").score(rest, others) < 0.3  # its head forgets, although its features stay


@pytest.fixture(scope="module")
def photos() -> dict[str, Samples]:
    """Photos of 20 classes at 96 pixels a side, in the parts train and test."""
    if not OBJECTS.is_dir():
        pytest.skip("ENGRAM_DATA with objects/ is not there")
    found = {part: scan(OBJECTS / part) for part in ("train", "test")}
    chosen = found["train"].class_names[:20]
    return {part: read_images(files.where(lambda _, name: name in chosen), 96).samples for part, files in found.items()}


def embedded(samples: Samples) -> tuple[Array, Array]:
    """Features of photos by efficientnet-lite0, and their labels."""
    network = make_network("efficientnet-lite0", "cosine", samples, seed=0).eval().requires_grad_(False)
    return extract(network, samples).numpy(), samples.labels.numpy()


def test_embeddings_are_classified_at_least_as_well_as_by_nearest_mean(photos: dict[str, Samples]) -> None:
    """Two standard errors of the mean difference over four orders and 300 test images are about one point."""
    half = photos["train"].select(torch.arange(0, len(photos["train"]), 2))  # of each class: they are sorted
    (X, y), (rest, others) = embedded(half), embedded(photos["test"])
    for per_class in (5, 15):
        gains = []
        for seed in range(4):
            draws = np.random.RandomState(seed)
            some = np.concatenate([draws.permutation(np.flatnonzero(y == each))[:per_class] for each in range(20)])
            ours = in_updates(IncrementalClassifier(random_state=0), X[some], y[some], draws.permutation(20), 10)
            gains.append(ours.score(rest, others) - nearest_mean(X[some], rest, y[some], others))
        assert np.mean(gains) > -0.01, gains


def test_photos_as_arrays_are_classified_by_the_pretrained_network(photos: dict[str, Samples]) -> None:
    few = {part: samples.of_classes(range(6)) for part, samples in photos.items()}
    (X, y), (rest, others) = (
        (part.batch(torch.arange(0, len(part), 2)).numpy(), part.labels[::2].numpy()) for part in few.values()
    )
    ours = in_updates(IncrementalClassifier(random_state=0), X, y, np.arange(6), 3)
    assert ours.model_.learner.network == "efficientnet-lite0" and ours.score(rest, others) > 0.9
    assert ours.model_.metadata.held_out_counts.accuracy() is not None
    published = make_network("efficientnet-lite0", "cosine", few["train"], seed=0).extractor.state_dict()
    learned = ours.model_.learner.trained.extractor.state_dict()
    assert all(torch.equal(learned[name], tensor) for name, tensor in published.items())
