"""Servers of a small model, in process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
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


def started(folder: ModelFolder, **settings: Any) -> TestClient:
    """A client of a server in this process; a context manager that runs it."""
    config = Config(**{"decoders": 1, "epochs": 1, "device": "cpu", "nice": 0, **settings})
    return TestClient(make_app(folder, config), base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def serve(model: ModelFolder) -> Iterator[Serve]:
    """Start servers, of the model by default, and close them at the end."""
    with ExitStack() as servers:
        yield lambda folder=model, **settings: servers.enter_context(started(folder, **settings))


@pytest.fixture(scope="package")
def shared_client(small_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A server for all tests whose requests change nothing."""
    with started(copied(small_model, tmp_path_factory.mktemp("shared") / "secret-place")) as client:
        yield client


@pytest.fixture
def client(serve: Serve) -> TestClient:
    return serve()
