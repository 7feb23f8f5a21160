"""Prometheus metrics."""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.server.inference import ModelLoader
from engram.server.jobs import STATES, Jobs

METHODS = ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("engram_requests", "Requests.", ("method", "path", "status"), registry=registry)
        self.seconds = Histogram("engram_request_seconds", "Until the response ended.", ("path",), registry=registry)
        self.pictures = Counter("engram_pictures", "Pictures to classify.", ("outcome",), registry=registry)
        self.batches = Histogram("engram_batch_pictures", "Batch sizes.", buckets=BATCH_SIZES, registry=registry)
        self.decoder_restarts = Counter("engram_decoder_restarts", "Decoders that died.", registry=registry)

    def watch(self, jobs: Jobs, loader: ModelLoader) -> None:
        """Add gauges that are read when the metrics are."""
        states = Gauge("engram_jobs", "Jobs that are remembered.", ("state",), registry=self.registry)
        for state in STATES:
            states.labels(state).set_function(partial(jobs.count, state))
        generation = Gauge("engram_generation", "Generation in use; 0 without a model.", registry=self.registry)
        generation.set_function(lambda: loader.generation or 0)
        damaged = Gauge("engram_damaged", "1 if the newest generation is damaged.", registry=self.registry)
        damaged.set_function(lambda: loader.damaged is not None)


class MetricsMiddleware:
    """Counts and times requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and record its status."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # as declared: clients must not make up labels
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(method, path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - begin)
