"""A server as `engram serve` starts it, and requests to it from several addresses."""

from __future__ import annotations

import http.client
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from images_made import encoded
from models_made import COLOURS, SIDE, draw

from engram.model import LearnOptions, ModelFolder, learn

TOKEN = "a token of this battery"
NAMES = tuple(COLOURS)
ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"
SMALL = {"epochs": 1, "features_per_class": 3, "hold_out": 0.0, "image_size": SIDE, "network": "auto"}


def small_model(place: Path) -> ModelFolder:
    """A model of three classes, in two versions."""
    folder = ModelFolder(place / "model")
    for number, names in enumerate((NAMES[:2], NAMES)):
        settings = {"adapter_steps": 1, "adapter_width": 8}
        learn(folder, draw(place / str(number), names, 4), LearnOptions(**SMALL, settings=settings))  # type: ignore[arg-type]
    return folder


def image(name: str = NAMES[0]) -> bytes:
    return encoded(np.full((SIDE, SIDE, 3), COLOURS[name], np.uint8), "PNG")


def multipart(files: list[tuple[str, bytes]], classes: list[str] | None = None) -> tuple[bytes, str]:
    """The body of a form, and its type. The boundary is drawn by lot."""
    boundary = secrets.token_hex(16)
    parts = [(f'name="files"; filename="{name}"', content) for name, content in files]
    parts += [('name="classes"', name.encode()) for name in classes or ()]
    head = f"--{boundary}\r\nContent-Disposition: form-data; "
    body = b"".join(f"{head}{fields}\r\n\r\n".encode() + content + b"\r\n" for fields, content in parts)
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


class Answer:
    """A response, and the seconds that it took; the status 0 means that there was none."""

    def __init__(self, status: int, headers: Any, body: bytes, seconds: float) -> None:
        self.status, self.headers, self.body, self.seconds = status, headers, body, seconds


class Serving:
    """`engram serve` in a process of its own, with a folder for temporary files of its own."""

    def __init__(self, folder: ModelFolder, place: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.temporary, token_file = place / "temporary", place / "token"
        self.temporary.mkdir(exist_ok=True)
        token_file.write_text(TOKEN)
        with socket.socket() as free:
            free.bind((ATTACKER, 0))
            self.port = free.getsockname()[1]
        self.command = [sys.executable, "-m", "engram", "serve", str(folder.path), "--port", str(self.port)]
        self.command += ["--token-file", str(token_file), *options]
        self.log = place / "log"

    def __enter__(self) -> Serving:
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=environment, stderr=log, start_new_session=True)
        while self.request("GET", "/readyz").status != 200:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def request(
        self, method: str, path: str, body: bytes = b"", kind: str = "", *, address: str = OTHER, token: str = TOKEN
    ) -> Answer:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {"Content-Type": kind} if kind else {}
        begin = time.monotonic()
        connection = http.client.HTTPConnection(ATTACKER, self.port, timeout=600, source_address=(address, 0))
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read(), time.monotonic() - begin)
        except (OSError, http.client.HTTPException):
            return Answer(0, {}, b"", time.monotonic() - begin)
        finally:
            connection.close()

    def classify(self, *files: bytes, **options: Any) -> Answer:
        return self.request("POST", "/api/classify", *multipart([("a.png", each) for each in files]), **options)

    def teach(self, name: str, count: int = 4) -> Answer:
        files = [(f"{number}.png", image()) for number in range(count)]
        return self.request("POST", "/api/teach", *multipart(files, [name] * count))

    def megabytes(self, which: str) -> float:
        """`VmRSS`, what the server has in memory, or `VmHWM`, what it had at most."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return round(int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024, 1)  # type: ignore[index]

    def family(self) -> dict[int, list[str]]:
        """The fields of /proc/PID/stat of the server and of all processes of its session."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[3] == str(self.process.pid):
                found[int(path.parent.name)] = fields
        return found

    def cpu_seconds(self) -> float:
        """Of the server and of all processes of its session, those that have ended included."""
        ticks = sum(sum(map(int, fields[11:15])) for fields in self.family().values())
        return ticks / os.sysconf("SC_CLK_TCK")
