"""How long work tells what it is doing: phases with steps, reported to whoever watches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Phase(Protocol):
    """One stretch of work under way."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """`steps` more are done; `note` is a few words on how it goes."""

    def tell(self, **values: float) -> None:
        """Numbers worth keeping, such as the loss of an epoch."""


class Progress(Protocol):
    """What long work reports to. A phase that is entered is always left, by an error too."""

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """Enter the phase `name` of so many steps (None: not known)."""
        yield _SilentPhase()


class _SilentPhase:
    def advance(self, steps: int = 1, note: str = "") -> None:
        pass

    def tell(self, **values: float) -> None:
        pass


class Silent:
    """Reports to no one."""

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        yield _SilentPhase()


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
