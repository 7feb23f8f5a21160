"""Measuring: experiments that can be killed and resumed, their metrics, results, suites and report."""

from engram.experiments.folder import Listener, TensorBoard
from engram.experiments.measuring import Measurement
from engram.experiments.results import Result, summarise
from engram.experiments.running import PRESETS, Plan, run

__all__ = ["PRESETS", "Listener", "Measurement", "Plan", "Result", "TensorBoard", "run", "summarise"]
