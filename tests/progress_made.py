"""A progress that records what is reported to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engram.progress import Phase


class Recorder(Phase):
    """Records each phase: its name, its steps, and the steps that were done."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        self.phases.append([name, steps, 0])
        yield self

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.phases[-1][2] += steps
