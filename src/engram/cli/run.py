"""`engram run`: one method on one data set, measured after every task."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.cli.options import DECODING, Budget, ExperimentOptions, FeaturesPerClass, ImagesPerClass, Network, Tune
from engram.cli.output import Display, print_json, share, skipped_lines, stopped
from engram.text import format_bytes

if TYPE_CHECKING:
    from engram.experiments import Plan, Result

HEADER = (
    *("task", "classes", "accuracy", "top-5", " head", "ω(t-1)", " ω(1)", "ceiling", "   gap"),
    *("   stored", "seconds"),
)
SHARES = ("accuracy", "accuracy_top5", "head_accuracy", "omega_previous", "omega_first", "ceiling")
STORED = {"images_per_class": "a class", "images_total": "in all", "features_per_class": "a class"}
PLANNED = (
    *("method", "preset", "classes_per_task", "first_task", "tasks"),
    *("class_order", "validation", "budget", "seed"),
)
SETTINGS = ("network", "tune", "epochs", "features_per_class", "images_per_class", "images_total", "device")


@dataclass(kw_only=True)
class RunOptions(ExperimentOptions):
    """The options of `engram run`."""

    method: Annotated[str, typer.Argument(help="Method; `engram methods` lists them.")] = "features"
    network: Network = None
    tune: Tune = None
    classes_per_task: Annotated[int | None, typer.Option(help="Classes per task. Default: by the data.")] = None
    first_task: Annotated[int | None, typer.Option(help="Classes of the first task, if another number.")] = None
    class_order: Annotated[
        str, typer.Option(help="seed: drawn from the seed; 1993: as in papers; or a file, one class per line.")
    ] = "seed"
    validation: Annotated[
        float, typer.Option(help="Hold out this share of the training samples, and test on it instead.")
    ] = 0.0
    epochs: Annotated[int | None, typer.Option(help="Epochs per task. Default: by the preset.")] = None
    features_per_class: FeaturesPerClass = None
    images_per_class: ImagesPerClass = None
    images_total: Annotated[int | None, typer.Option(help="Exemplars of all classes seen.")] = None
    budget: Budget = None
    seeds: Annotated[int | None, typer.Option(min=1, help="Run so many seeds, from --seed up.")] = None
    trainings: Annotated[
        Path | None, typer.Option(help="A folder of trained networks, shared by runs that differ only after training.")
    ] = None
    track: Annotated[bool, typer.Option("--track", help="Also write TensorBoard scalars to the run's folder.")] = False

    def plan(self) -> Plan:
        from engram.experiments import Plan

        given = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        return Plan(settings={**given, **dict(self.set or ())}, **{name: getattr(self, name) for name in PLANNED})


def run(options: RunOptions) -> None:
    """Learn a data set task by task with one method, and measure it after every task."""
    from engram.network import parallel

    name = f"{options.method}-{options.dataset}" + ("" if options.seeds else f"-seed-{options.seed}")
    out = options.out or _default_folder(name, options.resume)
    try:
        with (
            parallel.process_group(options.device),
            Display(quiet=options.quiet, mute=not parallel.is_main()) as display,
        ):
            out = Path(parallel.broadcast(lambda: str(out)))
            results = _run(options, out, display)
            is_main = parallel.is_main()
    except KeyboardInterrupt:
        raise stopped(Display(quiet=options.quiet), out) from None
    if is_main:
        _print(options, out, results)


def _run(options: RunOptions, out: Path, display: Display) -> list[Result]:
    from engram.data import DecodeOptions, load
    from engram.experiments import TensorBoard
    from engram.experiments.running import RunArguments
    from engram.network import Cache, parallel

    plan = options.plan()
    decoding = DecodeOptions(size=options.image_size, **{name: getattr(options, name) for name in DECODING})
    dataset = parallel.main_first(lambda: load(options.dataset, options.data, display, decoding))
    for line in skipped_lines(dataset.skipped):
        display.say(line)
    if plan.budget is not None:
        stream = plan.stream(dataset)
        chosen = _chosen(plan.chosen(dataset, stream))
        display.say(f"{format_bytes(plan.budget)} for {len(stream.classes)} classes: {chosen}")
    given = RunArguments(
        resume=options.resume,
        cache=None if options.trainings is None else Cache(options.trainings),
        listeners=[_Table(display), *([TensorBoard()] if options.track else [])],
        progress=display,
    )
    if options.seeds is None:
        return [plan.run(dataset, out, **given)]
    return plan.run_seeds(options.seeds, dataset, out, **given)


class _Table:
    """Prints which run begins, and a row for each task."""

    def __init__(self, display: Display) -> None:
        self.display, self.seconds = display, 0.0

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        if event == "begin":
            self.display.say("{method} on {dataset}, seed {seed}, in {folder}".format(**values))
            self.display.say("  ".join(HEADER))
            self.seconds = 0.0
        elif event == "phase":
            self.seconds += values["seconds"]
        elif event == "task":
            self.display.say(self._row(**values))

    def _row(self, task: int, classes: int, memory_bytes: int, **measured: Any) -> str:
        """One task as a row under HEADER."""
        gap = None if measured["ceiling"] is None else measured["ceiling"] - measured["accuracy"]
        shares = [share(measured[name]) for name in SHARES]
        cells = (str(task), str(classes), *shares, share(gap), format_bytes(memory_bytes), f"{self.seconds:.0f}")
        return "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, HEADER, strict=True))


def _chosen(chosen: dict[str, Any]) -> str:
    """What a budget has chosen."""
    numbers = " and ".join(
        f"{count:,} {name.split('_')[0]} {STORED[name]}" for name, count in chosen.items() if name in STORED
    )
    each = f" of {chosen['codec_bytes']} bytes" if chosen.get("codec_bytes") else ""
    codec = f", stored as {chosen['codec']}{each}" if "codec" in chosen else ""
    return f"{numbers or 'as given'}{codec}"


def _print(options: RunOptions, out: Path, results: list[Result]) -> None:
    from engram.experiments import summarise

    summary = summarise(results)
    if options.json:
        print_json(results[0].to_json() if options.seeds is None else summary)
        return
    for result in results:
        kind, average, curve = result.leading
        typer.echo(
            f"{result.method} on {result.dataset}, seed {result.seed}: "
            f"average incremental {kind}accuracy {average:.3f}, at the end {curve[-1]:.3f}, "
            f"forgetting {result.forgetting:.3f}, stored {format_bytes(result.memory_bytes)}"
        )
        if result.drift_gap and result.omega_previous and result.omega_previous[-1] is not None:
            typer.echo(
                f"drift gap at the end {result.drift_gap[-1]:.3f}, ω of the previous task's features "
                f"{result.omega_previous[-1]:.3f}"
            )
        place = out if options.seeds is None else out / f"seed-{result.seed}"
        typer.echo(f"result: {place / 'result.json'}")
    if options.seeds is not None:
        spread = summary["average_incremental_accuracy"]
        deviation = "" if spread["deviation"] is None else f" ± {spread['deviation']:.3f}"
        typer.echo(f"{options.seeds} seeds: average {spread['mean']:.3f}{deviation}, in {out}")


def _default_folder(name: str, resume: bool) -> Path:
    """runs/NAME, or the next free runs/NAME-N; to resume, the last one."""
    from engram.experiments.folder import NOT_THE_RUN

    def is_taken(path: Path) -> bool:
        return not path.is_dir() or not {each.name for each in path.iterdir()} <= NOT_THE_RUN

    pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    found = [(path, match) for path in Path("runs").glob("*") if (match := pattern.fullmatch(path.name))]
    numbers = [int(match[1] or 1) for path, match in found if is_taken(path)]
    number = max(numbers, default=0) + (0 if resume and numbers else 1)
    return Path("runs") / (name if number == 1 else f"{name}-{number}")
