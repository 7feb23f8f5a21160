"""The parameters of `IncrementalClassifier` as options of an update, and back; invalid ones are ValueErrors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from engram.errors import DataError, UsageError
from engram.methods import METHODS, make, setting_names
from engram.model import LearnOptions, Model, settings_of
from engram.model.plan import BATCH, FIRST_RATE, LATER_RATE, choose_epochs, choose_network, image_settings
from engram.network import is_pretrained
from engram.network.registry import IDENTITY

# Settings that have a parameter of their own.
OWN = ("network", "tune", "classifier", "epochs", "features_per_class", "images_per_class", "seed", "device")
NAMED = ("method", "tune", "epochs", "features_per_class", "images_per_class", "budget", "device")  # as in LearnOptions
# For a head on fixed features, if its loss is divided by the number of classes. With the learning rate of an MLP, 0.03,
# "finetune" reached .77 on iris and .90 on digits; with this one .91 and .94.
HEAD_RATE = 1.0

# Defaults for arrays, about which nothing is known: images are neither flipped nor shifted.
ARRAYS: dict[str, Any] = {
    **{"batch_size": BATCH, "schedule": "one-cycle", "learning_rate": 0.2, "expected_classes": 10},
    **{"pad": 0, "flip": False},
    **{"adapter_width": 256},
}
# There may be few vectors and hundreds of models. Their network has no batch norm: a lower learning rate and stronger
# feature distillation keep stored features usable (found on digits as vectors, and on blobs).
VECTORS: dict[str, Any] = {**ARRAYS, "learning_rate": 0.03, "feature_distillation": 2.0, "adapter_steps": 120}
UNDIVIDED_VECTOR_RATE = 0.05  # for objectives that are not divided by the number of classes
VECTOR_EPOCHS = 300, 5, 30  # steps of training in each update; at least and at most so many epochs


class InvalidParameter(UsageError, ValueError):
    """An invalid parameter or setting; a ValueError, as in scikit-learn."""


class InvalidInput(DataError, ValueError):
    """Invalid X or y; a ValueError, as in scikit-learn."""


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Raise the errors of engram inside as ValueErrors."""
    try:
        yield
    except UsageError as error:
        raise InvalidParameter(str(error)) from error
    except DataError as error:
        raise InvalidInput(str(error)) from error


def options_of(
    parameters: Mapping[str, Any], samples: int, shape: tuple[int, ...], seed: int, *, first: bool
) -> LearnOptions:
    """The parameters as options of an update with this many samples of this shape."""
    given = parameters["settings"] if parameters["settings"] is not None else {}
    if not isinstance(given, Mapping):
        raise InvalidParameter(f"`settings` must map names to values; found {given!r}.")
    given = _plain(given)
    if not first:
        given.pop("weights", None)  # the model contains the weights it started from
    if owned := [name for name in OWN if name in given]:
        parameter = "random_state" if owned[0] == "seed" else owned[0]
        raise InvalidParameter(f"`settings` cannot hold '{owned[0]}'. Give it as the parameter {parameter}.")
    known = setting_names(parameters["method"], given.get("objective"))
    named = _plain({name: parameters[name] for name in NAMED})
    if "features_per_class" not in known:  # it has a default, for all methods
        named["features_per_class"] = None
    network = choose_network(shape) if parameters["network"] == "auto" else parameters["network"]
    settings = {
        **_settings(parameters["method"], given.get("objective"), network, shape),
        "epochs": choose_epochs(samples, *(VECTOR_EPOCHS if len(shape) == 1 else ())),
        **given,
    }
    return LearnOptions(
        **named,
        # None: chosen by the inputs or the model.
        network=None if parameters["network"] == "auto" else parameters["network"],
        classifier=None if parameters["classifier"] == "auto" else parameters["classifier"],
        force=True,  # an estimator learns whatever it is given
        trains=parameters["epochs"] is not None and parameters["tune"] in ("auto", "every"),
        settings=settings,
        hold_out=_share("validation_fraction", parameters["validation_fraction"]),
        seed=seed,
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < 1:
        raise InvalidParameter(f"{name} must be at least 0 and less than 1; found {value!r}.")
    return float(value)


def _settings(method: str, objective: str | None, network: str | nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """The default settings for inputs of this shape."""
    known, vectors = setting_names(method, objective), len(shape) == 1
    defaults = dict(VECTORS if vectors else ARRAYS)
    if "expected_classes" not in known:
        defaults["learning_rate"] = UNDIVIDED_VECTOR_RATE if vectors else None
    own = known - METHODS[method].settings.keys()  # what makes a method itself stays
    settings = {name: value for name, value in defaults.items() if name in own and value is not None}
    if network == IDENTITY and "expected_classes" in settings:
        settings["learning_rate"] = HEAD_RATE
    return settings


def parameters_of(model: Model) -> dict[str, Any]:
    """The parameters with which a new classifier would learn as this model does, except for the device."""
    learner, facts = model.learner, model.metadata
    settings = settings_of(learner)
    if len(learner.shape_) == 3 and settings["learning_rate"] == FIRST_RATE:
        settings["learning_rate"] = LATER_RATE  # `engram learn` uses the other in the first update only
    objective = settings["objective"] if settings["objective"] != METHODS[learner.name].objective else None
    pretrained = is_pretrained(learner.network)
    usual = image_settings(learner.name, objective, from_scratch=not pretrained, pretrained=pretrained)
    usual |= _settings(learner.name, objective, learner.network, learner.shape_)
    base = settings_of(make(learner.name, **usual, objective=objective))
    other = {name: value for name, value in settings.items() if name not in OWN and value != base[name]}
    other |= {"objective": objective} if objective is not None else {}
    images, classifier = settings.get("images_per_class"), settings.get("classifier")
    if images is not None:
        other.pop("images_total", None)  # follows from images_per_class
    return {
        "method": learner.name,
        "network": "auto" if learner.network == choose_network(learner.shape_) else learner.network,
        "tune": learner.tune,
        "classifier": classifier if classifier != base.get("classifier") else "auto",
        "epochs": facts.epochs,
        "features_per_class": facts.features_per_class or 250,
        "images_per_class": images if images != base.get("images_per_class") else None,
        "budget": facts.budget,
        "validation_fraction": facts.hold_out,
        "random_state": learner.seed,
        "settings": other or None,
    }
