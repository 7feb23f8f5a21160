"""What a step of the battery is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """An attack, made `count` times in each of its pieces."""

    run: Callable[[int, Path], dict[str, Any]]  # takes the count and an empty folder; what it finds has "bad"
    count: int
    goal: str
    before: str = ""
    pieces: int = 1
