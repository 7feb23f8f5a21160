"""Events of a run as they happen: one JSON line each in its folder, and scalars for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from engram import storage
from engram.errors import EngramError, not_installed
from engram.progress import Phase, Progress, Stopwatch


class Listener(Protocol):
    """Receives the events of a run: begin, epoch, phase, task, and end or stop."""

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        """Handle one event."""


class EventLog:
    """`events.jsonl`: one line is appended per event; lines written before a kill stay."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        """Append a line."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self.path.open("ab") as file:
            file.write(storage.json_bytes({"time": now, "event": event, **values}))


class TensorBoard:
    """Scalars for TensorBoard: loss and learning rate by epoch; measurements and seconds by task.

    They go to `folder`; by default to the folder `tensorboard` in that of each run.
    """

    def __init__(self, folder: Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise not_installed("TensorBoard", "track") from error
        self.folder, self.make_writer = folder, SummaryWriter

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        """Write the numbers of the event and flush them."""
        if event == "begin":
            self.writer = self.make_writer(str(self.folder or Path(values["folder"] or "") / "tensorboard"))
        task = values.get("task", 0)
        names = {"epoch": ("loss", "learning_rate"), "task": tuple(values), "phase": ("seconds",)}.get(event, ())
        for name in names:
            if isinstance(values[name], int | float) and name != "task":
                tag = name if event == "task" else f"task {task}/{values['phase']}/{name}"
                self.writer.add_scalar(tag, values[name], values["epoch"] if event == "epoch" else task)
        self.writer.flush()


class RunProgress(Stopwatch):
    """A stopwatch that sends events to listeners and passes everything on to `inner`."""

    def __init__(self, inner: Progress, listeners: Sequence[Listener]) -> None:
        super().__init__(inner)
        self.listeners = listeners
        self.task = 0  # the current task, counted from 1

    def log(self, event: str, **values: Any) -> None:
        """Send an event to all listeners."""
        for listener in self.listeners:
            listener.on_event(event, values)

    @contextmanager
    def run(self, **values: Any) -> Iterator[None]:
        """Log the begin of a run, and its end or why it stopped."""
        self.log("begin", **values)
        try:
            yield
        except BaseException as error:
            self.log("stop", why=str(error) if isinstance(error, EngramError) else type(error).__name__)
            raise
        self.log("end")

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """A phase of the inner progress; its end is logged with its seconds."""
        before = self.seconds.get(name, 0.0)
        with super().phase(name, steps) as phase:
            yield _RunPhase(phase, self, name)
        self.log("phase", task=self.task, phase=name, seconds=round(self.seconds[name] - before, 3))


class _RunPhase:
    def __init__(self, inner: Phase, progress: RunProgress, name: str) -> None:
        self.inner, self.progress, self.name = inner, progress, name
        self.advance = inner.advance

    def tell(self, **values: float) -> None:
        self.inner.tell(**values)
        self.progress.log("epoch", task=self.progress.task, phase=self.name, **values)
