"""Presets: the paper's settings, and short ones, for each data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram.data import Dataset
from engram.errors import unknown
from engram.methods import METHODS, setting_names

PRESETS = ("paper", "short")

# What may be done to an image without changing its class: a property of the data, the same in every preset.
AUGMENTATION: Mapping[str, dict[str, Any]] = {
    "cifar100": {"pad": 4, "flip": True},
    "cifar10": {"pad": 4, "flip": True},
    "digits": {"pad": 1, "flip": False},  # a mirrored digit is another sign, or none
}
CAREFUL = {"pad": 0, "flip": False}  # for data nothing is known of

# Digits: chosen on its validation split. A task has 290 images, so the adapter is narrower than 16 d.
SHORT: Mapping[str, dict[str, Any]] = {
    "digits": {
        **{"epochs": 20, "batch_size": 32, "schedule": "one-cycle", "rate": 0.2},
        **{"features_per_class": 100, "images_per_class": 10},
        **{"adapter_width": 256, "adapter_steps": 400, "adapter_batch": 32},
    },
}
SHORT_DEFAULT = {"epochs": 10, "schedule": "one-cycle"}

# The rate above is for objectives that are divided by the number of classes. For those that are not, each its best on
# digits' validation split; elsewhere their papers' 0.1.
RATES: Mapping[str, dict[str, float]] = {"digits": {"eeil": 0.2, "lucir": 0.05, "bic": 0.2}}

CLASSES_PER_TASK = {"digits": 2, "cifar10": 2, "cifar100": 10}


def preset(name: str, method: str, dataset: Dataset, objective: str | None = None) -> dict[str, Any]:
    """The settings of this preset for a method on a data set, as flat names; the method's own only."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    known = setting_names(method, objective)
    settings = {"expected_classes": len(dataset.class_names), **AUGMENTATION.get(dataset.name, CAREFUL)}
    if name == "short":
        settings |= SHORT.get(dataset.name, SHORT_DEFAULT)
        rates = RATES.get(dataset.name, {})
        trained_by = objective or METHODS[method].objective
        settings |= {"rate": rates[trained_by]} if trained_by in rates else {}
    return {setting: value for setting, value in settings.items() if setting in known}


def classes_per_task(dataset: Dataset) -> int:
    """The field's usual number for this data set; a fifth of the classes for one's own."""
    return CLASSES_PER_TASK.get(dataset.name, max(1, len(dataset.class_names) // 5))
