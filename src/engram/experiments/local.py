"""Carrying out jobs on this machine: one after another, or several at once, each in a process of its own."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from engram import storage
from engram.data import Dataset, DecodeOptions, load
from engram.errors import BusyError, EngramError
from engram.experiments.checkpoint import RunFolder
from engram.experiments.jobs import Job
from engram.network import Cache
from engram.progress import SILENT, Progress

FAILED = "failed.json"


class Outcome(NamedTuple):
    """How a job ended."""

    job: Job
    error: str | None  # None: well


@dataclass(frozen=True)
class Site:
    """Where jobs are carried out: the folder of all suites, and the data set they learn."""

    folder: Path
    dataset: str
    data: Path | None
    options: DecodeOptions = field(default_factory=DecodeOptions)

    def load(self, progress: Progress = SILENT) -> Dataset:
        """The data set."""
        return load(self.dataset, self.data, progress, self.options)

    def done(self, job: Job) -> bool:
        """Whether the job's result is there."""
        return (self.folder / job.folder / "result.json").exists()

    def learned(self, job: Job) -> int:
        """How many of the job's tasks are learned and measured, and need not be again."""
        return RunFolder(self.folder / job.folder).learned

    def carry_out(
        self,
        job: Job,
        load: Callable[[], Dataset],
        progress: Progress = SILENT,
        after_task: Callable[[], None] | None = None,
    ) -> str | None:
        """Do one job, or what is left of it; why it failed, if it did. It is marked then, and may be tried again."""
        place = self.folder / job.folder
        try:
            job.plan.run(
                load(),
                place,
                resume=True,
                trainings=Cache(self.folder / "trained"),
                progress=progress,
                after_task=None if after_task is None else lambda *_: after_task(),
            )
        except BusyError as error:  # whoever is at work there will leave its own word
            return str(error)
        except EngramError as error:
            return self.mark(job, str(error))
        except Exception as error:
            return self.mark(job, f"{type(error).__name__}: {error}", traceback.format_exc())
        (place / FAILED).unlink(missing_ok=True)
        return None

    def mark(self, job: Job, message: str, trace: str = "") -> str:
        """Leave word in a job's folder of why it failed, for people, and if it was unforeseen for engineers too."""
        storage.make_folder(self.folder / job.folder)
        details = {"trace": trace} if trace else {}
        storage.write_json(self.folder / job.folder / FAILED, {"label": job.label, "error": message, **details})
        return message


Hook = Callable[[Job], None]  # called after a job's task, or after all of it


def run_here(
    site: Site, jobs: Sequence[Job], dataset: Dataset, progress: Progress, after_task: Hook, after_job: Hook
) -> list[Outcome]:
    """One job after another, in this process."""
    outcomes = []
    for job in jobs:
        error = site.carry_out(job, lambda: dataset, progress, functools.partial(after_task, job))
        outcomes.append(Outcome(job, error))
        after_job(job)
    return outcomes


def run_side_by_side(site: Site, jobs: Sequence[Job], workers: int, after_task: Hook, after_job: Hook) -> list[Outcome]:
    """Several jobs at once. A process that dies fails its job alone, and another takes its place."""
    waiting, outcomes = list(jobs), []
    threads = max(1, (os.cpu_count() or 1) // workers)
    crew = [_Worker(site, threads) for _ in range(min(workers, len(waiting)))]
    try:
        for worker in crew:
            worker.give(waiting.pop(0))
        while any(worker.job for worker in crew):
            ready = wait([worker.pipe for worker in crew if worker.job])
            for worker in [each for each in crew if each.pipe in ready]:
                job = worker.job
                assert job is not None
                message = worker.hear()
                if message == "task":
                    after_task(job)
                    continue
                if worker.dead:
                    message = (False, worker.epitaph())
                    site.mark(job, message[1])
                    if waiting:
                        worker.start()
                assert isinstance(message, tuple)
                outcomes.append(Outcome(job, None if message[0] else message[1]))
                after_job(job)
                worker.give(waiting.pop(0) if waiting else None)
    finally:
        for worker in crew:
            worker.end()
    return outcomes


class _Worker:
    """A process that carries out the jobs it is given."""

    def __init__(self, site: Site, threads: int) -> None:
        self.site, self.threads = site, threads
        self.job: Job | None = None
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(there, self.site, self.threads), daemon=True)
        # Ctrl-C reaches all processes, and the first one decides. A worker inherits what is blocked here, so it is not
        # interrupted while it still imports. (The tracker of multiprocessing unblocks it when it starts: so before.)
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        self.dead = False

    def give(self, job: Job | None) -> None:
        self.job = job
        if job is not None:
            self.pipe.send(job)

    def hear(self) -> str | tuple[bool, str] | None:
        try:
            message: str | tuple[bool, str] = self.pipe.recv()
            return message
        except (EOFError, OSError):
            self.dead = True
            return None

    def epitaph(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"Its process ended {how}. Run the suite again with --resume to go on with it."

    def end(self) -> None:
        self.pipe.close()
        if self.job is not None:  # interrupted: what it has saved so far is enough to go on from
            self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def _work(pipe: Connection, site: Site, threads: int) -> None:
    """What a worker's process does: wait for a job, do it, tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is blocked until here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"  # for people: without the line of code
    torch.set_num_threads(threads)
    load = functools.cache(site.load)  # once, unless it fails: then the job does, and says why
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        error = site.carry_out(job, load, SILENT, lambda: pipe.send("task"))
        pipe.send((error is None, error or ""))


def _end_with_parent() -> None:
    """A suite that is killed leaves no worker behind, holding runs that are to be gone on with."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
