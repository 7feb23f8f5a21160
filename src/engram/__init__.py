"""engram: class-incremental learning that stores short feature vectors of old classes instead of their images."""

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

__version__ = "0.2.0"

# OpenMP threads wait for each other by spinning. If another process needs the same cores, such as a server that answers
# during an update, that is several times slower than yielding. Torch reads this when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The module of each public name. It is imported on first use: importing torch takes seconds, and `--help` needs none.
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
