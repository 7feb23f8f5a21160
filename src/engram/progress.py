"""Progress of long work: phases with steps, reported to a display, an event log or nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Phase:
    """A phase that is under way; this one reports to nobody."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Report that `steps` more steps are done; `note` is a short remark such as the loss."""

    def log(self, **values: float) -> None:
        """Log numbers, such as the loss of an epoch."""


class Progress(Protocol):
    """What long work reports to. A phase is left even if an error occurs in it."""

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """Enter the phase `name` with this many steps, if their number is known."""
        yield Phase()


class Silent(Progress):
    """Reports to nobody."""


SILENT = Silent()
