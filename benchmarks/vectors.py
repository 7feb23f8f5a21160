"""`IncrementalClassifier()` on vectors in class-incremental order, beside classifiers that see all classes at once.

    ENGRAM_DATA=… python benchmarks/vectors.py

Tables and digits of scikit-learn: half of the samples to learn from, the mean over six splits and class orders.
Embeddings of $ENGRAM_DATA/objects by EfficientNet-Lite0: 40 classes, 5, 10 or 30 vectors each to learn from and 15 to
test, in eight updates of five classes, the mean over four class orders. The result: benchmarks/results/vectors.json.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler, normalize
from sklearn.svm import LinearSVC

from engram import IncrementalClassifier
from engram.data.labelled import read_images, scan
from engram.network import extract, make_network

Array = NDArray[Any]
Split = tuple[Array, Array, Array, Array]  # training inputs, test inputs, training labels, test labels

RESULT = Path(__file__).parent / "results" / "vectors.json"
TABLES = {"digits": (load_digits, 2), "iris": (load_iris, 1), "wine": (load_wine, 1), "cancer": (load_breast_cancer, 1)}
SPLITS, ORDERS = 6, 4

AT_ONCE: dict[str, Callable[[], ClassifierMixin]] = {
    "LDA": lambda: make_pipeline(Normalizer(), LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")),
    "linear SVM": lambda: make_pipeline(Normalizer(), LinearSVC()),
    "logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
}


def in_updates(X: Array, y: Array, order: Array, size: int) -> IncrementalClassifier:
    classifier = IncrementalClassifier(random_state=0)
    for start in range(0, len(order), size):
        new = np.isin(y, order[start : start + size])
        classifier.partial_fit(X[new], y[new])
    return classifier


def nearest_mean(X: Array, rest: Array, y: Array, others: Array) -> float:
    """The accuracy of the nearest normalised class mean of unit vectors."""
    means = normalize(np.stack([normalize(X[y == label]).mean(axis=0) for label in np.unique(y)]))
    return float((np.unique(y)[(normalize(rest) @ means.T).argmax(axis=1)] == others).mean())


def tables(load: Callable[..., tuple[Array, Array]]) -> Iterator[tuple[Split, Array]]:
    X, y = load(return_X_y=True)
    for seed in range(SPLITS):
        order = np.random.RandomState(seed).permutation(np.unique(y))
        yield train_test_split(X, y, test_size=0.5, stratify=y, random_state=seed), order


def embedded(part: str) -> tuple[Array, Array]:
    samples = read_images(scan(Path(os.environ["ENGRAM_DATA"], "objects", part)), 224).samples
    network = make_network("efficientnet-lite0", "cosine", samples, seed=0).eval().requires_grad_(False)
    return extract(network, samples).numpy(), samples.labels.numpy()


def embeddings(train: tuple[Array, Array], test: tuple[Array, Array], per_class: int) -> Iterator[tuple[Split, Array]]:
    X, y = train
    for seed in range(ORDERS):
        draws = np.random.RandomState(seed)
        some = np.concatenate([draws.permutation(np.flatnonzero(y == each))[:per_class] for each in np.unique(y)])
        yield (X[some], test[0], y[some], test[1]), draws.permutation(np.unique(y))


def compared(splits: Iterator[tuple[Split, Array]], size: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for (X, rest, y, others), order in splits:
        found.setdefault("IncrementalClassifier", []).append(in_updates(X, y, order, size).score(rest, others))
        found.setdefault("nearest mean", []).append(nearest_mean(X, rest, y, others))
        for name, make in AT_ONCE.items():
            found.setdefault(name, []).append(make().fit(X, y).score(rest, others))
    return {name: round(float(np.mean(values)), 4) for name, values in found.items()}


def main() -> None:
    warnings.filterwarnings("ignore")
    results = {name: compared(tables(load), size) for name, (load, size) in TABLES.items()}
    train, test = embedded("train"), embedded("test")
    results |= {f"objects, {each} a class": compared(embeddings(train, test, each), 5) for each in (5, 10, 30)}
    for name, accuracies in results.items():
        print(f"{name:22}", "  ".join(f"{kind} {value:.3f}" for kind, value in accuracies.items()))
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
