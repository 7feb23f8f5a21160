"""`IncrementalClassifier`: the scikit-learn front door."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import nn

from engram.data import Samples
from engram.errors import UsageError
from engram.estimator.labels import kind_of, kind_of_names, names_of, values_of
from engram.estimator.parameters import InvalidInput, as_value_errors, options_of, parameters_of
from engram.model import (
    Model,
    ModelFolder,
    load_version,
    plan_update_of_samples,
    save,
    train_update,
    with_metadata,
    with_settings,
)
from engram.model.plan import METHOD

Array = NDArray[Any]

BLOCK = 256  # inputs per forward pass


class IncrementalClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that learns new classes, again and again, without the samples of the old ones.

    `partial_fit` takes samples of new classes, of known ones, or of both; `fit` starts over. It stores a network and a
    feature vector for each of a few samples per class, and no input. Inputs are float vectors (n, d), or uint8 images
    (n, height, width) or (n, height, width, channels).

    By default no network is trained: vectors are features already, and images of at least 24 pixels a side are seen by
    a network with ImageNet weights. Accuracy after many updates is then as if all classes had come at once.

    Parameters
    ----------
    method : str, default="engram"
        One of those that `engram methods` lists.
    network : str or torch.nn.Module, default="auto"
        The feature extractor. "auto" uses vectors as they are ("identity", which only scales their columns by the
        statistics of the first update), "efficientnet-lite0" with ImageNet weights for images of at least 24 pixels a
        side, and trains a small network on smaller ones. Others: those that `engram networks` lists, such as "mlp" or
        "resnet32", which are trained from scratch; "hf:..." for one of the Hugging Face hub; or a module.
    tune : {"auto", "none", "first", "every"}, default="auto"
        When the network is trained: never, in the first update, or in every one. "auto" trains a network that starts
        from random weights in every update that has classes to tell apart, and a pretrained one in the first, if
        held-out samples show that it gains from it.
    classifier : str, default="auto"
        What classifies features, for methods that store them: "ridge", "lda", "nearest-mean", "random-projection",
        "svm" or "softmax". "auto" chooses by leave-one-out accuracy on the stored features, if the network is
        pretrained; for a network that is trained from scratch it is the method's own.
    epochs : int, default=None
        Passes over the samples of an update, if a network or a head is trained. None chooses by the number of samples.
        A number also trains a network from scratch in updates of a single class, which None skips.
    features_per_class : int, default=250
        Most features that are stored per class, by methods that store any.
    images_per_class : int, default=None
        Inputs that are stored per class, by methods that store any, such as "hybrid". None is the method's own number.
    budget : int, default=None
        Most bytes that the memory may take; `features_per_class` is then an upper bound.
    validation_fraction : float, default=0.0
        The share of each class that is held out, if the network is trained, to calibrate probabilities. Where it is not
        trained, probabilities are calibrated by leave-one-out, and nothing needs to be held out.
    random_state : int, RandomState instance or None, default=None
        The seed of a new model. The same number gives the same model.
    device : str, default="auto"
        "cpu", "cuda", "mps", or the fastest available.
    settings : dict, default=None
        Any other setting of the method by its name, such as `{"learning_rate": 0.1, "flip": True}`.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The known labels, sorted: the order of the columns, whatever the order of arrival.
    n_features_in_ : int
        The length of a vector; not defined for images.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        The column names of the data frames it has learned, if all of them are strings.
    model_ : engram.model.Model
        What was learned. `model_.learner.memory.nbytes` is the size of its memory in bytes, and
        `model_.metadata.held_out_counts.accuracy()` the leave-one-out accuracy over all classes.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from engram import IncrementalClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> classifier = IncrementalClassifier(random_state=0)
    >>> for first in (0, 5):  # five classes now, and five later
    ...     new = (first <= y) & (y < first + 5)
    ...     classifier = classifier.partial_fit(X[new], y[new])
    >>> classifier.classes_
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> bool(classifier.model_.metadata.held_out_counts.accuracy().value > 0.97)  # leave-one-out, over all ten
    True
    >>> classifier.model_.learner.memory.nbytes  # at most 250 vectors of 64 numbers per class, a byte each
    115520
    """

    def __init__(
        self,
        method: str = METHOD,
        *,
        network: str | nn.Module = "auto",
        tune: str = "auto",
        classifier: str = "auto",
        epochs: int | None = None,
        features_per_class: int = 250,
        images_per_class: int | None = None,
        budget: int | None = None,
        validation_fraction: float = 0.0,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.network = network
        self.tune = tune
        self.classifier = classifier
        self.epochs = epochs
        self.features_per_class = features_per_class
        self.images_per_class = images_per_class
        self.budget = budget
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.settings = settings

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn inputs X with labels y (n,) from scratch. After an error the classifier is unchanged."""
        with self._unchanged_by_errors():
            inputs, labels = self._training_data(X, y, reset=True)
            self._set_model(self._updated(None, inputs, labels, labels[:0]))
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Learn new classes, more of known ones, or both. After an error the classifier is unchanged.

        `classes` is optional. As elsewhere in scikit-learn, the first call may announce all classes that will come:
        each then has its column at once, with a probability of 0 until it is learned. Later calls may repeat them.
        """
        model: Model | None = getattr(self, "model_", None)
        with self._unchanged_by_errors():
            inputs, labels = self._training_data(X, y, reset=model is None)
            announced = self._announced(classes, labels)
            self._set_model(self._updated(model, inputs, labels, announced))
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The most likely class of each input, (n,)."""
        class_indices = self._scores(X).argmax(axis=1)
        answers: Array = self.classes_[class_indices]
        return answers

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities (n, n_classes), columns in the order of `classes_`."""
        scores, known = self._scores(X), self._columns >= 0
        probabilities = np.zeros_like(scores)
        probabilities[:, known] = self.model_.calibrated(torch.from_numpy(scores[:, known])).numpy()
        return probabilities

    def decision_function(self, X: ArrayLike) -> Array:
        """Scores (n, n_classes), or (n,) for two classes: those of the second, less those of the first."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to a model's folder, as `engram learn` does: a new one, or its next version."""
        check_is_fitted(self)
        place = Path(path).resolve()
        folder = ModelFolder(path)
        loaded, version = getattr(self, "_loaded", (None, 0))
        with folder.writing() as writer:
            if loaded == place and folder.exists() and folder.pointer().current != version:
                raise UsageError(
                    f"The model {place} has changed since it was loaded, and its last update would be lost. "
                    "Load it again and repeat yours, or save to another folder."
                )
            record = {"memory_bytes": self.model_.learner.memory.nbytes}
            manifest = save(writer, self.model_, action="save", record=record)
        self._loaded = place, manifest.version

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str = "auto") -> Self:
        """Load a classifier from a model's folder, written by `save` or `engram learn`; it can go on learning.

        A model of images takes uint8 images (n, height, width, channels) of the size it has learned.
        """
        manifest, model = load_version(ModelFolder(path), device=device)
        classifier = cls(**parameters_of(model), device=device)
        classifier._loaded = Path(path).resolve(), manifest.version
        classifier._set_model(with_metadata(model, labels=kind_of_names(model)))
        if len(model.learner.shape_) == 1:
            classifier.n_features_in_ = model.learner.shape_[0]
        if model.metadata.feature_names:
            classifier.feature_names_in_ = np.array(model.metadata.feature_names, dtype=object)
        return classifier

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True  # grey images; there is no tag for those with channels
        return tags

    @contextmanager
    def _unchanged_by_errors(self) -> Iterator[None]:
        """Undo what scikit-learn's checks record about new inputs if the update fails."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__ = before
            raise

    # Validation of inputs.

    def _training_data(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        """Inputs and labels (n,) to learn from."""
        X = _array(X)
        if _is_images(X):
            inputs = self._images(X, reset=reset)
            if y is None:
                raise InvalidInput("IncrementalClassifier requires y to be passed, but the target y is None.")
            labels = column_or_1d(check_array(y, ensure_2d=False, dtype=None, input_name="y"), warn=True)
            check_consistent_length(inputs, labels)
        else:
            inputs, labels = self._vectors(X, y, reset=reset)
        with as_value_errors():
            kind_of(labels, None)
        check_classification_targets(labels)
        return inputs, labels

    def _inputs(self, X: Any) -> Array:
        """Inputs to classify."""
        X = _array(X)
        inputs: Array = self._images(X, reset=False) if _is_images(X) else self._vectors(X, reset=False)
        return inputs

    def _images(self, images: Array, *, reset: bool) -> Array:
        if images.dtype != np.uint8 or images.ndim > 4:
            raise InvalidInput(
                "X must be vectors (n, d), or uint8 images (n, height, width) or (n, height, width, channels); "
                f"found {images.dtype} {images.shape}."
            )
        images = images[..., np.newaxis] if images.ndim == 3 else images
        if images.shape[-1] not in (1, 3) or not images.size:
            raise InvalidInput(f"Images must have 1 or 3 channels, and there must be some; found {images.shape}.")
        if reset:
            for name in {"n_features_in_", "feature_names_in_"} & set(vars(self)):  # of vectors learned before
                delattr(self, name)
        else:
            self._expect("images", images.shape[1:])
        return np.ascontiguousarray(images)

    def _vectors(self, X: Any, *y: Any, reset: bool) -> Any:
        if not reset and len(self.model_.learner.shape_) == 3 and getattr(X, "ndim", None) == 2:
            self._expect("vectors", X.shape[1:])
        return validate_data(self, X, *y, reset=reset, dtype=np.float32, order="C")

    def _expect(self, kind: str, shape: tuple[int, ...]) -> None:
        learned = self.model_.learner.shape_
        if shape != learned:
            expected = f"{'images' if len(learned) == 3 else 'vectors'} {learned}"
            raise InvalidInput(f"X has {kind} {shape}, but IncrementalClassifier is expecting {expected} as input.")

    def _announced(self, classes: ArrayLike | None, labels: Array) -> Array:
        """The labels in `classes`, or none; those in y must be among them."""
        if classes is None:
            return labels[:0]
        announced: Array = np.unique(column_or_1d(classes))
        with as_value_errors():
            kind_of(announced, kind_of(labels, None))
        known: Array | None = getattr(self, "classes_", None)
        if known is not None and not np.array_equal(known, announced):
            raise InvalidInput(
                f"`classes={classes!r}` is not the same as on last call to partial_fit, was: {known!r}. "
                "Omit `classes`: any call may bring new ones."
            )
        strange = np.setdiff1d(labels, announced)
        if len(strange):
            raise InvalidInput(f"The labels {strange.tolist()} in y are not in `classes={classes!r}`.")
        return announced

    # Learning and scores.

    def _updated(self, model: Model | None, inputs: Array, labels: Array, announced: Array) -> Model:
        """The updated model; `model` itself is not changed."""
        with as_value_errors():
            kind = kind_of(labels, None if model is None else model.metadata.labels)
            announced_names = set(names_of(announced, kind_of(announced, kind)))
        announced_names |= set(() if model is None else model.metadata.announced)
        values, codes = np.unique(labels, return_inverse=True)
        names = names_of(values, kind)
        with as_value_errors():
            if model is not None and model.learner.device != self.device:
                model = dataclasses.replace(model, learner=with_settings(model.learner, device=self.device))
            arriving = dict(zip(names, np.bincount(codes).tolist(), strict=True))
            seed = self._seed() if model is None else model.learner.seed
            parameters = self.get_params(deep=False)
            options = options_of(parameters, len(inputs), inputs.shape[1:], seed, first=model is None)
            plan = plan_update_of_samples(model, arriving, inputs.shape[1:], options)
            class_indices = torch.tensor([plan.labels[name] for name in names])[torch.from_numpy(codes)]
            inputs = inputs if inputs.flags.writeable else inputs.copy()  # torch warns about read-only memory
            updated, _ = train_update(model, plan, Samples.of(inputs, class_indices), options)
        return with_metadata(
            updated,
            labels=kind,
            announced=tuple(sorted(announced_names - set(updated.names))),
            feature_names=tuple(getattr(self, "feature_names_in_", ())),
        )

    def _seed(self) -> int:
        draws = check_random_state(self.random_state)
        return int(self.random_state) if isinstance(self.random_state, int | np.integer) else int(draws.randint(2**31))

    def _set_model(self, model: Model) -> None:
        values = values_of((*model.names, *model.metadata.announced), model.metadata.labels)
        order = np.argsort(values, kind="stable")
        self.model_ = model
        self.classes_ = values[order]
        self._columns = np.where(order < len(model.names), order, -1)  # the model's; -1: not learned yet

    def _scores(self, X: ArrayLike) -> NDArray[np.float64]:
        """Scores (n, n_classes), columns in the order of `classes_`; lowest for a class that was not learned yet."""
        check_is_fitted(self)
        inputs = self._inputs(X)
        with as_value_errors():
            blocks = (inputs[start : start + BLOCK] for start in range(0, len(inputs), BLOCK))
            scores = np.concatenate([self._answered(block) for block in blocks])
        absent = scores.min(axis=1, keepdims=True) - 1
        return np.where(self._columns >= 0, scores[:, self._columns], absent)

    def _answered(self, inputs: Array) -> NDArray[np.float64]:
        """The model's scores of a block of inputs, columns in its own order."""
        # Floating-point sums depend on the batch size. All batches of vectors have one size, so that the scores of a
        # vector do not depend on the others.
        missing = BLOCK - len(inputs) if inputs.ndim == 2 else 0
        padded = np.concatenate([inputs, np.zeros_like(inputs, shape=(missing, *inputs.shape[1:]))])
        scores = self.model_.scores(torch.from_numpy(padded))[: len(inputs)]
        return scores.double().numpy()


def _array(X: Any) -> Any:
    """Lists as an array, so that images differ from vectors by their number of dimensions."""
    if hasattr(X, "ndim"):
        return X.numpy(force=True) if isinstance(X, torch.Tensor) else X
    try:
        return np.asarray(X)
    except ValueError as error:
        raise InvalidInput(f"X must be an array, or lists of equal lengths: {error}") from error


def _is_images(X: Any) -> bool:
    return isinstance(X, np.ndarray) and X.ndim > 2
