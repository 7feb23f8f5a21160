"""The server as a process: the application behind uvicorn, with the limits that it keeps."""

from __future__ import annotations

import uvicorn

from engram.model import ModelFolder
from engram.server.app import make_app
from engram.server.config import Config
from engram.server.connections import protocol


def make_server(folder: ModelFolder, config: Config) -> uvicorn.Server:
    """A server of a model's folder, to be `run()`; it ends by SIGINT and SIGTERM, answers under way first."""
    return uvicorn.Server(
        uvicorn.Config(
            make_app(folder, config),
            host=config.host,
            port=config.port,
            http=protocol(config),
            ws="none",
            log_level="warning",
            server_header=False,
            proxy_headers=config.proxy is not None,
            forwarded_allow_ips=config.proxy or "",
            timeout_keep_alive=15,
            timeout_graceful_shutdown=10,
        )
    )
