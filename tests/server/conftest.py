"""Servers of a small model, in process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models_made import copied
from server_made import Serve
from starlette.testclient import TestClient

from engram.model import ModelFolder
from engram.server import Config, make_app


@pytest.fixture
def model(small_model: ModelFolder, tmp_path: Path) -> ModelFolder:
    return copied(small_model, tmp_path / "secret-place")


@pytest.fixture
def serve(model: ModelFolder) -> Iterator[Serve]:
    """Start servers, of the model by default, and close them at the end."""
    open_clients: list[TestClient] = []

    def start(folder: ModelFolder = model, **settings: Any) -> TestClient:
        config = Config(**{"decoders": 1, "epochs": 1, "device": "cpu", "nice": 0, **settings})
        client = TestClient(make_app(folder, config), base_url="http://localhost", raise_server_exceptions=False)
        client.__enter__()
        open_clients.append(client)
        return client

    yield start
    for client in open_clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(serve: Serve) -> TestClient:
    return serve()
