"""Measuring: runs that can be killed and resumed, what is measured, and what is written down."""

from engram.experiments.events import TensorBoard
from engram.experiments.measuring import Measurement
from engram.experiments.plan import Plan, seed_folders, summarise
from engram.experiments.presets import PRESETS
from engram.experiments.results import Result
from engram.experiments.running import run

__all__ = ["PRESETS", "Measurement", "Plan", "Result", "TensorBoard", "run", "seed_folders", "summarise"]
