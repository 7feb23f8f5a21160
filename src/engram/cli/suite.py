"""`engram suite`: a table or figure of the paper by name."""

from __future__ import annotations

import shlex
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engram.cli.options import DECODING, ExperimentOptions
from engram.cli.output import Display, print_json, skipped_lines, stopped, table
from engram.text import format_bytes, format_duration, plural

if TYPE_CHECKING:
    from engram.experiments import Result
    from engram.experiments.suite_plan import SuiteOptions, SuitePlan
    from engram.experiments.workers import Outcome


@dataclass(kw_only=True)
class SuiteCommandOptions(ExperimentOptions):
    """The options of `engram suite`."""

    name: Annotated[str, typer.Argument(help="Table or figure; `engram suites` lists them.")]
    seeds: Annotated[int, typer.Option(min=1, help="Run so many seeds, from --seed up.")] = 1
    methods: Annotated[str, typer.Option(metavar="A,B", help="Only these methods of the suite.")] = ""
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs, their time and memory; run nothing.")] = False
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. Default: 1; on Ray as many as there is room for.")
    ] = None
    on: Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a Ray cluster.")] = "local"

    def suite_options(self) -> SuiteOptions:
        from engram.data import DecodeOptions
        from engram.experiments.suite_plan import SuiteOptions

        same = ("dataset", "data", "out", "preset", "seeds", "seed", "tasks")
        return SuiteOptions(
            suite=self.name,
            decoding=DecodeOptions(size=self.image_size, **{name: getattr(self, name) for name in DECODING}),
            methods=tuple(method for method in self.methods.split(",") if method),
            settings={**({} if self.device == "auto" else {"device": self.device}), **dict(self.set or ())},
            **{name: getattr(self, name) for name in same},
        )


def suite(options: SuiteCommandOptions) -> None:
    """Run a table or figure of the paper: every method, every value, every seed."""
    from engram.experiments.suite_plan import plan_suite
    from engram.experiments.workers import import_ray, run_suite
    from engram.network import parallel

    parallel.refuse_torchrun("engram suite")
    wanted = options.suite_options()
    if options.on == "ray":
        import_ray()  # an error before anything starts
    with Display(quiet=options.quiet) as display:
        try:
            dataset = wanted.load(display)
            for line in skipped_lines(dataset.skipped):
                display.say(line)
            plan = plan_suite(wanted, dataset)
            if options.plan:
                _print_plan(plan, options.json)
                return
            plan.start(shlex.join(["engram", *sys.argv[1:]]), resume=options.resume)
            display.say(f"{options.name} on {options.dataset}, in {wanted.folder}: {_costs(plan)}")
            outcomes = run_suite(plan, dataset, workers=options.jobs, on=options.on, progress=display)
        except KeyboardInterrupt:
            raise stopped(display, wanted.folder) from None
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    _print_results(plan, failed, options.json)
    for run, error in failed:
        typer.echo(f"failed: {run.label}, seed {run.plan.seed}: {error}", err=True)
    raise typer.Exit(1 if failed else 0)


def _print_plan(plan: SuitePlan, json: bool) -> None:
    rows = [
        {
            "label": row.variant.label,
            "method": row.variant.method,
            "runs": len(row.runs),
            "done": row.done,
            "seconds": round(row.seconds, 1),
            "memory_bytes": row.estimate.memory_bytes,
        }
        for row in plan.rows
    ]
    if json:
        print_json({"runs": rows, "seconds": round(plan.seconds, 1), "disk_bytes": plan.disk_bytes})
        return
    lines = [("", "runs", "done", "time", "memory")]
    for row in plan.rows:
        costs = format_duration(row.seconds), format_bytes(row.estimate.memory_bytes)
        lines.append((row.variant.label, str(len(row.runs)), str(row.done), *costs))
    typer.echo(table(lines, right=(1, 2, 3), overflow="none"))
    typer.echo(f"{_costs(plan)}; from steps timed now")


def _costs(plan: SuitePlan) -> str:
    """What the runs that are left take."""
    return (
        f"{plural(len(plan.runs_left), 'run')} to do, about {format_duration(plan.seconds)} one after another, "
        f"a memory of at most {format_bytes(plan.memory_bytes)}, about {format_bytes(plan.disk_bytes)} on disk"
    )


def _print_results(plan: SuitePlan, failed: list[Outcome], json: bool) -> None:
    found = [(row.variant, results) for row in plan.rows if (results := row.results())]
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
        print_json({"rows": rows, "failed": [{"label": run.label, "error": error} for run, error in failed]})
        return
    if found:
        typer.echo(table([(variant.label, _line(results)) for variant, results in found], overflow="none"))
    typer.echo(f"report: engram report {shlex.quote(str(plan.options.folder))} -o report.html")


def _line(results: list[Result]) -> str:
    kind, averages = results[0].leading[0], [result.leading[1] for result in results]
    spread = f" ± {statistics.stdev(averages):.3f}" if len(averages) > 1 else ""
    last = statistics.fmean(result.leading[2][-1] for result in results)
    stored = format_bytes(results[0].memory_bytes)
    return f"{kind}average {statistics.fmean(averages):.3f}{spread}, last {last:.3f}, {stored}"
