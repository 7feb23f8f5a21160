"""Who learns: one short file per system, all of them in `METHODS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engram.errors import unknown
from engram.methods.features import Features
from engram.methods.finetune import Finetune
from engram.methods.joint import Joint
from engram.methods.learner import Kept, Learner, choose_device, columns_of
from engram.methods.lwf import LwF
from engram.settings import build


@dataclass(frozen=True)
class Method:
    """An entry of the table: a learner, the settings that make it this method, and a line on it."""

    learner: type[Learner]
    summary: str
    keeps: str
    settings: Mapping[str, Any] = field(default_factory=dict)


METHODS: dict[str, Method] = {
    "features": Method(Features, "the paper's: stored features, adapted to the new network, and an SVM", "features"),
    "features-unadapted": Method(
        Features, "the same, the stored features left as they are", "features", {"adapter": "identity"}
    ),
    "lwf": Method(
        LwF, "distil the previous network's answers", "nothing", {"head": "linear", "feature_distillation": 0.0}
    ),
    "gamma-lwf": Method(LwF, "lwf with a cosine head and feature distillation", "nothing"),
    "finetune": Method(Finetune, "train on the new classes alone: the lower bound", "nothing"),
    "joint": Method(Joint, "train anew on everything seen: the upper bound", "every image"),
}


def make(method: str, **settings: Any) -> Learner:
    """A learner of this method. Settings are flat names: `network="resnet32", features_per_class=250, rate=0.5`."""
    if method not in METHODS:
        raise unknown("method", method, METHODS, "engram methods")
    entry = METHODS[method]
    learner = build(entry.learner, {**entry.settings, **settings}, f"method '{method}'")
    learner.name = method
    return learner


__all__ = [
    "METHODS",
    "Features",
    "Finetune",
    "Joint",
    "Kept",
    "Learner",
    "LwF",
    "Method",
    "choose_device",
    "columns_of",
    "make",
]
