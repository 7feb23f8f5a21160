"""`engram suite` and `engram suites`: the paper's tables and figures by name."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engram.cli.decode_options import Cache, ClassList, FitOption, ImageSize, Workers, decode_options, print_skipped
from engram.cli.options import Device, Json, Quiet, Settings, parse_settings

if TYPE_CHECKING:
    from engram.experiments.many import SuitePlan


def suite(
    name: Annotated[str, typer.Argument(help="Which table or figure; `engram suites` lists them.")],
    dataset: Annotated[str, typer.Option(help="Which data set; `engram datasets` lists them.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="Where its files are: a folder, or for arrays the file.")] = None,
    image_size: ImageSize = None,
    fit: FitOption = None,
    class_list: ClassList = None,
    cache: Cache = None,
    workers: Workers = None,
    preset: Annotated[
        Literal["paper", "short"], typer.Option(help="paper: the paper's settings; short: a few epochs, one cycle.")
    ] = "short",
    seeds: Annotated[int, typer.Option(min=1, help="Run so many seeds, from --seed up.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    device: Device = "auto",
    methods: Annotated[str, typer.Option(metavar="A,B", help="Only these methods of the suite.")] = "",
    tasks: Annotated[int | None, typer.Option(help="Stop every run after so many tasks.")] = None,
    set: Settings = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be run, how long and how large; run nothing.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time: 1; on Ray as many as there is room for.")
    ] = None,
    on: Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a Ray cluster.")] = "local",
    out: Annotated[Path | None, typer.Option(help="The suites' folder; by default one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a suite that was begun.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a table or figure of the paper: every method, every value, every seed."""
    from engram.cli.display import Display
    from engram.experiments import jobs as planning
    from engram.experiments import many
    from engram.experiments.local import Site
    from engram.network import parallel

    parallel.refuse_torchrun("engram suite")

    order = planning.SuiteOptions(
        suite=name,
        dataset=dataset,
        preset=preset,
        seeds=seeds,
        seed=seed,
        methods=tuple(method for method in methods.split(",") if method),
        tasks=tasks,
        settings={**({} if device == "auto" else {"device": device}), **parse_settings(set)},
    )
    planning.check(order)
    if on == "ray":
        from engram.experiments.cluster import check_installed

        check_installed()  # before anything is begun
    options = decode_options(image_size, fit, class_list, cache, workers)
    site = Site(out or many.default_folder(order), dataset, data, options)
    with Display(quiet=quiet) as display:
        try:
            loaded = site.load(display)
            print_skipped(loaded, display)
            plan_suite = many.plan_suite(order, site, loaded)
            if plan:
                _print_plan(plan_suite, json)
                return
            many.begin(plan_suite, _command(), resume=resume)
            display.say(f"{name} on {dataset}: {len(plan_suite.left)} runs to do, in {site.folder}")
            outcomes = many.carry_out(plan_suite, loaded, workers=jobs, on=on, progress=display)
        except KeyboardInterrupt:
            place = shlex.quote(str(site.folder))
            display.say(f"Stopped. What was done is kept: the same command with --out {place} --resume goes on.")
            raise typer.Exit(130) from None
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    _print_results(plan_suite, json, [{"label": each.job.label, "error": each.error or ""} for each in failed])
    for outcome in failed:
        typer.echo(f"failed: {outcome.job.label}, seed {outcome.job.plan.seed}: {outcome.error}", err=True)
    raise typer.Exit(1 if failed else 0)


def _command() -> str:
    """The command as it was given."""
    return shlex.join(["engram", *sys.argv[1:]])


def _print_plan(plan_suite: SuitePlan, json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "label": row.variant.label,
            "method": row.variant.method,
            "runs": len(row.jobs),
            "done": row.done,
            "seconds": round(row.left, 1),
            "memory_bytes": row.estimate.memory_bytes,
        }
        for row in plan_suite.rows
    ]
    if json:
        typer.echo(json_format.dumps({"runs": rows, "seconds": round(plan_suite.seconds, 1)}))
        return
    width = max(len(row["label"]) for row in rows)
    typer.echo(f"{'':{width}}  runs  done       time        kept")
    for row in rows:
        counts = f"{row['runs']:4}  {row['done']:4}"
        typer.echo(
            f"{row['label']:{width}}  {counts}  {_time(row['seconds']):>9}  {row['memory_bytes'] / 2**20:7.2f} MB"
        )
    typer.echo(f"about {_time(plan_suite.seconds)} for what is left, one run after another, from steps timed now")


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _print_results(plan_suite: SuitePlan, json: bool, failed: list[dict[str, str]]) -> None:
    import statistics

    found = [(variant, results) for variant, results in plan_suite.results() if results]
    if json:
        rows = [
            {
                "label": variant.label,
                "method": variant.method,
                "value": variant.value,
                "seeds": [result.seed for result in results],
                "average_incremental_accuracy": [result.average_incremental_accuracy for result in results],
                "last_accuracy": [result.curve[-1] for result in results],
                "memory_mb": results[0].memory_mb,
            }
            for variant, results in found
        ]
        typer.echo(json_format.dumps({"rows": rows, "failed": failed}))
        return
    width = max([len(variant.label) for variant, _ in found], default=0)
    for variant, results in found:
        averages = [result.average_incremental_accuracy for result in results]
        spread = f" ± {statistics.stdev(averages):.3f}" if len(averages) > 1 else ""
        last = statistics.fmean(result.curve[-1] for result in results)
        kept = f"{results[0].memory_mb:.2f} MB"
        typer.echo(
            f"{variant.label:{width}}  average {statistics.fmean(averages):.3f}{spread}, last {last:.3f}, {kept}"
        )
    typer.echo(f"report: engram report {shlex.quote(str(plan_suite.site.folder))} -o report.html")
