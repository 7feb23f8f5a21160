"""What commands print: progress, warnings and errors on stderr; JSON and tables on stdout."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from engram.errors import EngramWarning
from engram.progress import Phase
from engram.text import plural, printable

if TYPE_CHECKING:
    from engram.data.scanning import SkippedFile
    from engram.model import RejectionThreshold

MOST_SKIPPED = 20  # skipped files that are listed; the others are counted
NARROWEST = 8  # characters of the last column of a table, however narrow the terminal


def complain(message: str) -> None:
    """Print an error, in red if the terminal has colours."""
    lines = "\n".join(map(printable, message.split("\n")))  # names may contain control characters
    _console().print(f"error: {lines}", style="red", markup=False)


def _console() -> Console:
    """Stderr, without emoji codes: a class may be called :smile:."""
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


class _Bar(Phase):
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self.bars, self.task = bars, task

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.bars.update(self.task, advance=steps, note=note)


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
        if not self.quiet:
            self.console.print(line, markup=False)

    def _show_warning(self, message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if not issubclass(category, EngramWarning):
            print(f"{category.__name__}: {message}", file=sys.stderr)
        elif not self.mute:
            self.console.print(f"note: {message}", style="yellow", markup=False)


def stopped(display: Display, out: Path) -> typer.Exit:
    """Say how to continue an experiment that Ctrl-C stopped; the exit to raise."""
    display.say(f"Stopped. To continue, run the same command with --out {shlex.quote(str(out))} --resume")
    return typer.Exit(130)


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    typer.echo(json.dumps(value))


def print_skipped(skipped: Iterable[SkippedFile]) -> None:
    """Print the skipped files to stderr."""
    for line in skipped_lines(skipped, "; --json lists all"):
        typer.echo(line, err=True)


def accuracy_text(
    accuracy: float | None,
    interval: tuple[float, float] | None,
    images: int,
    measured: int,
    classes: int,
    adapted: bool,
) -> str:
    """An accuracy with its interval, over `measured` of all `classes`; an estimate if features were `adapted` since."""
    if accuracy is None or interval is None:
        return "not known: no image was held out. Measure it with: engram evaluate MODEL FOLDER"
    over = f"all {plural(classes, 'class')}" if measured == classes else f"{measured} of {plural(classes, 'class')}"
    text = (
        f"{accuracy:.3f} (95 % interval {interval[0]:.3f} to {interval[1]:.3f}) over {over}, "
        f"on {plural(images, 'held-out image')}"
    )
    if adapted:
        text += ". This is an estimate: the network has changed since older images were seen"
    if measured < classes:
        text += ". The other classes were not measured: use engram evaluate MODEL FOLDER"
    return text


def rejection_text(threshold: RejectionThreshold | None) -> str:
    """The expected effect of `--reject auto`."""
    if threshold is None:
        return "not known: it takes three classes, and a network that was not trained on them"
    return (
        f"--reject auto accepts about {threshold.rate:.0%} of images of unknown classes and "
        f"{threshold.known_accepted:.0%} of known ones (similarity {threshold.similarity:.3f}), estimated from "
        f"{threshold.images:,} held-out images, leaving out each of {threshold.classes:,} classes"
    )


def share(value: float | None) -> str:
    """A share such as an accuracy; a dash where it is not known."""
    return "–" if value is None else f"{value:.3f}"


def skipped_lines(skipped: Iterable[SkippedFile], see: str = "") -> list[str]:
    """A line per skipped file; beyond `MOST_SKIPPED` only their number, and where to `see` them."""
    lines = [f"skipped: {each}" for each in skipped]
    if len(lines) > MOST_SKIPPED:
        lines[MOST_SKIPPED:] = [f"skipped: {len(lines) - MOST_SKIPPED:,} more{see}"]
    return lines


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Container[int] = (),
    overflow: Literal["wrap", "ellipsis", "none"] = "wrap",
) -> str:
    """Aligned columns of text, those in `right` flush right; the last one wraps or is cut at the terminal's width."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    console = Console(color_system=None)
    if overflow != "none":
        widths[-1] = min(widths[-1], max(console.width - indent, NARROWEST))
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for number, width in enumerate(widths):
        grid.add_column(justify="right" if number in right else "left", width=width)
    last = grid.columns[-1]
    last.no_wrap, last.overflow = (True, "ellipsis") if overflow == "ellipsis" else (False, "fold")
    for row in cells:
        grid.add_row(*map(Text, row))  # no markup in names
    console.width = indent + widths[-1] + 2
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
