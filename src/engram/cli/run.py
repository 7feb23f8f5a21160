"""`engram run`: one method on one data set, measured after every task."""

from __future__ import annotations

import json as json_format
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engram.cli.decode_options import Cache, ClassList, FitOption, ImageSize, Workers, decode_options, print_skipped
from engram.cli.options import Device, Quiet, Settings, parse_settings

if TYPE_CHECKING:
    from engram.experiments import Measurement, Result


def run(
    method: Annotated[str, typer.Argument(help="Which method; `engram methods` lists them.")] = "features",
    dataset: Annotated[str, typer.Option(help="Which data set; `engram datasets` lists them.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="Where its files are: a folder, or for arrays the file.")] = None,
    image_size: ImageSize = None,
    fit: FitOption = None,
    class_list: ClassList = None,
    cache: Cache = None,
    workers: Workers = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|hf:OWNER/NAME|FOLDER",
            help="`engram networks` lists them. Default: from scratch, by the data.",
        ),
    ] = None,
    tune: Annotated[
        Literal["none", "first", "every", "auto"] | None,
        typer.Option(help="When the network is trained: never, on the first task, on every task, or auto."),
    ] = None,
    classes_per_task: Annotated[
        int | None, typer.Option(help="Classes that each task brings. Default: by the data.")
    ] = None,
    first_task: Annotated[
        int | None, typer.Option(help="Classes of the first task, if not as many as of others.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Stop after so many tasks of the same stream.")] = None,
    class_order: Annotated[
        str, typer.Option(help="seed: drawn from the seed; 1993: the field's; or a file, one class a line.")
    ] = "seed",
    validation: Annotated[
        float, typer.Option(help="Hold out this share of the training samples, and test on it instead.")
    ] = 0.0,
    epochs: Annotated[int | None, typer.Option(help="Epochs per task. Default: by the preset.")] = None,
    preset: Annotated[
        Literal["paper", "short"], typer.Option(help="paper: the paper's settings; short: a few epochs, one cycle.")
    ] = "short",
    features_per_class: Annotated[
        int | None, typer.Option(help="Features kept per class. Default: by the preset.")
    ] = None,
    images_per_class: Annotated[int | None, typer.Option(help="Images kept per class. Default: by the preset.")] = None,
    images_total: Annotated[
        int | None, typer.Option(help="Images kept in all, shared out among the classes seen.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="What may be kept for all classes, such as 6MB: chooses these numbers, and a codec."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="What class order, weights and all else are drawn from.")] = 0,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run so many seeds, from --seed up.")] = None,
    device: Device = "auto",
    set: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default one under runs/.")] = None,
    trainings: Annotated[
        Path | None, typer.Option(help="A folder of trained networks, shared by runs that differ only after training.")
    ] = None,
    track: Annotated[bool, typer.Option("--track", help="Write for TensorBoard into the run's folder too.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in the folder was cut off.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: Quiet = False,
) -> None:
    """Learn a data set task by task with one method, and measure it after every task."""
    from engram.cli.display import Display
    from engram.data import load
    from engram.experiments import Plan, TensorBoard, seed_folders, summarise
    from engram.experiments import run as learn_all
    from engram.methods import make, parse_bytes
    from engram.network import Cache, parallel

    flags = {
        "network": network,
        "tune": tune,
        "epochs": epochs,
        "features_per_class": features_per_class,
        "images_per_class": images_per_class,
        "images_total": images_total,
        "device": device,
    }
    folder = out or _default_folder(f"{method}-{dataset}" + ("" if seeds else f"-seed-{seed}"), resume)
    try:
        with parallel.process_group(device), Display(quiet=quiet, mute=not parallel.is_main()) as display:
            settings = {name: value for name, value in flags.items() if value is not None} | parse_settings(set)
            plan = Plan(
                method=method,
                preset=preset,
                settings=settings,
                classes_per_task=classes_per_task,
                first_task=first_task,
                tasks=tasks,
                class_order=class_order,
                validation=validation,
                budget=None if budget is None else parse_bytes(budget),
                seed=seed,
            )
            folder = Path(parallel.broadcast(lambda: str(folder)))
            places = {seed: folder}
            if seeds is not None:
                places = seed_folders(range(seed, seed + seeds), folder, resume=resume)
            make(method, **settings)  # a mistyped method or setting is told before any data is read
            options = decode_options(image_size, fit, class_list, cache, workers)
            shared = None if trainings is None else Cache(trainings)
            loaded = parallel.main_first(lambda: load(dataset, data, display, options))
            print_skipped(loaded, display)
            results: list[Result] = []
            for each, place in places.items():
                one = plan.with_seed(each)
                stream = one.stream(loaded)
                learner = one.learner(loaded, stream)
                if budget is not None and not results:
                    display.say(f"{budget} for {_chosen(one.chosen(loaded, stream), len(stream.classes))}")
                display.say(f"{method} on {dataset}, seed {each}, in {place}")
                display.say(HEADER)
                result = learn_all(
                    learner,
                    stream,
                    out=place,
                    resume=resume,
                    trainings=shared,
                    listeners=[TensorBoard(place / "tensorboard")] if track else [],
                    progress=display,
                    after_task=lambda task, measured, seconds: display.say(_line(task, measured, seconds)),
                )
                results.append(result)
            summary = None if seeds is None else summarise(results, folder)
            speaks = parallel.is_main()
    except KeyboardInterrupt:
        place_again = shlex.quote(str(folder))
        Display(quiet=quiet).say(
            f"Stopped. What was done is kept: the same command with --out {place_again} --resume goes on."
        )
        raise typer.Exit(130) from None
    if not speaks:
        return
    if json:
        typer.echo(json_format.dumps(summary or results[0].to_json()))
        return
    for result, place in zip(results, places.values(), strict=True):
        typer.echo(_conclusion(result, place))
    if summary is not None:
        spread = summary["average_incremental_accuracy"]
        deviation = "" if spread["deviation"] is None else f" ± {spread['deviation']:.3f}"
        over = "1 seed" if seeds == 1 else f"{seeds} seeds"
        typer.echo(f"over {over}: average {spread['mean']:.3f}{deviation}, in {folder}")


def _chosen(chosen: dict[str, Any], classes: int) -> str:
    """What a budget has chosen, in words."""
    words = {
        "images_per_class": "images a class",
        "images_total": "images in all",
        "features_per_class": "features a class",
    }
    numbers = " and ".join(f"{count:,} {words[name]}" for name, count in chosen.items() if name in words)
    each = f" of {chosen['codec_bytes']} bytes" if chosen.get("codec_bytes") else ""
    codec = f", kept as {chosen['codec']}{each}" if "codec" in chosen else ""
    return f"{classes} classes: {numbers or 'what is asked for'}{codec}"


HEADER = "task  classes  accuracy  top-5   head  ω(t-1)   ω(1)  ceiling     gap      kept   seconds"


def _line(task: int, measured: Measurement, seconds: dict[str, float]) -> str:
    """One task as a row under HEADER."""

    def number(value: float | None, width: int) -> str:
        return f"{value:{width}.3f}" if value is not None else " " * (width - 1) + "–"

    gap = None if measured.ceiling is None else measured.ceiling - measured.accuracy
    quality = number(measured.omega_previous, 6) + "  " + number(measured.omega_first, 5)
    return (
        f"{task + 1:4}  {measured.classes:7}  {measured.accuracy:8.3f}  {measured.accuracy_top5:5.3f}  "
        f"{number(measured.head_accuracy, 5)}  {quality}  {number(measured.ceiling, 7)}  {number(gap, 6)}  "
        f"{measured.memory_bytes / 2**20:5.2f} MB  {f'{sum(seconds.values()):.0f}' if seconds else 'before':>8}"
    )


def _conclusion(result: Result, place: Path) -> str:
    lines = [
        f"{result.method} on {result.dataset}, seed {result.seed}: average incremental accuracy "
        f"{result.average_incremental_accuracy:.3f}, at the end {result.curve[-1]:.3f}, "
        f"forgetting {result.forgetting:.3f}, kept {result.memory_mb:.2f} MB"
    ]
    if result.drift_gap is not None and len(result.curve) > 1:
        lines.append(
            f"drift gap at the end {result.drift_gap[-1]:.3f}: what the same classifier would gain if no stored vector "
            f"had drifted; ω of the previous task's vectors {result.omega_previous[-1]:.3f}"  # type: ignore[index]
        )
    return "\n".join([*lines, f"result: {place / 'result.json'}"])


def _default_folder(name: str, resume: bool) -> Path:
    """runs/NAME; if that is taken runs/NAME-2 and so on, after all there are. To resume, the last of them."""
    numbered = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    there = [
        found for path in Path("runs").glob("*") if (found := numbered.fullmatch(path.name)) and not _is_free(path)
    ]
    numbers = [int(found[1] or 1) for found in there]
    number = max(numbers, default=0) + (0 if resume and numbers else 1)
    return Path("runs") / (name if number == 1 else f"{name}-{number}")


def _is_free(path: Path) -> bool:
    """Whether a folder holds nothing but what a run leaves that failed before it began."""
    from engram.experiments.checkpoint import BESIDE

    return path.is_dir() and {each.name for each in path.iterdir()} <= {*BESIDE}
