"""Prometheus metrics."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

from engram.server.inference import ModelLoader
from engram.server.jobs import STATES, Jobs

METHODS = ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The metrics of one server."""

    def __init__(self, jobs: Jobs, loader: ModelLoader) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("engram_requests", "Requests.", ("method", "path", "status"), registry=registry)
        self.seconds = Histogram("engram_request_seconds", "Until the response ended.", ("path",), registry=registry)
        self.images = Counter("engram_images", "Images to classify.", ("outcome",), registry=registry)
        self.batches = Histogram("engram_batch_images", "Batch sizes.", buckets=BATCH_SIZES, registry=registry)
        self.decoder_restarts = Counter("engram_decoder_restarts", "Decoders that died.", registry=registry)
        states = Gauge("engram_jobs", "Jobs that are remembered.", ("state",), registry=registry)
        for state in STATES:
            states.labels(state).set_function(partial(jobs.count, state))
        generation = Gauge("engram_generation", "Version in use; 0 without a model.", registry=registry)
        generation.set_function(lambda: loader.generation or 0)
        damaged = Gauge("engram_damaged", "1 if the newest version is damaged.", registry=registry)
        damaged.set_function(lambda: loader.damaged is not None)

    def record(self, scope: Scope, status: int, seconds: float) -> None:
        """Count and time a request."""
        path = getattr(scope.get("route"), "path", "other")  # as declared: clients must not make up labels
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.requests.labels(method, path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)
