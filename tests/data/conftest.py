"""Fixtures for the tests of data: tiny CIFAR releases as Python 2 wrote them, and an HTTP server on loopback."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from engram.data.cifar import CIFAR10, CIFAR100, Release

CLASSES = 3


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2's cPickle did for the official files: text as byte strings, arrays by their old module."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_text(self, text: str | bytes) -> None:
        content = text.encode("latin1") if isinstance(text, str) else text
        short = len(content) < 256
        length = struct.pack("<B" if short else "<i", len(content))
        self.write((pickle.SHORT_BINSTRING if short else pickle.BINSTRING) + length + content)
        self.memoize(text)

    def save_global(self, value: Any, name: str | None = None) -> None:
        if getattr(value, "__name__", "") == "_reconstruct":
            self.write(pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n")
            self.memoize(value)
        else:
            super().save_global(value, name)

    dispatch[str] = dispatch[bytes] = save_text
    dispatch[type(np.empty(0).__reduce__()[0])] = save_global


def python2_pickle(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def contents(release: Release) -> dict[str, dict[str, Any]]:
    """The content of the files of a tiny release: random images of three classes."""
    random = np.random.default_rng(7)
    files: dict[str, dict[str, Any]] = {}
    for file in (*release.train, *release.test):
        labels = [0, 1, 2, 2, 1]
        pixels = random.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        files[file] = {"batch_label": "tiny", release.labels_key: labels, "data": pixels}
    files[release.meta] = {release.names_key: ["ant", "bee", "caf\xe9"]}
    return files


def write(release: Release, root: Path, files: dict[str, bytes]) -> Release:
    """Write the files of a release, and return the release with their checksums."""
    folder = root / release.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return replace(release, checksums={name: hashlib.md5(content).hexdigest() for name, content in files.items()})


@pytest.fixture
def make_release(tmp_path: Path) -> Callable[..., Release]:
    """`make_release(release, file={key: value}, …)`: a tiny release in `tmp_path`, with these changes to its files."""

    def make(release: Release = CIFAR100, **changes: Any) -> Release:
        files: dict[str, bytes] = {}
        for name, content in contents(release).items():
            change = changes.get(name, {})
            value = {k: v for k, v in {**content, **change}.items() if v is not None} if isinstance(change, dict) else 0
            files[name] = change if isinstance(change, bytes) else python2_pickle(value)
        return write(release, tmp_path, files)

    return make


@pytest.fixture(params=[CIFAR100, CIFAR10], ids=["cifar100", "cifar10"])
def official(request: pytest.FixtureRequest) -> Release:
    release: Release = request.param
    return release


Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Answer]], str]]:
    """`serve({"/path": answer})`: the address of a server on loopback with these answers; 404 for all other paths."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers: list[ThreadingHTTPServer] = []

    def start(answers: dict[str, Answer]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.get(self.path, lambda handler: handler.send_error(404))(self)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, outside of the data."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ENGRAM_DATA", str(folder))
    return folder
