"""Learners that have learned a small stream in a moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engram.data import Stream
from engram.methods import METHODS, Learner, make, setting_names

QUICK: Mapping[str, Any] = {
    "epochs": 2,
    "batch_size": 16,
    "learning_rate": 0.2,
    "expected_classes": 6,
    "adapter_steps": 10,
    "adapter_width": 32,
    "features_per_class": 8,
    "images_per_class": 5,
}


def distinct_methods(*settings: str) -> list[str]:
    """One method for each combination of a learner, an objective and these settings."""
    kinds = {
        (entry.learner, entry.objective, *map(entry.settings.get, settings)): name
        for name, entry in reversed(METHODS.items())
    }
    return list(kinds.values())


OF_EACH_KIND = distinct_methods("head", "covariance", "replay", "classifier")
OF_EACH_TRAINING = distinct_methods("replay")
OF_EACH_LEARNER = list({entry.learner: name for name, entry in METHODS.items()}.values())


def _form(method: str) -> tuple[object, ...]:
    learner = make(method)
    settings = learner.settings()
    return type(learner), *(settings.get(name) for name in ("head", "classifier", "predict_with", "covariance"))


# One method of each kind of saved state: they differ in learner or head, in what classifies or in what is stored.
OF_EACH_STATE = list({_form(method): method for method in reversed(METHODS)}.values())


def quick(method: str = "features", **settings: Any) -> Learner:
    """A new learner with quick settings; those that the method does not have are ignored."""
    known = {"objective", *setting_names(method, settings.get("objective"))}
    return make(method, **{name: value for name, value in {**QUICK, **settings}.items() if name in known})


def learned(method: str, stream: Stream, **settings: Any) -> Learner:
    """A quick learner that has learned the stream."""
    learner = quick(method, **settings)
    for task in stream:
        learner.learn(task)
    return learner


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether two states hold equal tensors under the same names."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
