"""Progress on stderr: bars with the time left, lines, warnings and errors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from engram.errors import EngramWarning
from engram.progress import Phase
from engram.text import printable


def complain(message: str) -> None:
    """Print an error, in red if the terminal has colours."""
    lines = "\n".join(map(printable, message.split("\n")))  # names may contain control characters
    _console().print(f"error: {lines}", style="red", markup=False)


def _console() -> Console:
    """Stderr, without emoji codes: a class may be called :smile:."""
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


class _Bar:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self.bars, self.task = bars, task

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.bars.update(self.task, advance=steps, note=note)

    def tell(self, **values: float) -> None:
        """A bar shows no numbers."""


class Display:
    """Shows phases as progress bars, unless stderr is not a terminal or `quiet` is set.

    With `mute` it shows no warnings either: that is for all ranks of a distributed run but the first.
    """

    def __init__(self, *, quiet: bool = False, mute: bool = False) -> None:
        self.quiet, self.mute = quiet or mute, mute
        self.console = _console()
        self.bars = Progress(
            TextColumn("{task.description:8}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %", markup=False),
            TextColumn("time left", style="dim"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self.console,
            transient=True,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # printed above the bars
            disable=self.quiet or not self.console.is_terminal,
        )

    def __enter__(self) -> Display:
        self.bars.start()
        self.catching = warnings.catch_warnings()
        self.catching.__enter__()
        warnings.simplefilter("default", EngramWarning)
        warnings.showwarning = self._show_warning
        return self

    def __exit__(self, *error: Any) -> None:
        self.catching.__exit__(*error)
        self.bars.stop()

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """Show a bar during the phase."""
        task = self.bars.add_task(name, total=steps, note="")
        try:
            yield _Bar(self.bars, task)
        finally:
            self.bars.remove_task(task)

    def say(self, line: str) -> None:
        """Print a line."""
        if not self.quiet:
            self.console.print(line, markup=False)

    def _show_warning(self, message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if not issubclass(category, EngramWarning):
            print(f"{category.__name__}: {message}", file=sys.stderr)
        elif not self.mute:
            self.console.print(f"note: {message}", style="yellow", markup=False)
