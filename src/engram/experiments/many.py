"""A suite from beginning to end: what it takes, what is left of it, and carrying it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engram import storage
from engram.data import Dataset
from engram.errors import UsageError
from engram.experiments.estimate import Estimate, estimate
from engram.experiments.jobs import Job, SuiteOptions, jobs_of, leaders_first, variants, write_suite
from engram.experiments.local import Outcome, Site, run_here, run_side_by_side
from engram.experiments.results import Result
from engram.experiments.suites import Variant
from engram.methods import Costs, measure_costs
from engram.progress import SILENT, Progress

COSTLY = ("network", "head", "batch_size", "adapter", "adapter_width", "adapter_depth")  # what costs depend on


@dataclass(frozen=True)
class Row:
    """A variant, its runs, and what they will take where nothing is there yet."""

    variant: Variant
    jobs: tuple[Job, ...]
    estimate: Estimate  # of one run
    left: float  # seconds for all of its runs, what is shared counted where it comes first
    done: int  # runs that are there already


@dataclass(frozen=True)
class SuitePlan:
    """All that a suite consists of on one data set, in the folder of all suites."""

    order: SuiteOptions
    site: Site
    rows: tuple[Row, ...]

    @property
    def left(self) -> list[Job]:
        """The jobs that are still to be done, in their order."""
        return [job for job in leaders_first([job for row in self.rows for job in row.jobs]) if not self.site.done(job)]

    @property
    def seconds(self) -> float:
        """What is left will take about so long, one job after another."""
        return sum(row.left for row in self.rows)

    def results(self) -> list[tuple[Variant, list[Result]]]:
        """What was found, variant by variant; runs that failed are missing."""
        return [
            (
                row.variant,
                [Result.load(self.site.folder / job.folder / "result.json") for job in row.jobs if self.site.done(job)],
            )
            for row in self.rows
        ]


def plan_suite(order: SuiteOptions, site: Site, dataset: Dataset) -> SuitePlan:
    """What a suite takes, and an estimate of how long, from a few steps timed now."""
    costs: dict[tuple[object, ...], Costs] = {}
    members = [(variant, tuple(jobs_of(variant, order, dataset))) for variant in variants(order, dataset)]
    estimates = []
    for _, jobs in members:
        stream = jobs[0].plan.stream(dataset)
        learner = jobs[0].plan.learner(dataset, stream)
        trains = any(learner.trains(task, task.index) for task in stream)
        kind = (*(learner.settings().get(name) for name in COSTLY), learner.tuned, trains)
        if kind not in costs:
            costs[kind] = measure_costs(learner, dataset.train, len(dataset.class_names), trains=trains)
        estimates.append(estimate(learner, stream, costs[kind]))
    each = {job.folder: (job, one) for (_, jobs), one in zip(members, estimates, strict=True) for job in jobs}
    left = _left(site, list(each.values()))
    rows = [  # a run that two variants have in common is counted with the first
        Row(variant, jobs, one, sum(sum(left.pop(job.folder, ())) for job in jobs), sum(map(site.done, jobs)))
        for (variant, jobs), one in zip(members, estimates, strict=True)
    ]
    return SuitePlan(order, site, tuple(rows))


def _left(site: Site, jobs: Sequence[tuple[Job, Estimate]]) -> dict[str, list[float]]:
    """Seconds of each task of the jobs to be done, by folder; what is shared counts for the first of this order."""
    learned = {job.folder: len(one.training) if site.done(job) else site.learned(job) for job, one in jobs}
    trained = {network for job, _ in jobs for network in _networks(job, learned[job.folder])}
    extracted = {(job.shares, one.images) for job, one in jobs if site.done(job)}
    left: dict[str, list[float]] = {}
    for job, one in jobs:
        if site.done(job):
            continue
        networks, tasks = _networks(job, len(one.training)), []
        for task, network in enumerate(networks):
            seconds = one.adapting[task]
            seconds += one.training[task] if network not in trained else 0
            seconds += one.extracting[task] if (job.shares, one.images) not in extracted else 0
            tasks.append(seconds if task >= learned[job.folder] else 0.0)
        trained.update(networks)
        extracted.add((job.shares, one.images))
        left[job.folder] = tasks
    return left


def _networks(job: Job, tasks: int) -> list[tuple[str, int]]:
    """What names the networks of a job's first tasks: equal ones are trained once."""
    return [(job.shares if task else job.begins, task) for task in range(tasks)]


def begin(plan: SuitePlan, command: str, *, resume: bool) -> None:
    """Write down what the suite consists of. One that was begun is gone on with only if that is asked for."""
    storage.make_folder(plan.site.folder)
    path = plan.site.folder / f"suite-{plan.order.suite}.json"
    if path.exists() and not resume:
        raise UsageError(f"{path} is there already. Go on with --resume, or choose another --out.")
    if path.exists():
        before = {run for row in storage.read_json(path)["variants"] for run in row["runs"]}
        if before - {job.folder for row in plan.rows for job in row.jobs}:
            raise UsageError(
                f"{path} has runs that this one has not. Go on with the command it names, or add seeds to it."
            )
    write_suite(plan.site.folder, plan.order, command, [(row.variant, row.jobs) for row in plan.rows])


def carry_out(
    plan: SuitePlan, dataset: Dataset, *, workers: int | None = None, on: str = "local", progress: Progress = SILENT
) -> Sequence[Outcome]:
    """Do what is left. A run that fails is marked, and the rest go on."""
    jobs, weights = plan.left, _weights(plan)
    with progress.phase("suite", sum(sum(weights[job.folder]) for job in jobs)) as whole:

        def after_task(job: Job) -> None:
            if weights[job.folder]:
                whole.advance(weights[job.folder].pop(0), job.label)

        def after_job(job: Job) -> None:
            """What was not learned, for the run has failed or nobody told, is not waited for any more."""
            whole.advance(sum(weights[job.folder]), job.label)
            weights[job.folder].clear()

        if on == "ray":
            from engram.experiments.cluster import run_on_ray

            return run_on_ray(plan.site, jobs, after_job, workers)
        if workers is not None and workers > 1 and len(jobs) > 1:
            return run_side_by_side(plan.site, jobs, workers, after_task, after_job)
        return run_here(plan.site, jobs, dataset, progress, after_task, after_job)


def _weights(plan: SuitePlan) -> dict[str, list[int]]:
    """How much of the whole each task of each job is, in milliseconds of its estimate."""
    estimates = {job.folder: row.estimate for row in plan.rows for job in row.jobs}
    jobs = leaders_first([job for row in plan.rows for job in row.jobs])
    left = _left(plan.site, [(job, estimates[job.folder]) for job in jobs])
    return {folder: [1 + round(1000 * seconds) for seconds in tasks] for folder, tasks in left.items()}


def default_folder(order: SuiteOptions) -> Path:
    """Where the suites of a data set and preset are kept together, so that they share what they can."""
    return Path("runs") / f"{order.dataset}-{order.preset}"
