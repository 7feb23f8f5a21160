"""What the routes of a server share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Request

from engram.model import ModelFolder
from engram.server.config import Config
from engram.server.connections import Connections
from engram.server.decoding import Decoders
from engram.server.inference import Batcher, ModelLoader
from engram.server.jobs import STATUS, Jobs, JobStatus
from engram.server.limits import RequestLimits
from engram.server.metrics import Metrics
from engram.server.problems import NoModel
from engram.server.security import Authenticator
from engram.server.webhook import Webhook


class Services:
    """The parts of a server that its routes use."""

    def __init__(self, folder: ModelFolder, config: Config) -> None:
        self.folder, self.config = folder, config
        self.webhook = Webhook(config.webhook, config.webhook_allow)  # first: it may refuse to start
        self.authenticator = Authenticator(config)
        self.connections = Connections(config)
        self.limits = RequestLimits(config)
        self.loader = ModelLoader(folder, config, self._forget)
        self.decoders = Decoders(config, self._restarted)
        self.update_decoders = Decoders(replace(config, decoders=1), self._restarted, nice=config.nice)
        self.batcher = Batcher(config, lambda size: self.metrics.batches.observe(size))
        self.jobs = Jobs(self.loader, config, self.update_decoders, self._learned)
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

    def _restarted(self) -> None:
        self.metrics.decoder_restarts.inc()

    def _learned(self, status: JobStatus) -> None:
        self.webhook.send("learned", job=STATUS.dump_python(status, mode="json"))


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Server = Annotated[Services, Depends(_services)]


def require_model(server: Server) -> None:
    """Without a model, there is nothing to edit or to measure."""
    if not server.folder.exists():
        raise NoModel(404)
