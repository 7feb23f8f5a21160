"""Carrying out jobs on a Ray cluster: the same jobs, the same folder, which every node must be able to reach."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engram.errors import EngramWarning, not_installed
from engram.experiments.jobs import Job
from engram.experiments.local import AfterTask, Outcome, Site

RETRIES = 3  # of a job whose worker or node has died; it goes on where it was


def run_on_ray(site: Site, jobs: Sequence[Job], after_task: AfterTask, workers: int | None = None) -> list[Outcome]:
    """Each job as a task of Ray. Without `RAY_ADDRESS` a cluster of this machine alone is started, on loopback."""
    ray = _connect(workers)
    site = replace(site, folder=site.folder.resolve(), data=site.data.resolve() if site.data is not None else None)
    taken = share_of(ray.cluster_resources())
    work = ray.remote(max_retries=RETRIES, **taken)(_work)
    under_way = {work.remote(site, job, taken["num_cpus"]): job for job in jobs}
    outcomes = []
    try:
        while under_way:
            ready, _ = ray.wait(list(under_way))
            for reference in ready:
                job = under_way.pop(reference)
                outcomes.append(Outcome(job, _error(ray, reference, site, job)))
                after_task(job)
    finally:
        ray.shutdown()
    return outcomes


def share_of(resources: Mapping[str, float]) -> dict[str, int]:
    """What one job takes of a cluster: where there are GPUs one of them, and its part of the cores; else one core."""
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    return {"num_cpus": max(1, cores // gpus) if gpus else 1, "num_gpus": min(gpus, 1)}


def _connect(workers: int | None) -> Any:
    try:
        import ray
    except ImportError as error:
        raise not_installed("Ray", "ray") from error
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
    return site.carry_out(job, site.load())


def _error(ray: Any, reference: Any, site: Site, job: Job) -> str | None:
    try:
        error: str | None = ray.get(reference)
        return error
    except ray.exceptions.RayError as gone:
        message = f"Its worker died {RETRIES + 1} times: {type(gone).__name__}. Run the suite again with --resume."
        site.mark(job, message)
        return message
