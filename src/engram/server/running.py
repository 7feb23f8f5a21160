"""The server as a process: the application behind uvicorn, with the limits that it keeps."""

from __future__ import annotations

import os
import socket

import uvicorn

from engram.errors import EngramError
from engram.model import ModelFolder
from engram.server.app import make_app
from engram.server.config import Config
from engram.server.connections import protocol

TOKEN = "ENGRAM_TOKEN"  # in the environment


def check_address(host: str, port: int) -> None:
    """Refuse with a sentence to listen where it is not possible, such as at a port that another server has."""
    try:
        for family, kind, protocol_number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol_number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise EngramError(
            f"The server cannot listen at {host}, port {port}: {reason}. Choose another with --host or --port."
        ) from error


def make_server(folder: ModelFolder, config: Config) -> uvicorn.Server:
    """A server of a model's folder, to be `run()`; it ends by SIGINT and SIGTERM, answers under way first."""
    # Pictures from strangers are decoded in processes that would have it from here. The configuration has it by now.
    os.environ.pop(TOKEN, None)
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
