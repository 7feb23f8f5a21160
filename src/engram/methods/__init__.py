"""Methods: an objective that trains the network, and a learner that stores something of each task.

`METHODS` combines the two under the names that the field uses. Any objective goes with any learner:
`make("features", objective="lucir")`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engram.errors import UsageError, unknown
from engram.methods.adagauss import ProjectedDistillation
from engram.methods.baselines import Joint, Memoryless
from engram.methods.bic import BiasCorrection
from engram.methods.budget import BudgetError, fit_budget, fit_update, parse_bytes
from engram.methods.costs import Costs, measure_costs
from engram.methods.eeil import CrossDistillation
from engram.methods.efc import FeatureConsolidation
from engram.methods.features import Features, Hybrid
from engram.methods.gaussians import METHOD_SETTINGS, Gaussians
from engram.methods.gem import GEM
from engram.methods.importance import EWC, MAS
from engram.methods.learner import Learner, MemorySources, class_indices_of
from engram.methods.lucir import Rebalancing
from engram.methods.lwm import AttentionDistillation
from engram.methods.objectives import Classification, Distillation, Objective, TrainingContext
from engram.methods.rectification import IL2M, ThresholdMoving
from engram.methods.replay import Rehearsing, Replay
from engram.methods.tuning import Tuning, decide
from engram.settings import build, fields, with_none

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind
    for kind in (
        *(Classification, Distillation, CrossDistillation, Rebalancing, BiasCorrection),
        *(EWC, MAS, GEM, FeatureConsolidation, ProjectedDistillation, AttentionDistillation),
        *(IL2M, ThresholdMoving),
    )
}


@dataclass(frozen=True)
class Method:
    """An entry of the table: a learner, an objective, and the settings that make it this method."""

    learner: type[Learner]
    summary: str
    keeps: str
    objective: str = "distillation"
    settings: Mapping[str, Any] = field(default_factory=dict)


LINEAR = {"head": "linear"}
PLAIN = {**LINEAR, "feature_distillation": 0.0}  # without the paper's γ
TOTAL = {"images_total": 2000}  # what their own papers store on CIFAR-100; 20,000 on ImageNet-1000
MEANS = {"predict_with": "nearest-mean"}
OURS = {
    **{"images_per_class": 0, "codec": "auto", "adapter": "auto", "alpha": 1e4, "adapter_steps": 1600},
    "rotation_tasks": "first",  # where the defaults of the data set have rotation_labels
}


def _statistics(name: str, summary: str, keeps: str = "means and covariances") -> Method:
    return Method(Gaussians, summary, keeps, settings=METHOD_SETTINGS[name])


METHODS: dict[str, Method] = {
    "features": Method(Features, "the paper's: stored features, adapted to the new network, and an SVM", "features"),
    "hybrid": Method(Hybrid, "features, and images replayed in training", "features and images"),
    "engram": Method(
        Hybrid,
        "ours: features with a closer adapter, in a byte a number; on photos, rotation labels in the first task",
        "features",
        settings=OURS,
    ),
    "features-unadapted": Method(
        Features, "the same as features, left as they are", "features", settings={"adapter": "identity"}
    ),
    "gamma-lwf": Method(Memoryless, "lwf with a cosine head and feature distillation", "nothing"),
    "lwf": Method(Memoryless, "distil the previous network's scores", "nothing", settings=PLAIN),
    "gamma-icarl": Method(
        Replay,
        "icarl with a cosine head and feature distillation",
        "images",
        settings={**MEANS, "images_per_class": 20},
    ),
    "icarl": Method(
        Replay, "replay images, distil, predict the nearest mean", "images", settings={**PLAIN, **TOTAL, **MEANS}
    ),
    "eeil": Method(Replay, "a distilled head per task, then fine-tuning on balanced images", "images", "eeil", TOTAL),
    "lucir": Method(
        Replay,
        "rebalancing: cosine head, feature distillation, margins between old and new",
        "images",
        "lucir",
        {"images_per_class": 20},
    ),
    "bic": Method(Replay, "distil, then correct the bias toward new classes", "images", "bic", TOTAL),
    "bic-uncorrected": Method(Replay, "bic without the correction", "images", "bic", {**TOTAL, **LINEAR}),
    "il2m": Method(Replay, "replay images, then rectify the scores of old classes", "images", "il2m", TOTAL),
    "threshold-moving": Method(
        Replay, "distil, then divide scores by the share of each class in training", "images", "threshold-moving", TOTAL
    ),
    "gem": Method(
        Replay, "project gradients: no step raises the loss on a task's images", "images", "gem", {**TOTAL, **LINEAR}
    ),
    "a-gem": Method(
        Replay,
        "the same with one constraint, on all stored images",
        "images",
        "gem",
        {**TOTAL, **LINEAR, "constraints": "one", "memory_strength": 0.0},
    ),
    "sdc": _statistics("sdc", "class means, moved by the drift of features near them", "means"),
    "ldc": _statistics("ldc", "class means, moved by a learned linear map", "means"),
    "adc": _statistics("adc", "class means, moved by the drift of images perturbed towards them", "means"),
    "dpcr": _statistics("dpcr", "Gaussians, moved by projections per class; ridge regression"),
    "fecam": _statistics("fecam", "frozen network; Mahalanobis distance to each class"),
    "fetril": _statistics("fetril", "frozen network; an SVM on new features translated to old means", "means"),
    "gaussian-replay": _statistics("gaussian-replay", "Gaussians, moved by ridge regression; an SVM on samples drawn"),
    "lwm": Method(Memoryless, "lwf, and keep the teacher's attention", "nothing", "lwm", LINEAR),
    "ewc": Method(Memoryless, "hold weights by their Fisher information", "importance of weights", "ewc"),
    "mas": Method(Memoryless, "hold weights by their effect on the scores", "importance of weights", "mas"),
    "finetune": Method(Memoryless, "train on the new classes alone: the lower bound", "nothing", "classification"),
    "joint": Method(Joint, "train anew on everything seen: the upper bound", "every image", "classification"),
}


def override(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` overridden by `asked`; images_per_class and images_total exclude each other."""
    either = {"images_per_class", "images_total"}
    dropped = either if any(asked.get(name) is not None for name in either) else set()
    return {**{name: value for name, value in defaults.items() if name not in dropped}, **asked}


def make(method: str, /, **settings: Any) -> Learner:
    """A learner of this method. Settings have flat names: `network="resnet32", learning_rate=0.5`."""
    entry, settings = _entry(method), with_none(settings)
    name = settings.pop("objective", None) or entry.objective
    chosen = {"objective": _objective(name)}
    defaults = chosen["objective"].defaults
    if name == entry.objective:
        own = {**defaults, **entry.settings}
    else:  # another paper's training: its own defaults win, and the method's settings that it does not have are dropped
        known = setting_names(method, name)
        own = {**{setting: value for setting, value in entry.settings.items() if setting in known}, **defaults}
    learner = build(entry.learner, override(own, settings), f"method '{method}'", chosen)
    learner.name = method
    return learner


def setting_names(method: str, objective: str | None = None) -> set[str]:
    """The settings of a method, with its own objective or another."""
    entry = _entry(method)
    return {name for name, _, _ in fields(entry.learner, {"objective": _objective(objective or entry.objective)})}


def _entry(method: str) -> Method:
    if method not in METHODS:
        raise unknown("method", method, METHODS, "engram methods")
    return METHODS[method]


def _objective(name: str) -> type[Objective]:
    if name not in OBJECTIVES:
        raise unknown("objective", name, OBJECTIVES)
    return OBJECTIVES[name]


__all__ = ["METHODS", "OBJECTIVES", "BudgetError", "Costs", "Features", "Learner", "MemorySources", "Memoryless"]
__all__ += ["Method", "Objective", "Rehearsing", "Replay", "TrainingContext", "Tuning", "class_indices_of", "decide"]
__all__ += ["fit_budget", "fit_update", "make", "measure_costs", "override", "parse_bytes", "setting_names"]

# Modules that register methods of one's own, in this process and in the processes that it starts.
for plugin in filter(None, os.environ.get("ENGRAM_PLUGINS", "").split(",")):
    try:
        importlib.import_module(plugin.strip())
    except ImportError as error:
        raise UsageError(f"The module '{plugin}' that ENGRAM_PLUGINS names cannot be imported: {error}.") from error
