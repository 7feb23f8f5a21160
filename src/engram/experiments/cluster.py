"""Carrying out jobs on a Ray cluster: the same jobs, the same folder, which every node must be able to reach."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engram.errors import EngramWarning, not_installed
from engram.experiments.jobs import Job
from engram.experiments.local import Hook, Outcome, Site

RETRIES = 3  # of a job whose worker or node has died; it goes on where it was


def run_on_ray(site: Site, jobs: Sequence[Job], after_job: Hook, workers: int | None = None) -> list[Outcome]:
    """Each job as a task of Ray, no more than `workers` at a time; None: as many as the cluster has room for.

    Without `RAY_ADDRESS` a cluster of this machine alone is started, on loopback.
    """
    ray = _connect(workers)
    site, jobs = _for_all_nodes(site, jobs)
    taken = share_of([node["Resources"] for node in ray.nodes() if node["Alive"]])
    work = ray.remote(max_retries=RETRIES, **taken)(_work)
    waiting, outcomes = list(jobs), []
    under_way: dict[Any, Job] = {}  # by what Ray calls them
    try:
        while waiting or under_way:
            while waiting and (workers is None or len(under_way) < workers):
                job = waiting.pop(0)
                under_way[work.remote(site, job, taken["num_cpus"])] = job
            ready, _ = ray.wait(list(under_way))
            for reference in ready:
                job = under_way.pop(reference)
                outcomes.append(Outcome(job, _error(ray, reference, site, job)))
                after_job(job)
    finally:
        ray.shutdown()
    return outcomes


def _for_all_nodes(site: Site, jobs: Sequence[Job]) -> tuple[Site, list[Job]]:
    """The site and the jobs with whole paths: a worker's folder is another."""

    def whole(path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().resolve()

    def weighted(job: Job) -> Job:
        settings = dict(job.plan.settings)
        if settings.get("weights"):
            settings["weights"] = str(whole(Path(settings["weights"])))
        return replace(job, plan=replace(job.plan, settings=settings))

    options = replace(site.options, class_list=whole(site.options.class_list))
    site = replace(site, folder=site.folder.resolve(), data=whole(site.data), options=options)
    return site, [weighted(job) for job in jobs]


def share_of(nodes: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """What one job takes: where there are GPUs one, with as many cores as each node has for every GPU; else a core."""
    cores = [int(node.get("CPU", 1) // node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1]
    return {"num_cpus": max(1, min(cores)), "num_gpus": 1} if cores else {"num_cpus": 1, "num_gpus": 0}


def check_installed() -> Any:
    """Ray, or why there is none."""
    try:
        import ray
    except ImportError as error:
        raise not_installed("Ray", "ray") from error
    return ray


def _connect(workers: int | None) -> Any:
    ray = check_installed()
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        return ray
    if not address.startswith(("127.0.0.1", "localhost", "ray://127.0.0.1", "ray://localhost")):
        warnings.warn(
            f"The cluster at {address} is not on this machine: Ray runs whatever it is sent, so its network must be "
            "one you trust, and every node must reach the suites' folder and the data under the same paths.",
            EngramWarning,
            stacklevel=3,
        )
    ray.init(address=address, log_to_driver=False)
    return ray


def _work(site: Site, job: Job, threads: int) -> str | None:
    """What a worker of the cluster does."""
    import torch

    torch.set_num_threads(threads)
    return site.carry_out(job, site.load)


def _error(ray: Any, reference: Any, site: Site, job: Job) -> str | None:
    try:
        error: str | None = ray.get(reference)
        return error
    except ray.exceptions.RayError as gone:
        message = f"Its worker died {RETRIES + 1} times: {type(gone).__name__}. Run the suite again with --resume."
        site.mark(job, message)
        return message
