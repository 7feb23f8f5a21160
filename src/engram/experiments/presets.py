"""Presets: the paper's settings, and short ones, for each data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from engram.data import Dataset
from engram.errors import unknown
from engram.methods import METHODS, setting_names
from engram.network import is_pretrained

PRESETS = ("paper", "short")

# What may be done to an image without changing its class, and the network it is for: properties of the data, the same
# in every preset.
IMAGENET = {"network": "resnet18", "pad": 0, "flip": True}  # §5.1; and a window: see CROPPED
DATA: Mapping[str, dict[str, Any]] = {
    "cifar100": {"pad": 4, "flip": True},
    "cifar10": {"pad": 4, "flip": True},
    "digits": {"pad": 1, "flip": False},  # a mirrored digit is another sign, or none
    "imagenet100": IMAGENET,
    "imagenet1000": IMAGENET,
    "tiny-imagenet-200": {"network": "resnet18-small", "pad": 8, "flip": True},
}
CAREFUL = {"pad": 0, "flip": False}  # for data nothing is known of
CROPPED = {"imagenet100": 7 / 8, "imagenet1000": 7 / 8}  # iCaRL's code: 224 of 256 pixels a side; others in proportion

# How long, and at which rates, each objective trains on ImageNet: the paper's own (§5.1), and what the authors of LUCIR
# (§4.1 and their code) and BiC (§5.2 and their code) say of it. EEIL's stays as on CIFAR-100.
ON_IMAGENET: Mapping[str, dict[str, Any]] = {
    "distillation": {"epochs": 60, "milestones": (20 / 60, 30 / 60, 40 / 60, 50 / 60)},
    "classification": {"epochs": 60, "milestones": (20 / 60, 30 / 60, 40 / 60, 50 / 60)},
    "lucir": {"epochs": 90, "milestones": (30 / 90, 60 / 90), "weight_decay": 1e-4},
    "bic": {"epochs": 100, "milestones": (0.3, 0.6, 0.8, 0.9), "weight_decay": 1e-4, "batch_size": 256},
}
PAPER = dict.fromkeys(("imagenet100", "imagenet1000", "tiny-imagenet-200"), ON_IMAGENET)
LESS_FORGET = dict.fromkeys(("imagenet100", "imagenet1000", "tiny-imagenet-200"), 10.0)  # LUCIR's λ_base, its §4.1

# What is kept, where it is not as on CIFAR-100 (Table 1): of methods that share out a total, twenty images a class at
# the end; of the hybrid ten, beside 250 features.
TOTALS = {"imagenet1000": 20_000, "tiny-imagenet-200": 4_000}
HYBRID_IMAGES = dict.fromkeys(("imagenet100", "imagenet1000"), 10)

# Digits: chosen on its validation split. A task has 290 images, so the adapter is narrower than 16 d.
SHORT: Mapping[str, dict[str, Any]] = {
    "digits": {
        **{"epochs": 20, "batch_size": 32, "schedule": "one-cycle", "learning_rate": 0.2},
        **{"features_per_class": 100, "images_per_class": 10},
        **{"adapter_width": 256, "adapter_steps": 400, "adapter_batch": 32},
    },
}
SHORT_DEFAULT = {"epochs": 10, "schedule": "one-cycle"}

# The rate above is for objectives that are divided by the number of classes. For those that are not, each its best on
# digits' validation split; elsewhere their papers' 0.1.
RATES: Mapping[str, dict[str, float]] = {"digits": {"eeil": 0.2, "lucir": 0.05, "bic": 0.2}}

# A pretrained network has features of about a thousand numbers: an MLP of 16 d would have 470 million weights.
PRETRAINED: Mapping[str, Any] = {"adapter_width": 1024}

CLASSES_PER_TASK = {
    **{"digits": 2, "cifar10": 2, "cifar100": 10},
    **{"imagenet100": 10, "imagenet1000": 100, "tiny-imagenet-200": 20},
}


def preset(
    name: str, method: str, dataset: Dataset, objective: str | None = None, network: str | nn.Module | None = None
) -> dict[str, Any]:
    """The settings of this preset for a method on a data set, as flat names; the method's own only.

    `network` is the one that was asked for, if any.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    known = setting_names(method, objective)
    if "images" not in METHODS[method].keeps:
        known -= {"images_per_class"}  # it may be able to, but keeps them only where they are asked for
    trained_by = objective or METHODS[method].objective
    settings = {"expected_classes": len(dataset.class_names), **_data(dataset), **_kept(method, dataset)}
    if network is not None and is_pretrained(network):
        settings |= PRETRAINED
    if name == "paper":
        settings |= PAPER.get(dataset.name, {}).get(trained_by, {})
    else:
        settings |= SHORT.get(dataset.name, SHORT_DEFAULT)
        rates = RATES.get(dataset.name, {})
        settings |= {"learning_rate": rates[trained_by]} if trained_by in rates else {}
    return {setting: value for setting, value in settings.items() if setting in known}


def _data(dataset: Dataset) -> dict[str, Any]:
    settings = dict(DATA.get(dataset.name, CAREFUL))
    if dataset.name in CROPPED:
        settings["crop"] = int(CROPPED[dataset.name] * min(dataset.train.shape[:2]))
    if dataset.name in LESS_FORGET:
        settings["less_forget"] = LESS_FORGET[dataset.name]
    return settings


def _kept(method: str, dataset: Dataset) -> dict[str, Any]:
    if "images_total" in METHODS[method].settings and dataset.name in TOTALS:
        return {"images_total": TOTALS[dataset.name]}
    if method == "hybrid" and dataset.name in HYBRID_IMAGES:
        return {"images_per_class": HYBRID_IMAGES[dataset.name]}
    return {}


def classes_per_task(dataset: Dataset) -> int:
    """The field's usual number for this data set; a fifth of the classes for one's own, or of a few chosen ones."""
    usual, classes = CLASSES_PER_TASK.get(dataset.name), len(dataset.class_names)
    return usual if usual is not None and usual < classes else max(1, classes // 5)
