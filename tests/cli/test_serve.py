"""`engram serve` as people start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from engram.model import ModelFolder


def engram(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engram", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


def test_a_model_is_served_until_ctrl_c(small_model: ModelFolder) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = engram("serve", small_model.path, "--port", port)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as response:
                    assert response.read() == b'{"generation":2,"damaged":null}'
                break
            except OSError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert f"http://127.0.0.1:{port}/" in stderr
        assert "Traceback" not in stderr
    finally:
        process.kill()
        process.communicate()


def test_a_port_in_use_is_reported_without_a_traceback(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = engram("serve", tmp_path / "model", "--port", port)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"127.0.0.1, port {port}: Address already in use" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("--host", "0.0.0.0"), {"ENGRAM_TOKEN": ""}, "--token-file"),
        (("--token-file", "nowhere"), {}, "nowhere"),
        ((), {"ENGRAM_TOKEN": "short"}, "at least 16"),
    ],
)
def test_unsafe_options_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    process = engram("serve", tmp_path / "model", *arguments, **environment)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert words in stderr and "Traceback" not in stderr


def test_a_temporary_folder_that_is_too_deep_for_a_socket_is_named(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    process = engram("serve", tmp_path / "model", TMPDIR=str(deep))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert str(deep) in stderr and "TMPDIR" in stderr and "Traceback" not in stderr
