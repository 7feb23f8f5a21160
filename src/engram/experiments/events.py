"""What happens in a run, as it happens: one JSON line per event in its folder, and TensorBoard if asked for."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from engram import storage
from engram.errors import not_installed
from engram.progress import Phase, Progress


class Listener(Protocol):
    """Who is told of events."""

    def hear(self, event: str, values: dict[str, Any]) -> None:
        """Something happened."""


class EventLog:
    """`events.jsonl`: a line is appended per event, and what was written before a kill stays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hear(self, event: str, values: dict[str, Any]) -> None:
        """Append a line."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self.path.open("ab") as file:
            file.write(storage.json_bytes({"time": now, "event": event, **values}))


class TensorBoard:
    """Scalars for TensorBoard: losses by epoch, and by task what was measured and the seconds of each phase."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise not_installed("TensorBoard", "track") from error
        self.make_writer: Callable[[], Any] = functools.partial(SummaryWriter, str(folder))
        self.writer: Any = None

    def hear(self, event: str, values: dict[str, Any]) -> None:
        """Write the event's numbers; whoever opens the folder now finds them."""
        self.writer = self.writer or self.make_writer()  # not before the run has its folder
        task = values.get("task", 0)
        names = {"epoch": ("loss", "learning_rate"), "task": tuple(values), "phase": ("seconds",)}.get(event, ())
        for name in names:
            value = values[name]
            if isinstance(value, int | float) and name not in ("task", "epoch"):
                where = f"task {task}/{values['phase']}/{name}" if event != "task" else name
                step = int(values["epoch"]) if event == "epoch" else task
                self.writer.add_scalar(where, value, step)
        self.writer.flush()


class Reporting:
    """A `Progress` that tells listeners of what phases tell and of their ends, and passes everything on."""

    def __init__(self, inner: Progress, listeners: Sequence[Listener]) -> None:
        self.inner, self.listeners = inner, listeners
        self.task = 0  # the task under way, counted from 1

    def say(self, event: str, **values: Any) -> None:
        """Tell all listeners."""
        for listener in self.listeners:
            listener.hear(event, values)

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """As the inner one's; its end is an event with its seconds."""
        start = time.perf_counter()
        with self.inner.phase(name, steps) as phase:
            yield _ReportingPhase(phase, self, name)
        if self.task and name != "run":
            self.say("phase", task=self.task, phase=name, seconds=round(time.perf_counter() - start, 3))


class _ReportingPhase:
    def __init__(self, inner: Phase, reporting: Reporting, name: str) -> None:
        self.inner, self.reporting, self.name = inner, reporting, name

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.inner.advance(steps, note)

    def tell(self, **values: float) -> None:
        self.inner.tell(**values)
        self.reporting.say("epoch", task=self.reporting.task, phase=self.name, **values)
