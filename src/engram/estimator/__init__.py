"""The scikit-learn front door."""

from __future__ import annotations

from engram.estimator.classifier import IncrementalClassifier
from engram.estimator.parameters import InvalidInput, InvalidParameter

__all__ = ["IncrementalClassifier", "InvalidInput", "InvalidParameter"]
