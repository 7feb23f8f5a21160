"""`engram serve` as people start it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from commands import engram, engram_here

from engram.model import ModelFolder


def test_a_model_is_served_until_ctrl_c(small_model: ModelFolder) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "engram", "serve", str(small_model.path), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as response:
                    assert response.read() == b'{"version":2,"damaged":null}'
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
        done = engram("serve", "model", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1, port {port}: Address already in use" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "token", "fact"),
    [
        (("--host", "0.0.0.0"), "", "--token-file"),
        (("--token-file", "nowhere"), "", "nowhere"),
        ((), "short", "at least 16"),
    ],
)
def test_unsafe_options_are_refused(
    arguments: tuple[str, ...], token: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_TOKEN", token)
    done = engram_here("serve", "model", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert fact in done.stderr and "Traceback" not in done.stderr


def test_a_temporary_folder_that_is_too_deep_for_a_socket_is_named(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    done = engram("serve", "model", cwd=tmp_path, fresh=True, TMPDIR=str(deep))
    assert done.returncode == 1
    assert str(deep) in done.stderr and "TMPDIR" in done.stderr and "Traceback" not in done.stderr
