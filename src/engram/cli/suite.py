"""`engram suite`: a table or figure of the paper by name."""

from __future__ import annotations

import shlex
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engram.cli.experiment_options import ExperimentOptions, command, print_skipped
from engram.cli.options import parse_settings
from engram.cli.output import print_json, table

if TYPE_CHECKING:
    from engram.experiments.suite_plan import SuiteOptions, SuitePlan
    from engram.experiments.workers import Outcome


@dataclass(kw_only=True)
class SuiteCommand(ExperimentOptions):
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
        """What to run."""
        from engram.experiments.suite_plan import SuiteOptions

        return SuiteOptions(
            suite=self.name,
            dataset=self.dataset,
            data=self.data,
            decoding=self.decoding(),
            out=self.out,
            preset=self.preset,
            seeds=self.seeds,
            seed=self.seed,
            methods=tuple(method for method in self.methods.split(",") if method),
            tasks=self.tasks,
            settings={**({} if self.device == "auto" else {"device": self.device}), **parse_settings(self.set)},
        )


@command(SuiteCommand)
def suite(options: SuiteCommand) -> None:
    """Run a table or figure of the paper: every method, every value, every seed."""
    from engram.cli.display import Display
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
            print_skipped(dataset, display)
            plan = plan_suite(wanted, dataset)
            if options.plan:
                _print_plan(plan, options.json)
                return
            plan.start(shlex.join(["engram", *sys.argv[1:]]), resume=options.resume)
            display.say(f"{options.name} on {options.dataset}: {len(plan.runs_left)} runs to do, in {wanted.folder}")
            outcomes = run_suite(plan, dataset, workers=options.jobs, on=options.on, progress=display)
        except KeyboardInterrupt:
            again = f"--out {shlex.quote(str(wanted.folder))} --resume"
            display.say(f"Stopped. To continue, run the same command with {again}")
            raise typer.Exit(130) from None
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
        print_json({"runs": rows, "seconds": round(plan.seconds, 1)})
        return
    lines = [("", "runs", "done", "time", "memory")]
    for row in plan.rows:
        memory = f"{row.estimate.memory_bytes / 2**20:7.2f} MB"
        lines.append((row.variant.label, str(len(row.runs)), str(row.done), _time(row.seconds), memory))
    typer.echo(table(lines, right=(1, 2, 3), overflow="none"))
    typer.echo(f"about {_time(plan.seconds)} for what is left, one run after another, from steps timed now")


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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
    lines = []
    for variant, results in found:
        averages = [result.average_incremental_accuracy for result in results]
        spread = f" ± {statistics.stdev(averages):.3f}" if len(averages) > 1 else ""
        last = statistics.fmean(result.curve[-1] for result in results)
        text = f"average {statistics.fmean(averages):.3f}{spread}, last {last:.3f}, {results[0].memory_mb:.2f} MB"
        lines.append((variant.label, text))
    if lines:
        typer.echo(table(lines, overflow="none"))
    typer.echo(f"report: engram report {shlex.quote(str(plan.options.folder))} -o report.html")
