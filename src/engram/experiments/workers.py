"""Running what is left of a suite: one run after another, in several processes, or on a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from engram import storage
from engram.data import Dataset
from engram.errors import BusyError, EngramError, EngramWarning, UsageError, not_installed
from engram.experiments.suite_plan import SuiteOptions, SuitePlan, SuiteRun
from engram.network import Cache
from engram.progress import SILENT, Progress

FAILED = "failed.json"
RETRIES = 3  # of a run on Ray whose worker or node died; it resumes from its checkpoint
INTERVAL = 0.1  # seconds between looks at whether to stop
OLDEST_RAY = (2, 60)  # a local cluster requires a token by default
LOOPBACK = "127.0.0.1"

Outcomes = Generator["Outcome", None, None]  # as runs end


class Outcome(NamedTuple):
    """How a run ended."""

    run: SuiteRun
    error: str | None  # None: it is done


def run_suite(
    plan: SuitePlan,
    dataset: Dataset,
    *,
    workers: int | None = None,
    on: Literal["local", "ray"] = "local",
    progress: Progress = SILENT,
) -> list[Outcome]:
    """Run what is left, `workers` runs at a time. A run that fails is marked, and the others continue.

    By default, one at a time in this process; on Ray, as many as the cluster has room for.
    """
    options, runs, outcomes = plan.options, plan.runs_left, []
    steps = {run.folder: 1 + round(1000 * plan.seconds_left[run.folder]) for run in runs}
    if on == "ray":
        ending = run_on_ray(options, runs, workers)
    elif workers is not None and workers > 1 and len(runs) > 1:
        ending = run_in_processes(options, runs, workers)
    else:
        ending = (Outcome(run, execute(options, run, lambda: dataset, progress)) for run in runs)
    with progress.phase("suite", sum(steps.values())) as phase, closing(ending):
        for outcome in ending:
            outcomes.append(outcome)
            phase.advance(steps[outcome.run.folder], outcome.run.label)
    return outcomes


def execute(
    options: SuiteOptions, run: SuiteRun, load: Callable[[], Dataset], progress: Progress = SILENT
) -> str | None:
    """Execute one run, or what is left of it, and return why it failed, if it did. It can be tried again."""
    try:
        run.plan.run(load(), run.folder, resume=True, cache=Cache(options.folder / "trained"), progress=progress)
    except BusyError as error:  # another process is executing it, and marks it if it fails
        return str(error)
    except EngramError as error:
        return mark_failed(run, str(error))
    except Exception as error:
        return mark_failed(run, f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    (run.folder / FAILED).unlink(missing_ok=True)
    return None


def mark_failed(run: SuiteRun, error: str, **details: str) -> str:
    """Write to a run's folder why it failed, with a traceback if the error was unforeseen."""
    storage.make_folder(run.folder)
    storage.write_json(run.folder / FAILED, {"label": run.label, "error": error, **details})
    return error


def _run_in_threads(
    runs: Sequence[SuiteRun], workers: int, start: Callable[[SuiteRun, threading.Event], str | None]
) -> Outcomes:
    """Start each run in a thread, which waits for it to end, or ends it when the event is set."""
    stopping = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(start, run, stopping): run for run in runs}
        try:
            for future in as_completed(futures):
                yield Outcome(futures[future], future.result())
        finally:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)


def run_in_processes(options: SuiteOptions, runs: Sequence[SuiteRun], workers: int) -> Outcomes:
    """Each run in a process of its own. A process that dies fails its own run only."""
    threads = max(1, (os.cpu_count() or 1) // workers)

    def start(run: SuiteRun, stopping: threading.Event) -> str | None:
        pipe, process = start_process(options, run, threads)
        try:
            while not pipe.poll(INTERVAL):
                if stopping.is_set():
                    process.kill()  # its checkpoints are enough to resume from
                    return None
            error: str | None = pipe.recv()
            return error
        except (EOFError, OSError):
            process.join()
            code = process.exitcode or 0
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return mark_failed(run, f"Its process ended {how}. Run the suite again with --resume.")
        finally:
            process.join()

    return _run_in_threads(runs, workers, start)


def start_process(options: SuiteOptions, run: SuiteRun, threads: int) -> tuple[Connection, BaseProcess]:
    """A process that executes a run, and a pipe on which it sends why the run failed, or None."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process: BaseProcess = context.Process(target=_work, args=(there, options, run, threads), daemon=True)
    # Ctrl-C reaches all processes, and the parent decides. A worker inherits the blocked signals, so it is not
    # interrupted while it imports. (The resource tracker unblocks SIGINT when it starts, so start it first.)
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()
    return pipe, process


def _work(pipe: Connection, options: SuiteOptions, run: SuiteRun, threads: int) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    pipe.send(_execute_alone(options, run, threads))


def _execute_alone(options: SuiteOptions, run: SuiteRun, threads: int) -> str | None:
    torch.set_num_threads(threads)
    return execute(options, run, options.load)


def _exit_with_parent() -> None:
    """A suite that is killed must leave no worker behind that locks its runs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_on_ray(options: SuiteOptions, runs: Sequence[SuiteRun], workers: int | None) -> Outcomes:
    """Each run as a Ray task; every node must reach the folder and the data.

    Without `RAY_ADDRESS`, Ray is started on this machine alone.
    """
    ray = _connect(workers)
    resources = resources_per_run([node["Resources"] for node in ray.nodes() if node["Alive"]])
    task = ray.remote(max_retries=RETRIES, **resources)(_execute_alone)

    def start(run: SuiteRun, stopping: threading.Event) -> str | None:
        reference = task.remote(*absolute(options, run), resources["num_cpus"])
        try:
            while not ray.wait([reference], timeout=INTERVAL)[0]:
                if stopping.is_set():
                    return None
            error: str | None = ray.get(reference)
            return error
        except ray.exceptions.RayError as lost:
            why = f"Its worker died {RETRIES + 1} times: {type(lost).__name__}. Run the suite again with --resume."
            return mark_failed(run, why)

    try:
        yield from _run_in_threads(runs, workers or max(1, len(runs)), start)
    finally:
        ray.shutdown()


def absolute(options: SuiteOptions, run: SuiteRun) -> tuple[SuiteOptions, SuiteRun]:
    """The same with absolute paths, for workers in another working directory."""

    def resolved(path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().resolve()

    settings = dict(run.plan.settings)
    if settings.get("weights"):
        settings["weights"] = str(resolved(Path(settings["weights"])))
    decoding = replace(options.decoding, class_list=resolved(options.decoding.class_list))
    options = replace(options, out=resolved(options.folder), data=resolved(options.data), decoding=decoding)
    return options, replace(run, folder=run.folder.resolve(), plan=replace(run.plan, settings=settings))


def resources_per_run(nodes: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """One GPU, where there are any, with as many cores as every node has per GPU; else one core."""
    cores = [int(node.get("CPU", 1) // node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1]
    return {"num_cpus": max(1, min(cores)), "num_gpus": 1} if cores else {"num_cpus": 1, "num_gpus": 0}


def import_ray() -> Any:
    """Ray, or an error before anything starts: if it is missing, too old, or used without token authentication.

    Unless `RAY_ADDRESS` names a cluster, Ray will listen on the loopback address alone.
    """
    address = os.environ.get("RAY_ADDRESS")
    mode = os.environ.get("RAY_AUTH_MODE", "not set" if address else "token")
    if mode.lower() != "token":
        raise UsageError(
            f"RAY_AUTH_MODE is {mode}. Ray runs any code that it receives. Start it and this with RAY_AUTH_MODE=token."
        )
    if not address:
        # Ray reads these once. The first, despite its name, keeps the node's address a loopback address.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray's own, in a file, may be read by others
    try:
        import ray
    except ImportError as error:
        raise not_installed("Ray", "ray") from error
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST_RAY:
        raise not_installed("A newer Ray, with token authentication,", "ray")
    return ray


def _connect(workers: int | None) -> Any:
    ray = import_ray()
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address="local", num_cpus=workers, _node_ip_address=LOOPBACK, **quiet)
        if ray.util.get_node_ip_address() != LOOPBACK:
            ray.shutdown()
            raise UsageError(
                "Ray would listen on all addresses, because it was imported before the suite started. Set "
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before that."
            )
        return ray
    if not address.removeprefix("ray://").startswith((LOOPBACK, "localhost")):
        warnings.warn(
            f"The cluster at {address} is not on this machine. Ray runs any code that it receives, so use a network "
            "that you trust. Every node must reach the suite's folder and the data under the same paths.",
            EngramWarning,
            stacklevel=3,
        )
    ray.init(address=address, log_to_driver=False)
    return ray
