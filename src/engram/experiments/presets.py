"""Presets: the paper's settings and short ones, from what each data set says of itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from engram.data import DATASETS, Dataset
from engram.errors import unknown
from engram.methods import METHODS, setting_names
from engram.network import is_pretrained

PRESETS = ("paper", "short")
OWN = DATASETS["folder"]  # stands for every data set that is not in the registry

# A pretrained network has features of about a thousand numbers: an MLP of 16 d would have 470 million weights.
PRETRAINED = {"adapter_width": 1024}


def preset(
    name: str, method: str, dataset: Dataset, objective: str | None = None, network: str | nn.Module | None = None
) -> dict[str, Any]:
    """The settings of this preset for a method on a data set, as flat names; only those that the method has.

    `network` is the one that was asked for, if any.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    entry, source = METHODS[method], DATASETS.get(dataset.name, OWN)
    known = setting_names(method, objective)
    if "images" not in entry.keeps:
        known -= {"images_per_class"}  # the method stores images only where the user asks for them
    if "images_total" not in entry.settings:
        known -= {"images_total"}
    settings = {"expected_classes": len(dataset.class_names), **source.settings, **source.methods.get(method, {})}
    if source.crop is not None:
        settings["crop"] = int(source.crop * min(dataset.train.shape[:2]))
    if network is not None and is_pretrained(network):
        settings |= PRETRAINED
    by_objective = source.paper if name == "paper" else source.short
    settings |= {**by_objective.get("all", {}), **by_objective.get(objective or entry.objective, {})}
    return {setting: value for setting, value in settings.items() if setting in known}


def classes_per_task(dataset: Dataset) -> int:
    """The usual number for this data set; a fifth of the classes of others, or of a few chosen ones."""
    usual, classes = DATASETS.get(dataset.name, OWN).classes_per_task, len(dataset.class_names)
    return usual if usual is not None and usual < classes else max(1, classes // 5)
