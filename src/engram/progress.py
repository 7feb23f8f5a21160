"""Progress of long work: phases with steps, reported to a display, an event log or nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Phase(Protocol):
    """A phase that is under way."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Report that `steps` more steps are done; `note` is a short remark such as the loss."""

    def tell(self, **values: float) -> None:
        """Log numbers, such as the loss of an epoch."""


class _SilentPhase:
    def advance(self, steps: int = 1, note: str = "") -> None:
        pass

    def tell(self, **values: float) -> None:
        pass


class Progress(Protocol):
    """What long work reports to. A phase is left even if an error occurs in it."""

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """Enter the phase `name` with this many steps, if their number is known."""
        yield _SilentPhase()


class Silent(Progress):
    """Reports to nobody."""


SILENT = Silent()


class Stopwatch:
    """Adds up the seconds of each phase and passes everything on to `inner`."""

    def __init__(self, inner: Progress = SILENT, seconds: dict[str, float] | None = None) -> None:
        self.inner = inner
        self.seconds: dict[str, float] = dict(seconds or {})

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        start = time.perf_counter()
        try:
            with self.inner.phase(name, steps) as phase:
                yield phase
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
