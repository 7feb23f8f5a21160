"""Measuring: experiments that can be killed and resumed, their metrics, results, suites and report."""

from engram.experiments.events import Listener, TensorBoard
from engram.experiments.measuring import Measurement
from engram.experiments.plan import PRESETS, Plan, summarise
from engram.experiments.results import Result
from engram.experiments.running import run

__all__ = ["PRESETS", "Listener", "Measurement", "Plan", "Result", "TensorBoard", "run", "summarise"]
