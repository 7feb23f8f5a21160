"""The paper's tables and figures by name, and our own."""

from engram.experiments.suites import balance, cosine, frontier, memory, parts, points, quality, table1
from engram.experiments.suites.ablations import ALPHA, DEPTH, GAMMA, WIDTH
from engram.experiments.suites.suite import Facts, Suite, Variant

SUITES: dict[str, Suite] = {
    "table1": table1.SUITE,
    "memory": memory.SUITE,
    "points": points.SUITE,
    "cosine": cosine.SUITE,
    "alpha": ALPHA,
    "width": WIDTH,
    "depth": DEPTH,
    "gamma": GAMMA,
    "quality": quality.SUITE,
    "balance": balance.SUITE,
    "frontier": frontier.SUITE,
    "parts": parts.SUITE,
}

__all__ = ["SUITES", "Facts", "Suite", "Variant"]
