"""Numbers for whoever watches over the server, in the words of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.server.decoding import Decoders
from engram.server.jobs import Jobs
from engram.server.snapshot import Snapshots

METHODS = ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS")
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """What is counted, for one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "path", "status")
        self.requests = Counter("engram_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram("engram_request_seconds", "Until the answer ended.", ("path",), registry=self.registry)
        self.pictures = Counter("engram_pictures", "Pictures asked about.", ("outcome",), registry=self.registry)
        self.batches = Histogram(
            "engram_batch_pictures", "Pictures in a forward pass.", buckets=BATCHES, registry=self.registry
        )

    def watch(self, jobs: Jobs, decoders: Decoders, snapshots: Snapshots) -> None:
        """Tell of these too, as they are when somebody asks."""
        self.registry.register(_Standing(jobs, decoders, snapshots))

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self.registry)


class _Standing(Collector):
    def __init__(self, jobs: Jobs, decoders: Decoders, snapshots: Snapshots) -> None:
        self.jobs, self.decoders, self.snapshots = jobs, decoders, snapshots

    def collect(self) -> Iterator[Metric]:
        """As they are now."""
        lessons = GaugeMetricFamily("engram_jobs", "Lessons that are remembered.", labels=["state"])
        for state, count in self.jobs.counts().items():
            lessons.add_metric([state], count)
        yield lessons
        yield CounterMetricFamily("engram_decoder_restarts", "Decoders that died.", value=self.decoders.restarts)
        generation, damaged = self.snapshots.generation, self.snapshots.damaged
        yield GaugeMetricFamily("engram_generation", "The generation in use; 0 without a model.", generation or 0)
        yield GaugeMetricFamily(
            "engram_damaged", "1: the newest generation is damaged, and not used.", damaged is not None
        )


class Measured:
    """Counts every request that goes by."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, and count how it ended."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # as it is declared: never what a stranger made up
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(method, path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - begin)
