"""Servers for tests, requests to them, and waiting for jobs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from images_made import encoded
from models_made import COLOURS, SIDE
from starlette.testclient import TestClient

from engram.model import ModelFolder
from engram.server import Config, make_server

Serve = Callable[..., TestClient]
HEAD = b"POST /api/classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
# A program: so many connections to a port that send nothing, each opened again when it is closed.
FLOOD = """
import selectors, socket, sys
silent = selectors.DefaultSelector()
missing = int(sys.argv[2])
while True:
    for _ in range(missing):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", int(sys.argv[1])))
        silent.register(connection, selectors.EVENT_READ)
    cut = [key.fileobj for key, _ in silent.select()]
    for connection in cut:
        silent.unregister(connection)
        connection.close()
    missing = len(cut)
"""


def image_bytes(name: str, seed: int = 0) -> bytes:
    """A noisy PNG of the colour of a class; see `models_made`."""
    noise = np.random.default_rng(seed).integers(-40, 41, (SIDE, SIDE, 3))
    return encoded(np.clip(np.array(COLOURS.get(name, (128, 128, 128))) + noise, 0, 255).astype(np.uint8), "PNG")


def files(*contents: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (f"{number}.png", content)) for number, content in enumerate(contents)]


def update_form(name: str, count: int = 8) -> dict[str, Any]:
    """Arguments of `post` that teach a class."""
    return {"files": files(*(image_bytes(name, seed) for seed in range(count))), "data": {"classes": [name] * count}}


def wait_for_job(client: TestClient, id: str, seconds: float = 60) -> dict[str, Any]:
    """The status of a job when it is finished."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        job: dict[str, Any] = client.get(f"/api/jobs/{id}").json()
        if job["state"] in ("done", "failed", "cancelled"):
            return job
        time.sleep(0.05)
    raise AssertionError(f"The job is not finished: {job}")


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def opened(port: int, sent: bytes = b"") -> socket.socket:
    """A connection to a server on which these bytes were sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


@contextmanager
def not_loading(client: TestClient) -> Iterator[None]:
    """Inside, the server loads no version, as if loading took that long."""
    begun, end = threading.Event(), threading.Event()
    client.app.state.services.loader._thread.submit(lambda: (begun.set(), end.wait()))  # type: ignore[attr-defined]
    begun.wait()
    try:
        yield
    finally:
        end.set()


@contextmanager
def listening(folder: ModelFolder, **settings: Any) -> Iterator[int]:
    """The port of a real server."""
    server = make_server(folder, Config(**{"port": 0, "decoders": 1, "device": "cpu", "nice": 0, **settings}))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
