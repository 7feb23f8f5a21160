"""engram: teach an image classifier new classes, again and again, without keeping the images of the old ones."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram import data, experiments, features, methods, model, network
    from engram.data import Dataset, Samples, Stream, Task, load, split
    from engram.errors import DataError, EngramError, EngramWarning, TrainingError, UsageError
    from engram.estimator import IncrementalClassifier
    from engram.experiments import Plan, Result, run
    from engram.methods import METHODS, Learner, make

__version__ = "0.1.0"

# Torch's threads wait for each other by spinning. Where another process needs the same cores, as a server that answers
# while it is taught, that takes several times longer than giving them up. It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Where each public name lives. It is imported when first used: torch alone takes seconds, and `--help` needs none.
_HOMES = {
    **dict.fromkeys(("Dataset", "Samples", "Stream", "Task", "load", "split"), "engram.data"),
    **dict.fromkeys(("DataError", "EngramError", "EngramWarning", "TrainingError", "UsageError"), "engram.errors"),
    "IncrementalClassifier": "engram.estimator",
    **dict.fromkeys(("Plan", "Result", "run"), "engram.experiments"),
    **dict.fromkeys(("METHODS", "Learner", "make"), "engram.methods"),
}
_ROOMS = ("data", "experiments", "features", "methods", "model", "network")

__all__ = [
    "METHODS",
    "DataError",
    "Dataset",
    "EngramError",
    "EngramWarning",
    "IncrementalClassifier",
    "Learner",
    "Plan",
    "Result",
    "Samples",
    "Stream",
    "Task",
    "TrainingError",
    "UsageError",
    "data",
    "experiments",
    "features",
    "load",
    "make",
    "methods",
    "model",
    "network",
    "run",
    "split",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"engram.{name}")
    raise AttributeError(f"module 'engram' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
