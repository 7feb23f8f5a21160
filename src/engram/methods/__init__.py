"""Who learns: an objective that trains the network, and a learner that keeps something of the task.

`METHODS` puts the two together under the names that the field knows. Any objective goes with any learner:
`make("features", objective="lucir")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engram.errors import unknown
from engram.methods.bic import BiasCorrection
from engram.methods.budget import BudgetError, fit_budget, fit_update, parse_bytes
from engram.methods.costs import Costs, measure_costs
from engram.methods.eeil import CrossDistillation
from engram.methods.features import Features
from engram.methods.hybrid import Hybrid
from engram.methods.joint import Joint
from engram.methods.learner import Learner, MemorySources, choose_device, class_indices_of
from engram.methods.lucir import Rebalancing
from engram.methods.memoryless import Memoryless
from engram.methods.objectives import Classification, Distillation, Objective, TrainingContext
from engram.methods.replay import Exemplars, Rehearsing, Replay
from engram.methods.tuning import Tune, Tuning, decide
from engram.settings import build, fields, spoken

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (Classification, Distillation, CrossDistillation, Rebalancing, BiasCorrection)
}


@dataclass(frozen=True)
class Method:
    """An entry of the table: a learner, an objective, the settings that make it this method, and a line on it."""

    learner: type[Learner]
    summary: str
    keeps: str
    objective: str = "distillation"
    settings: Mapping[str, Any] = field(default_factory=dict)


PLAIN = {"head": "linear", "feature_distillation": 0.0}  # as they were before the paper's γ variants
TOTAL = {"images_total": 2000}  # what their own papers keep on CIFAR-100; 20,000 on ImageNet-1000

METHODS: dict[str, Method] = {
    "features": Method(Features, "the paper's: stored features, adapted to the new network, and an SVM", "features"),
    "hybrid": Method(Hybrid, "features, and images replayed in training", "features and images"),
    "engram": Method(
        Hybrid,
        "ours: LUCIR's training, held late, the better of two adapters, softmax regression, a byte a number",
        "features",
        "lucir",
        {
            **{"images_per_class": 0, "codec": "auto", "classifier": "softmax", "C": 100.0},
            **{"adapter": "auto", "alpha": 1e4, "adapter_steps": 1600},
            **{"weight_averaging": 0.6, "weight_averaging_from": 0.8},
        },
    ),
    "features-unadapted": Method(
        Features, "the same as features, left as they are", "features", settings={"adapter": "identity"}
    ),
    "gamma-lwf": Method(Memoryless, "lwf with a cosine head and feature distillation", "nothing"),
    "lwf": Method(Memoryless, "distil the previous network's answers", "nothing", settings=PLAIN),
    "gamma-icarl": Method(
        Replay,
        "icarl with a cosine head and feature distillation",
        "images",
        settings={"predict_with": "nearest-mean", "images_per_class": 20},
    ),
    "icarl": Method(
        Replay,
        "replay images, distil, answer by the nearest mean of the images",
        "images",
        settings={**PLAIN, **TOTAL, "predict_with": "nearest-mean"},
    ),
    "eeil": Method(Replay, "a distilling head per task, then fine-tuning on balanced images", "images", "eeil", TOTAL),
    "lucir": Method(
        Replay,
        "rebalancing: cosine head, features held, margins between old and new",
        "images",
        "lucir",
        {"images_per_class": 20},
    ),
    "bic": Method(Replay, "distil, then correct the bias toward new classes", "images", "bic", TOTAL),
    "bic-uncorrected": Method(Replay, "bic without the correction", "images", "bic", {**TOTAL, "head": "linear"}),
    "finetune": Method(Memoryless, "train on the new classes alone: the lower bound", "nothing", "classification"),
    "joint": Method(Joint, "train anew on everything seen: the upper bound", "every image", "classification"),
}

EITHER = {"images_per_class", "images_total"}


def override(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults`, with what is asked for instead; who asks for one of two alternatives does not want the other."""
    dropped = EITHER if any(asked.get(name) is not None for name in EITHER) else set()
    return {**{name: value for name, value in defaults.items() if name not in dropped}, **asked}


def make(method: str, /, **settings: Any) -> Learner:
    """A learner of this method. Settings have flat names: `network="resnet32", learning_rate=0.5`."""
    entry, settings = _entry(method), spoken(settings)
    name = settings.pop("objective", None) or entry.objective
    chosen = {"objective": _objective(method, name)}
    defaults = chosen["objective"].defaults
    if name == entry.objective:
        own = {**defaults, **entry.settings}
    else:  # another paper's training: what this method sets for its own has no place, or gives way
        known = {setting for setting, _, _ in fields(entry.learner, chosen)}
        own = {**{setting: value for setting, value in entry.settings.items() if setting in known}, **defaults}
    learner = build(entry.learner, override(own, settings), f"method '{method}'", chosen)
    learner.name = method
    return learner


def setting_names(method: str, objective: str | None = None) -> set[str]:
    """The settings of a method, with its own objective or another."""
    return {name for name, _, _ in fields(_entry(method).learner, {"objective": _objective(method, objective)})}


def _entry(method: str) -> Method:
    if method not in METHODS:
        raise unknown("method", method, METHODS, "engram methods")
    return METHODS[method]


def _objective(method: str, objective: str | None) -> type[Objective]:
    name = objective if objective is not None else METHODS[method].objective
    if name not in OBJECTIVES:
        raise unknown("objective", name, OBJECTIVES)
    return OBJECTIVES[name]


__all__ = [
    "METHODS",
    "OBJECTIVES",
    "BiasCorrection",
    "BudgetError",
    "Classification",
    "Costs",
    "CrossDistillation",
    "Distillation",
    "Exemplars",
    "Features",
    "Hybrid",
    "Joint",
    "Learner",
    "MemorySources",
    "Memoryless",
    "Method",
    "Objective",
    "Rebalancing",
    "Rehearsing",
    "Replay",
    "TrainingContext",
    "Tune",
    "Tuning",
    "choose_device",
    "class_indices_of",
    "decide",
    "fit_budget",
    "fit_update",
    "make",
    "measure_costs",
    "override",
    "parse_bytes",
    "setting_names",
]
