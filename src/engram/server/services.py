"""What the routes of a server share, and its metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

from engram.model import ModelFolder
from engram.server.config import Config
from engram.server.connections import Connections, RequestLimits
from engram.server.decoding import Decoders
from engram.server.inference import Batcher, ModelLoader
from engram.server.jobs import STATES, STATUS, Jobs
from engram.server.problems import NO_MODEL, Problem
from engram.server.security import Authenticator
from engram.server.webhook import Webhook

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
        version = Gauge("engram_model_version", "Version of the model in use; 0 without a model.", registry=registry)
        version.set_function(lambda: loader.version or 0)
        damaged = Gauge("engram_damaged", "1 if the newest version is damaged.", registry=registry)
        damaged.set_function(lambda: loader.damaged is not None)

    def record(self, scope: Scope, status: int, seconds: float) -> None:
        """Count and time a request."""
        path = getattr(scope.get("route"), "path", "other")  # as declared: clients must not make up labels
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.requests.labels(method, path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)


class Services:
    """The parts of a server that its routes use."""

    def __init__(self, folder: ModelFolder, config: Config) -> None:
        self.folder, self.config = folder, config
        self.webhook = Webhook(config.webhook, config.webhook_allow)  # first: it may refuse to start
        self.authenticator = Authenticator(config)
        self.connections = Connections(config)
        self.limits = RequestLimits(config)
        self.loader = ModelLoader(folder, config, self._forget)
        self.decoders = Decoders(config, lambda: self.metrics.decoder_restarts.inc())
        self.update_decoders = Decoders(replace(config, decoders=1), self.decoders.on_restart, nice=config.nice)
        self.batcher = Batcher(config, lambda size: self.metrics.batches.observe(size))
        self.jobs = Jobs(
            self.loader,
            config,
            self.update_decoders,
            lambda status: self.webhook.send("learned", job=STATUS.dump_python(status, mode="json")),
        )
        self.metrics = Metrics(self.jobs, self.loader)

    def close(self) -> None:
        """End all processes and threads."""
        self.jobs.close()
        self.loader.close()
        self.decoders.close()
        self.update_decoders.close()
        self.batcher.close()
        self.webhook.close()

    def _forget(self) -> None:
        """A version was deleted: delete what may name a class that was forgotten, even under an earlier name."""
        self.jobs.delete_finished()
        self.webhook.clear()


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Server = Annotated[Services, Depends(_services)]


def require_model(server: Server) -> None:
    """Without a model, there is nothing to edit or to measure."""
    if not server.folder.exists():
        raise Problem(404, NO_MODEL)
