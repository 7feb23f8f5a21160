"""`IncrementalClassifier` follows the conventions of scikit-learn."""

import copy
import doctest
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learners_made import OF_EACH_STATE
from models_made import NAMES, SIDE, copied, draw
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.datasets import load_digits, load_iris, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks

import engram
from engram import storage
from engram.data.labelled import scan
from engram.errors import DataError, EngramError, UsageError
from engram.estimator import IncrementalClassifier
from engram.model import LearnOptions, ModelFolder, forget, inspect, load, plan_update, rename

Array = NDArray[Any]


@parametrize_with_checks(
    [
        IncrementalClassifier(),
        IncrementalClassifier("hybrid", network="mlp", epochs=5, images_per_class=3, validation_fraction=0.2),
        IncrementalClassifier("lwf", epochs=10),
    ]
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


def test_the_array_api_check_passes() -> None:
    """`check_array_api_input` is skipped unless SCIPY_ARRAY_API was set before scipy was imported."""
    code = """
import os
os.environ["SCIPY_ARRAY_API"] = "1"
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils import estimator_checks
from engram import IncrementalClassifier
estimator_checks._yield_all_checks = lambda estimator, legacy: estimator_checks._yield_array_api_checks(estimator, True)
for result in check_estimator(IncrementalClassifier(epochs=1)):
    print(result["check_name"], result["status"])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert "check_array_api_input passed" in done.stdout.splitlines(), done


def quick(method: str = "features", **parameters: Any) -> IncrementalClassifier:
    return IncrementalClassifier(method, **{"epochs": 5, "random_state": 0, **parameters})


@pytest.fixture(scope="module")
def blobs() -> tuple[Array, Array]:
    """120 vectors (n, 4) of four classes, well apart, in no order."""
    X, y = make_blobs(120, 4, centers=4, cluster_std=1.0, center_box=(-8, 8), random_state=1)
    return X, y


@pytest.fixture(scope="module")
def photos() -> tuple[Array, Array]:
    """80 noisy images (n, 8, 8, 3) of four classes."""
    draws = np.random.RandomState(0)
    base, y = draws.randint(0, 256, (4, 8, 8, 3)), np.repeat(["ash", "elm", "fir", "oak"], 20)
    noisy = base[np.repeat(np.arange(4), 20)] + draws.randint(-30, 31, (80, 8, 8, 3))
    return noisy.clip(0, 255).astype(np.uint8), y


def same_answers(one: IncrementalClassifier, other: IncrementalClassifier, X: Array) -> bool:
    return np.array_equal(one.classes_, other.classes_) and all(
        np.array_equal(getattr(one, method)(X), getattr(other, method)(X))
        for method in ("predict", "predict_proba", "decision_function")
    )


# Beyond scikit-learn's checks.


def test_docstring_examples() -> None:
    found = doctest.testmod(sys.modules["engram.estimator.classifier"])
    assert found.attempted >= 7 and not found.failed


def test_it_is_exported_and_importing_engram_imports_no_scikit_learn() -> None:
    assert engram.IncrementalClassifier is IncrementalClassifier
    code = "import sys, engram; assert not {'sklearn', 'torch'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tags() -> None:
    tags = get_tags(IncrementalClassifier())
    assert is_classifier(IncrementalClassifier()) and not tags.non_deterministic and not tags.input_tags.sparse
    assert tags.input_tags.two_d_array and tags.input_tags.three_d_array and tags.classifier_tags.multi_class


def test_parameters_can_be_read_set_and_cloned() -> None:
    settings = {"learning_rate": 0.1}
    classifier = IncrementalClassifier("hybrid", images_per_class=4, settings=settings)
    assert classifier.get_params()["settings"] is settings
    assert clone(classifier).get_params() == classifier.get_params()
    assert classifier.set_params(method="lwf", epochs=2).get_params()["epochs"] == 2


def test_new_classes_need_no_announcement_and_old_ones_are_not_forgotten(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    classifier = IncrementalClassifier(random_state=0)
    for first in (2, 0):  # the later ones first
        new = (first <= y) & (y < first + 2)
        classifier.partial_fit(X[new], y[new])
    assert classifier.classes_.tolist() == [0, 1, 2, 3]
    assert classifier.model_.names == ("2", "3", "0", "1")  # as they came
    assert classifier.score(X, y) > 0.9
    assert classifier.model_.metadata.seen == tuple(np.bincount(y)[[2, 3, 0, 1]])


def test_one_update_may_have_new_and_known_classes(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    classifier = IncrementalClassifier(random_state=0).partial_fit(X[y < 2][:30], y[y < 2][:30])
    classifier.partial_fit(X[(y > 0) & (y < 3)], y[(y > 0) & (y < 3)])
    classifier.partial_fit(X[y == 0], y[y == 0])
    assert classifier.classes_.tolist() == [0, 1, 2]
    assert classifier.score(X[y < 3], y[y < 3]) > 0.95


@pytest.mark.parametrize("method", OF_EACH_STATE)
def test_every_method_learns_one_class_at_a_time(method: str, blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    # None: the first then leaves its network as it is; the other has to train its head.
    epochs = None if method in ("features", "gamma-lwf") else 2
    classifier = quick(method, epochs=epochs).partial_fit(X[y == 3], y[y == 3])
    assert set(classifier.predict(X)) == {3}
    assert np.array_equal(classifier.predict_proba(X), np.ones((len(X), 1)))
    assert classifier.decision_function(X).shape == (len(X), 1)
    classifier.partial_fit(X[y == 1], y[y == 1])
    assert classifier.classes_.tolist() == [1, 3] and classifier.decision_function(X).shape == (len(X),)
    classifier.partial_fit(X[y == 2], y[y == 2])
    assert classifier.decision_function(X).shape == (len(X), 3)
    assert np.allclose(classifier.predict_proba(X).sum(axis=1), 1)


def test_fit_starts_over(blobs: tuple[Array, Array], photos: tuple[Array, Array]) -> None:
    X, y = blobs
    classifier = quick().fit(X, y)
    assert classifier.n_features_in_ == 4
    classifier.fit(*photos)
    assert classifier.classes_.tolist() == ["ash", "elm", "fir", "oak"]
    assert not hasattr(classifier, "n_features_in_")
    assert same_answers(classifier.fit(X, y), quick().fit(X, y), X)


def test_columns_are_sorted_by_label(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    names = np.array(["pear", "apple", "fig", "lime"])[y]
    classifier = quick().partial_fit(X[y == 0], names[y == 0]).partial_fit(X[y > 0], names[y > 0])
    assert classifier.classes_.tolist() == ["apple", "fig", "lime", "pear"]
    scores, probabilities = classifier.decision_function(X), classifier.predict_proba(X)
    for class_indices in (scores.argmax(1), probabilities.argmax(1)):
        assert np.array_equal(classifier.classes_[class_indices], classifier.predict(X))
    own = classifier.model_.scores(torch.tensor(X, dtype=torch.float32))
    assert np.allclose(scores[:, 3], own[:, 0], atol=1e-5)  # pear came first
    temperature = classifier.model_.metadata.calibration.temperature
    assert np.allclose(probabilities, torch.softmax(torch.tensor(scores) / temperature, dim=1))


@pytest.mark.parametrize("method", ["features", "icarl", "lwf"])
def test_scores_of_an_input_do_not_depend_on_the_others(method: str, blobs: tuple[Array, Array]) -> None:
    X, y = np.tile(blobs[0], (3, 1)), np.tile(blobs[1], 3)  # more than a block
    classifier = quick(method).fit(*blobs)
    scores, order = classifier.decision_function(X), np.random.RandomState(0).permutation(len(X))
    assert np.array_equal(classifier.decision_function(X[order]), scores[order])
    assert all(np.array_equal(classifier.decision_function(X[i : i + 1])[0], scores[i]) for i in (0, 7, 300))
    assert classifier.score(X, y) == classifier.score(*blobs)


@pytest.mark.parametrize(("network", "samples"), [("mlp", 100), ("auto", 400)])
def test_held_out_samples_calibrate_the_probabilities(network: str, samples: int) -> None:
    """A quarter is held out if the network is trained; otherwise every sample, by leave-one-out."""
    X, y = make_blobs(400, 4, centers=4, cluster_std=2.0, center_box=(-8, 8), random_state=1)
    classifier = quick(network=network, validation_fraction=0.25, epochs=10).fit(X, y)
    found = classifier.model_.metadata.calibration
    assert found.images == samples
    assert found.error_after is not None and found.error_before is not None
    assert found.error_after <= found.error_before and found.error_after < 0.05
    scores = torch.tensor(classifier.decision_function(X))
    assert np.allclose(classifier.predict_proba(X), torch.softmax(scores / found.temperature, dim=1))


def test_mean_confidence_is_close_to_the_accuracy() -> None:
    X, y = load_digits(return_X_y=True)
    X, rest, y, others = train_test_split(X, y, test_size=0.5, stratify=y, random_state=0)
    classifier = IncrementalClassifier(random_state=0)
    for first in (0, 5):
        new = (first <= y) & (y < first + 5)
        classifier.partial_fit(X[new], y[new])
    assert abs(classifier.predict_proba(rest).max(axis=1).mean() - classifier.score(rest, others)) < 0.03


# `classes=`.


def test_announced_classes_have_columns_at_once(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    classifier = quick().partial_fit(X[y == 1], y[y == 1], classes=[3, 1, 0])
    assert classifier.classes_.tolist() == [0, 1, 3] and set(classifier.predict(X)) == {1}
    assert np.array_equal(classifier.predict_proba(X), np.tile([0.0, 1.0, 0.0], (len(X), 1)))
    assert np.array_equal(classifier.decision_function(X).argmax(axis=1), np.ones(len(X)))
    classifier.partial_fit(X[y == 0], y[y == 0], classes=np.array([0, 1, 3]))  # they may be repeated
    assert classifier.predict_proba(X)[:, 2].max() == 0
    classifier.partial_fit(X[y > 1], y[y > 1])  # what was announced, and what was not
    assert classifier.classes_.tolist() == [0, 1, 2, 3] and classifier.model_.metadata.announced == ()


def test_inconsistent_announced_classes_are_refused(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[0, 1\]"):
        quick().partial_fit(X, y, classes=[0, 1])
    classifier = quick().partial_fit(X, y)
    with pytest.raises(ValueError, match=r"array\(\[0, 1, 2, 3\]"):
        classifier.partial_fit(X, y, classes=[0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"whole numbers.*texts"):
        quick().partial_fit(X, y, classes=np.array([0, 1, 2, 3]).astype(str))


# Inputs and parameters.


@pytest.mark.parametrize(
    ("change", "precise"),
    [
        pytest.param(lambda X: X.astype(np.float32), False, id="float32"),
        pytest.param(lambda X: X.tolist(), True, id="lists"),
        pytest.param(np.asfortranarray, True, id="columns first"),
        pytest.param(lambda X: np.repeat(X, 2, axis=0)[::2], True, id="every second row"),
        pytest.param(lambda X: X[::-1].copy()[::-1], True, id="backwards"),
        pytest.param(lambda X: X.astype(object), True, id="objects"),
        pytest.param(lambda X: X.astype(">f8"), True, id="another byte order"),
        pytest.param(torch.tensor, True, id="a tensor"),
    ],
)
def test_any_type_and_layout_of_vectors_gives_the_same_model(
    change: Any, precise: bool, blobs: tuple[Array, Array]
) -> None:
    X, y = blobs
    expected = quick().fit(X, y)
    assert same_answers(quick().fit(change(X), y), expected, X)
    assert np.array_equal(expected.predict(change(X)), expected.predict(X))


def test_images_may_be_grey_or_colour_arrays_or_lists(photos: tuple[Array, Array]) -> None:
    images, y = photos
    classifier = quick("hybrid", epochs=20, images_per_class=5)
    classifier.partial_fit(images[:40], y[:40]).partial_fit(images[40:], y[40:])
    assert classifier.score(images, y) > 0.9
    assert classifier.model_.learner.shape_ == (8, 8, 3)
    assert np.array_equal(classifier.predict(list(images)), classifier.predict(images))
    grey = images[..., 0]
    classifier.fit(grey, y)
    assert classifier.model_.learner.shape_ == (8, 8, 1)
    flat = grey.transpose(0, 2, 1).copy().transpose(0, 2, 1)  # not contiguous
    assert np.array_equal(classifier.predict(flat), classifier.predict(grey[..., np.newaxis]))
    scores = cross_val_score(quick(epochs=15), images, y, cv=2)
    assert scores.mean() > 0.6


@pytest.mark.parametrize(
    "labels",
    [
        np.array([5, -3, 2**62]),
        np.array([7, 0, 3], dtype=np.uint8),
        np.array([2.0, -1.0, 0.0]),
        np.array(["z", "", "ä b"]),
        np.array(["10", "9", "x"], dtype=object),
    ],
    ids=lambda labels: str(labels.dtype),
)
def test_labels_keep_their_type(labels: Array, blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs[0][blobs[1] < 3], labels[blobs[1][blobs[1] < 3]]
    classifier = quick().fit(X, y)
    assert classifier.classes_.tolist() == sorted(labels.tolist())
    classifier.save(tmp_path / "model")
    loaded = IncrementalClassifier.load(tmp_path / "model")
    assert same_answers(loaded, classifier, X)
    assert loaded.classes_.dtype == classifier.classes_.dtype and loaded.score(X, y) == classifier.score(X, y) > 0.9
    assert [type(label) for label in loaded.classes_.tolist()] == [type(label) for label in sorted(labels.tolist())]


def test_bools_are_labels_too(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs[0], blobs[1] > 1
    classifier = quick().partial_fit(X[y], y[y]).partial_fit(X[~y], y[~y])
    assert classifier.classes_.tolist() == [False, True] and classifier.predict(X).dtype == bool
    classifier.save(tmp_path / "model")
    assert same_answers(IncrementalClassifier.load(tmp_path / "model"), classifier, X)


def test_few_samples_duplicates_and_constant_numbers_are_learned_from() -> None:
    X = np.array([[1.0, 7.0, 0.0]] * 3 + [[-1.0, 7.0, 0.0]] * 2 + [[5.0, 7.0, 0.0]])
    y = np.array([0, 0, 0, 1, 1, 2])
    classifier = quick(epochs=50).fit(X, y)
    assert classifier.predict(X).tolist() == y.tolist()
    assert quick().fit(X[:1], y[:1]).predict(X).tolist() == [0] * 6


@pytest.mark.parametrize("scale", [1e-12, 1e9])
def test_units_of_inputs_do_not_matter(scale: float, blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    assert quick().fit(X * scale, y).score(X * scale, y) > 0.95


@pytest.mark.parametrize(
    ("X", "y", "kind", "message"),
    [
        pytest.param(sparse.csr_array(np.eye(4)), [0, 1, 0, 1], TypeError, "Sparse data was passed", id="sparse"),
        pytest.param([1.0, 2.0], [0, 1], ValueError, "Expected 2D array, got 1D array", id="1-D"),
        pytest.param([[1.0], [2.0, 3.0]], [0, 1], ValueError, "lists of equal lengths", id="ragged"),
        pytest.param([[np.nan], [1.0]], [0, 1], ValueError, "Input X contains NaN", id="nan"),
        pytest.param([[1e300], [1.0]], [0, 1], ValueError, "too large for dtype..float32", id="too large"),
        pytest.param([[1.0], [2.0]], [0], ValueError, "inconsistent numbers of samples", id="lengths"),
        pytest.param([[1.0], [2.0]], None, ValueError, "requires y to be passed", id="no labels"),
        pytest.param([[1.0], [2.0]], [0.5, 1.5], ValueError, "Unknown label type: continuous", id="measurements"),
        pytest.param([[1.0], [2.0]], [0.0, np.nan], ValueError, "Input y contains NaN", id="nan label"),
        pytest.param(
            [[1.0], [2.0]],
            np.array([{}, {}]),
            ValueError,
            "Unknown label type: object. .* all of one kind",
            id="objects",
        ),
        pytest.param(
            [[1.0], [2.0]],
            np.array(["a", 1], object),
            ValueError,
            "Unknown label type: object. .* all of one kind",
            id="mix",
        ),
        pytest.param([[1.0], [2.0]], np.array([1, 2], "M8[s]"), ValueError, "texts, numbers or bools", id="times"),
        pytest.param([[1.0], [2.0]], np.array([1, 2**63], "u8"), ValueError, r"less than 2\^63", id="large"),
        pytest.param(np.zeros((2, 4, 4, 3)), [0, 1], ValueError, "uint8 images .* found float64", id="float images"),
        pytest.param(np.zeros((2, 4, 4, 2), "u1"), [0, 1], ValueError, "1 or 3 channels", id="channels"),
        pytest.param(np.zeros((0, 4, 4, 3), "u1"), [], ValueError, "there must be some", id="no images"),
        pytest.param(np.zeros((2, 1, 4, 4, 3), "u1"), [0, 1], ValueError, "X must be vectors", id="5-D"),
        pytest.param(np.zeros((2, 4, 4, 3), "u1"), None, ValueError, "requires y to be passed", id="no y of images"),
        pytest.param(np.zeros((2, 4, 4), "u1"), [0], ValueError, "inconsistent numbers", id="lengths of images"),
    ],
)
def test_invalid_training_data_is_refused(X: Any, y: Any, kind: type[Exception], message: str) -> None:
    for learn in (quick().fit, quick().partial_fit):
        with pytest.raises(kind, match=message):
            learn(X, y)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"method": "feature"}, "'feature'.*'features'"),
        ({"network": "resnet"}, "'resnet'"),
        ({"network": "small"}, "does not take vectors"),
        ({"epochs": 0}, "epochs.* 0"),
        ({"epochs": 2.5}, "epochs"),
        ({"images_per_class": 2}, "'features'.*images_per_class"),
        ({"method": "hybrid", "images_per_class": -1}, "images_per_class"),
        ({"budget": 100}, "100 bytes.* 4 classes"),
        ({"validation_fraction": 1.0}, "validation_fraction.* 1.0"),
        ({"validation_fraction": "a tenth"}, "validation_fraction"),
        ({"settings": {"learning_rat": 1}}, "'learning_rat'.*'learning_rate'"),
        ({"settings": {"learning_rate": -1}}, "'learning_rate'.* -1"),
        ({"settings": {"seed": 1}}, "'seed'.*random_state"),
        ({"settings": {"classifier": "lda"}}, "'classifier'"),
        ({"classifier": "tree"}, "'tree'"),
        ({"method": "lwf", "classifier": "lda"}, "'lwf'.*'classifier'"),
        ({"tune": "often"}, "'tune'.*'often'"),
        ({"settings": [1]}, "`settings`"),
        ({"random_state": "one"}, "cannot be used to seed"),
    ],
    ids=str,
)
def test_invalid_parameter_is_named_by_fit(
    parameters: dict[str, Any], message: str, blobs: tuple[Array, Array]
) -> None:
    classifier = quick(**parameters)
    with pytest.raises(ValueError) as caught:
        classifier.fit(*blobs)
    assert re.search(message, str(caught.value))
    assert "random_state" in parameters or isinstance(caught.value, UsageError)


def test_inputs_of_another_shape_are_refused(blobs: tuple[Array, Array], photos: tuple[Array, Array]) -> None:
    vectors, images = quick().fit(*blobs), quick().fit(*photos)
    for act in (vectors.predict, vectors.predict_proba, lambda X: vectors.partial_fit(X, np.zeros(len(X), int))):
        with pytest.raises(ValueError, match=r"X has images \(8, 8, 3\), but .* expecting vectors \(4,\)"):
            act(photos[0])
        with pytest.raises(ValueError, match="X has 3 features, but IncrementalClassifier is expecting 4 features"):
            act(blobs[0][:, :3])
    for act in (images.predict, lambda X: images.partial_fit(X, np.array(["x"] * len(X)))):
        with pytest.raises(ValueError, match=r"X has vectors \(4,\), but .* expecting images \(8, 8, 3\)"):
            act(blobs[0])
        with pytest.raises(ValueError, match=r"X has images \(4, 8, 3\)"):
            act(photos[0][:, ::2])


def test_an_unfitted_classifier_neither_predicts_nor_saves(tmp_path: Path) -> None:
    for act in (quick().predict, quick().predict_proba, quick().decision_function):
        with pytest.raises(NotFittedError):
            act([[0.0]])
    with pytest.raises(NotFittedError):
        quick().save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_failed_partial_fit_changes_nothing(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    classifier = quick(network="mlp").fit(X, y)
    before, memory = classifier.decision_function(X), classifier.model_.learner.memory
    classifier.set_params(settings={"learning_rate": 1e30})
    with pytest.raises(EngramError, match="not finite"):
        classifier.partial_fit(X, y + 2)
    with pytest.raises(ValueError, match=r"whole numbers.*texts"):
        classifier.partial_fit(X, y.astype(str))
    assert np.array_equal(classifier.decision_function(X), before) and classifier.model_.learner.memory is memory


def test_a_failed_fit_changes_nothing(blobs: tuple[Array, Array], photos: tuple[Array, Array]) -> None:
    X, y = blobs
    classifier = quick().fit(X, y)
    before = classifier.decision_function(X)
    with pytest.raises(ValueError, match="Unknown label type"):
        classifier.fit(X[:, :3], y + 0.5)
    assert np.array_equal(classifier.decision_function(X), before)
    with pytest.raises(ValueError, match="Unknown label type"):
        classifier.fit(photos[0], np.linspace(0.5, 9.5, len(photos[0])))
    assert np.array_equal(classifier.decision_function(X), before) and classifier.n_features_in_ == 4


def test_method_and_network_of_a_model_cannot_change(blobs: tuple[Array, Array]) -> None:
    classifier = quick().fit(*blobs)
    with pytest.raises(ValueError, match="'features'"):
        classifier.set_params(method="lwf").partial_fit(*blobs)
    with pytest.raises(ValueError, match="'identity'"):
        classifier.set_params(method="features", network="mlp").partial_fit(*blobs)


def test_changed_parameters_take_effect_at_the_next_update(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    classifier = quick(network="mlp", features_per_class=5, settings={"learning_rate": np.float64(0.3)})
    classifier.fit(X[y < 2], y[y < 2])
    assert classifier.model_.learner.training.learning_rate == 0.3
    assert classifier.model_.learner.memory.features.counts.tolist() == [5, 5]
    classifier.set_params(features_per_class=np.int64(3), settings=None, epochs=2).partial_fit(X[y == 2], y[y == 2])
    assert classifier.model_.learner.training.learning_rate == 0.03 and classifier.model_.learner.training.epochs == 2
    assert classifier.model_.learner.memory.features.counts.tolist() == [3, 3, 3]


def test_budget_is_respected(blobs: tuple[Array, Array]) -> None:
    seven = 4 * 7 * 8 * 4  # of each of four classes, 8 numbers of 4 bytes
    classifier = quick(budget=seven + 4).fit(*blobs)
    assert classifier.model_.learner.memory.nbytes == seven


# Randomness.


def test_the_same_random_state_gives_the_same_model(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    one = quick(network="mlp", random_state=3).fit(X, y)
    assert same_answers(quick(network="mlp", random_state=3).fit(X, y), one, X)
    assert same_answers(quick(network="mlp", random_state=np.int64(3)).fit(X, y), one, X)
    other = quick(network="mlp", random_state=4).fit(X, y)
    assert not np.array_equal(one.decision_function(X), other.decision_function(X))


def test_a_generator_advances_with_every_fit_and_none_is_the_global_one(blobs: tuple[Array, Array]) -> None:
    X, y = blobs

    def seeds(classifier: IncrementalClassifier) -> list[int]:
        return [classifier.fit(X, y).model_.learner.seed for _ in range(2)]

    drawn = seeds(quick(epochs=1, random_state=np.random.RandomState(5)))
    assert drawn[0] != drawn[1] and drawn == seeds(quick(epochs=1, random_state=np.random.RandomState(5)))
    np.random.seed(5)  # the generator that None stands for
    assert seeds(quick(epochs=1, random_state=None)) == drawn


# With other tools of scikit-learn.


def test_it_works_in_a_pipeline() -> None:
    X, y = load_iris(return_X_y=True, as_frame=False)
    assert cross_val_score(make_pipeline(StandardScaler(), quick(epochs=15)), X, y, cv=3).mean() > 0.9


def test_grid_search_in_worker_processes(blobs: tuple[Array, Array]) -> None:
    grid = {"method": ["features", "finetune"], "settings": [{"learning_rate": 1e-9}, None]}
    search = GridSearchCV(quick(epochs=15), grid, cv=2, n_jobs=2).fit(*blobs)
    scores = search.cv_results_["mean_test_score"]
    assert scores[2] < 0.8 < scores[3]  # a head that was not trained, and one that was
    assert search.best_score_ > 0.9
    assert search.score(*blobs) > 0.9


def test_one_vs_rest_partial_fit(blobs: tuple[Array, Array]) -> None:
    """It announces both classes to its binary classifiers, although the first part may have only one of them."""
    X, y = blobs
    several = OneVsRestClassifier(quick(epochs=None))
    several.partial_fit(X[y < 2], y[y < 2], classes=[0, 1, 2, 3])
    several.partial_fit(X, y)
    assert several.score(X, y) > 0.9


def test_data_frames_and_series(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    X, y = blobs
    frame = pandas.DataFrame(X, columns=list("abcd"), index=np.arange(len(X))[::-1])
    names = np.array(["pear", "apple", "fig", "lime"])[y]
    expected = quick().fit(X, names)
    for labels in (
        pandas.Series(names, index=frame.index),
        pandas.Series(names, dtype="category"),
        pandas.Series(names, dtype=object),
        pandas.Series(names, dtype="string"),
    ):
        classifier = quick().fit(frame, labels)
        assert np.array_equal(classifier.predict(frame), expected.predict(X))
        assert classifier.feature_names_in_.tolist() == list("abcd") and classifier.n_features_in_ == 4
    assert quick().fit(frame, pandas.Series(y, dtype="Int64")).classes_.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="feature names should match"):
        classifier.predict(frame[list("badc")])
    classifier.save(tmp_path / "model")
    loaded = IncrementalClassifier.load(tmp_path / "model")
    with pytest.raises(ValueError, match="feature names should match"):
        loaded.predict(frame[list("badc")])
    assert np.array_equal(loaded.predict(frame), classifier.predict(frame))


def test_a_custom_network_learns_but_cannot_be_saved(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs
    network = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh())
    classifier = clone(quick(network=network, epochs=20)).fit(X[y < 2], y[y < 2])
    classifier = pickle.loads(pickle.dumps(classifier)).partial_fit(X[y > 1], y[y > 1])
    assert classifier.score(X, y) > 0.8 and classifier.model_.learner.memory.features.rows.shape[1] == 16
    with pytest.raises(UsageError, match="network"):
        classifier.save(tmp_path / "model")


def test_later_updates_do_not_read_the_file_of_weights(photos: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = photos
    first = quick(epochs=1).fit(X, y)
    path = tmp_path / "weights.safetensors"
    storage.save_tensors(path, first.model_.learner.trained.extractor.state_dict())
    classifier = quick(epochs=1, settings={"weights": str(path)}).fit(X, y)
    path.unlink()
    for each in (classifier, pickle.loads(pickle.dumps(classifier))):
        assert "new" in each.partial_fit(X[:4], ["new"] * 4).classes_


# The folder of a model.


@pytest.mark.parametrize(
    ("method", "network"), [*((method, "mlp") for method in OF_EACH_STATE), ("features", "auto"), ("lwf", "auto")]
)
def test_a_saved_pickled_or_copied_classifier_continues_as_the_original_does(
    method: str, network: str, blobs: tuple[Array, Array], tmp_path: Path
) -> None:
    X, y = blobs
    images = {"images_per_class": 3} if method in ("hybrid", "icarl", "lucir") else {}
    settings = {"momentum": 0.8, **({"adapter": "ridge"} if method == "hybrid" else {})}  # this adapter is a function
    classifier = quick(method, network=network, epochs=2, **images, settings=settings)
    classifier.partial_fit(X[y < 2], y[y < 2]).partial_fit(X[y == 2], y[y == 2])
    classifier.save(tmp_path / "model")
    loaded = IncrementalClassifier.load(tmp_path / "model")
    assert loaded.get_params() == classifier.get_params()
    assert loaded.n_features_in_ == 4
    others = [loaded, pickle.loads(pickle.dumps(classifier)), copy.deepcopy(classifier)]
    assert all(same_answers(other, classifier, X) for other in others)
    classifier.partial_fit(X[y > 1], y[y > 1])
    assert all(same_answers(other.partial_fit(X[y > 1], y[y > 1]), classifier, X) for other in others)


def test_automatic_choices_remain_automatic_after_loading(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs
    classifier = IncrementalClassifier(random_state=1, validation_fraction=0.2, features_per_class=9)
    classifier.partial_fit(X[y < 2], y[y < 2], classes=[0, 1, 2, 3, 9])
    classifier.save(tmp_path / "model")
    loaded = IncrementalClassifier.load(tmp_path / "model")
    assert loaded.get_params() == classifier.get_params()
    assert loaded.classes_.tolist() == [0, 1, 2, 3, 9]
    for part in ((y == 2), (y > 0)):
        assert same_answers(loaded.partial_fit(X[part], y[part]), classifier.partial_fit(X[part], y[part]), X)


@pytest.mark.parametrize(
    "parameters",
    [
        {"tune": "first", "network": "mlp"},
        {"tune": "none"},
        {"classifier": "lda"},
        {"classifier": "ridge", "network": "mlp"},
        {"settings": {"shrinkage": 0.4, "codec": "int8"}},
        {"method": "lwf", "settings": {"objective": "eeil"}},
    ],
    ids=str,
)
def test_parameters_are_the_same_after_loading(
    parameters: dict[str, Any], blobs: tuple[Array, Array], tmp_path: Path
) -> None:
    classifier = quick(**{"method": "features", "epochs": 1, **parameters}).fit(*blobs)
    classifier.save(tmp_path / "model")
    loaded = IncrementalClassifier.load(tmp_path / "model")
    assert loaded.get_params() == classifier.get_params()
    assert same_answers(clone(loaded).fit(*blobs), classifier, blobs[0])


def test_tune_decides_when_the_network_is_trained(blobs: tuple[Array, Array]) -> None:
    X, y = blobs

    def weights(classifier: IncrementalClassifier) -> torch.Tensor:
        return torch.cat([each.flatten() for each in classifier.model_.learner.trained.extractor.parameters()])

    trained = {}
    for tune in ("first", "every"):
        classifier = quick(network="mlp", tune=tune, epochs=2).partial_fit(X[y < 2], y[y < 2])
        before = weights(classifier)
        trained[tune] = not torch.equal(before, weights(classifier.partial_fit(X[y > 1], y[y > 1])))
    assert trained == {"first": False, "every": True}
    with pytest.raises(ValueError, match="'mlp'"):
        quick(network="mlp", tune="none").fit(X, y)


def test_classifier_auto_chooses_and_a_name_is_used(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    assert quick(classifier="lda").fit(X, y).model_.learner.classifier_description == "LDA (shrinkage 0.2)"
    chosen = quick().fit(X, y).model_.learner
    assert chosen.settings()["classifier"] == "auto"
    changed = quick().partial_fit(X[y < 2], y[y < 2]).set_params(classifier="nearest-mean")
    changed.partial_fit(X[y > 1], y[y > 1])
    assert changed.model_.learner.classifier_description == "nearest mean"


def test_an_estimator_learns_even_if_accuracy_falls() -> None:
    """`engram learn` rejects such an update, and a person may overrule it; here there is none."""
    draws = np.random.RandomState(0)
    X, more = draws.normal(size=(60, 4)), draws.normal(size=(60, 4))
    X[:30] += 6
    classifier = quick().partial_fit(X, np.repeat([0, 1], 30))
    assert classifier.score(X, np.repeat([0, 1], 30)) == 1
    classifier.partial_fit(more, np.repeat([2, 3], 30))  # classes 1, 2 and 3 have the same distribution
    assert classifier.classes_.tolist() == [0, 1, 2, 3]
    assert classifier.model_.metadata.held_out_counts.accuracy([1]).value < 0.7


def test_later_updates_of_an_image_model_use_the_learning_rate_of_the_command_line(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    first = LearnOptions(method="features", image_size=SIDE, epochs=1, hold_out=0)
    engram.model.learn(folder, draw(tmp_path / "1", NAMES[:2], 2), first)
    more = scan(draw(tmp_path / "2", ("rose", "lily"), 2))
    expected = plan_update(load(folder), more, LearnOptions()).learner.training.learning_rate
    classifier = IncrementalClassifier.load(folder.path).set_params(epochs=1)
    images = np.random.RandomState(0).randint(0, 256, (4, SIDE, SIDE, 3)).astype(np.uint8)
    classifier.partial_fit(images, ["rose", "rose", "lily", "lily"])
    assert load(folder).learner.training.learning_rate == 2.0 and expected == 0.5
    assert classifier.model_.learner.training.learning_rate == expected


def test_saving_again_adds_a_version(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs
    folder = ModelFolder(tmp_path / "model")
    classifier = quick().partial_fit(X[y < 2], y[y < 2])
    classifier.save(folder.path)
    classifier.partial_fit(X[y > 1], y[y > 1]).save(str(folder.path))
    assert folder.versions() == [1, 2] and not folder.problems()
    assert [change.action for change in folder.history()] == ["save", "save"]
    assert load(folder, version=1).names == ("0", "1")
    with pytest.raises(DataError, match=r"engram learn"):
        IncrementalClassifier.load(tmp_path / "nowhere")


def test_a_model_of_images_is_loaded_and_updated(small_model: ModelFolder, tmp_path: Path) -> None:
    loaded = IncrementalClassifier.load(small_model.path)
    assert loaded.classes_.tolist() == sorted(NAMES) and loaded.random_state == 0
    assert loaded.settings["flip"] is True and loaded.settings["pad"] == 4  # as `engram learn` has them
    images = np.random.RandomState(0).randint(0, 256, (10, SIDE, SIDE, 3)).astype(np.uint8)
    model = load(small_model)
    expected = model.probabilities(torch.from_numpy(images))[:, [model.class_index(name) for name in loaded.classes_]]
    assert np.allclose(loaded.predict_proba(images), expected, atol=1e-6)
    loaded.set_params(epochs=1).partial_fit(images, np.array(["noise"] * 5 + ["static"] * 5))
    folder = copied(small_model, tmp_path / "copy")
    loaded.save(folder.path)
    assert load(folder).names == (*model.names, "noise", "static") and folder.versions() == [1, 2, 3]
    assert inspect(folder).to_json()


def test_a_renamed_class_turns_all_labels_into_texts(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs
    folder = ModelFolder(tmp_path / "model")
    quick().fit(X, y).save(folder.path)
    forget(folder, ["3"])
    assert IncrementalClassifier.load(folder.path).classes_.tolist() == [0, 1, 2]
    rename(folder, "1", "one")
    loaded = IncrementalClassifier.load(folder.path)
    assert loaded.classes_.tolist() == ["0", "2", "one"]
    assert loaded.partial_fit(X[y == 3], np.array(["three"] * sum(y == 3))).classes_.tolist()[-1] == "three"


def test_saving_does_not_overwrite_the_update_of_another(tmp_path: Path) -> None:
    inputs, labels = np.random.default_rng(0).normal(size=(40, 6)), np.array(["a", "b"] * 20)
    made = IncrementalClassifier(epochs=1).fit(inputs, labels)
    made.save(tmp_path / "model")
    one, other = (IncrementalClassifier.load(tmp_path / "model") for _ in range(2))
    one.partial_fit(inputs, np.array(["c", "d"] * 20)).save(tmp_path / "model")
    one.save(tmp_path / "model")  # allowed: its own version is in use
    other.partial_fit(inputs, np.array(["e", "f"] * 20))
    with pytest.raises(UsageError, match=str(tmp_path)):
        other.save(tmp_path / "model")
    other.save(tmp_path / "another")
    assert set(IncrementalClassifier.load(tmp_path / "model").classes_) == {"a", "b", "c", "d"}
