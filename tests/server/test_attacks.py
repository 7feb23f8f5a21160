"""Attacks: slow and silent connections, full disks, hostile files, guessed tokens."""

from __future__ import annotations

import gc
import http.client
import logging
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx2
import numpy as np
import pytest
from images_made import chunk, encoded, gradient, png
from models_made import TULIP, copied
from server_made import (
    FLOOD,
    HEAD,
    PART,
    Serve,
    files,
    image_bytes,
    listening,
    opened,
    update_form,
    wait_for_job,
    wait_until,
)
from starlette.testclient import TestClient

from engram.model import ModelFolder, verify
from engram.server import Config
from engram.server.connections import Connections


def received(connection: socket.socket) -> bytes:
    """Everything that the server sends until it closes the connection."""
    response = b""
    while more := connection.recv(65536):
        response += more
    return response


def ended(connection: socket.socket) -> bool:
    """Whether the server closes the connection without a response."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def alive(port: int) -> bool:
    with opened(port, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as connection:
        return b" 200 " in connection.recv(100)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", HEAD])
def test_a_request_whose_head_is_late_is_dropped(model: ModelFolder, sent: bytes) -> None:
    with listening(model, head_seconds=0.5) as port:
        begin = time.monotonic()
        with opened(port, sent) as connection:
            assert ended(connection)
        assert time.monotonic() - begin < 10


def test_headers_that_trickle_in_do_not_hold_a_connection(model: ModelFolder) -> None:
    with listening(model, head_seconds=0.5) as port, opened(port, b"GET /livez HTTP/1.1\r\n") as connection:
        begin = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begin < 20:
                connection.sendall(b"X-More: 1\r\n")
                time.sleep(0.05)
        assert time.monotonic() - begin < 10


def test_the_head_of_a_second_request_has_a_time_limit_too(model: ModelFolder) -> None:
    whole = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with listening(model, head_seconds=0.5) as port, opened(port, whole) as connection:
        response = b""
        while b"alive" not in response:  # head and body may come one after the other
            response += connection.recv(65536)
        connection.sendall(whole[:20])
        assert ended(connection)


def test_a_body_that_trickles_in_is_cut_off(model: ModelFolder) -> None:
    with listening(model, body_seconds=1, head_seconds=0.5) as port:
        with opened(port, HEAD + b"Content-Length: 100000\r\n\r\n" + PART) as connection:
            begin = time.monotonic()
            with suppress(OSError):
                while time.monotonic() - begin < 20:
                    connection.sendall(b"x")
                    time.sleep(0.05)
            assert time.monotonic() - begin < 10
        assert alive(port)


def test_a_client_that_does_not_read_is_dropped(model: ModelFolder) -> None:
    """Pipelined requests fill the write buffer."""
    with listening(model, response_seconds=0.5) as port:
        with opened(port) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            begin = time.monotonic()
            with suppress(OSError):
                while time.monotonic() - begin < 20:
                    connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            assert time.monotonic() - begin < 15
        assert alive(port)


def test_connections_above_the_limit_are_closed_at_once(model: ModelFolder) -> None:
    with listening(model, connections=5, reserved_connections=0, head_seconds=1) as port:
        held = [opened(port) for _ in range(5)]
        with opened(port) as one_more:
            assert ended(one_more)
        for connection in held:
            assert ended(connection)
            connection.close()
        assert alive(port)


def test_a_flood_of_silent_connections_does_not_stop_other_addresses(model: ModelFolder) -> None:
    """2,000 connections from one address. How long others wait is measured by benchmarks/attacks.py."""
    with (
        listening(model, token="t" * 16) as port,
        subprocess.Popen([sys.executable, "-c", FLOOD, str(port), "2000"]) as flood,
    ):
        try:
            time.sleep(1)
            for path in ("/livez", "/api/jobs") * 40:
                other = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=("127.0.0.2", 0))
                with closing(other):
                    other.request("GET", path, headers={"Authorization": f"Bearer {'t' * 16}"})
                    assert other.getresponse().status == 200
        finally:
            flood.kill()


def admitted(connections: Connections, address: str, count: int) -> int:
    return sum(connections.admit(address) for _ in range(count))


def test_connections_are_limited_per_address_and_some_are_reserved() -> None:
    connections = Connections(Config(connections=10, address_connections=4, reserved_connections=3))
    connections.authenticated("10.0.0.9")
    assert admitted(connections, "10.0.0.1", 9) == 4
    assert admitted(connections, "10.0.0.2", 9) == 3  # the last three are reserved
    assert admitted(connections, "10.0.0.3", 9) == 1  # a health check
    assert admitted(connections, "10.0.0.9", 9) == 2  # it has authenticated
    connections.release("10.0.0.1")
    assert (admitted(connections, "10.0.0.1", 9), admitted(connections, "10.0.0.4", 9)) == (0, 1)


def test_a_network_of_ipv6_counts_as_one_address_and_a_proxy_as_many() -> None:
    connections = Connections(Config(address_connections=2, trusted_proxy="10.0.0.0/24"))
    assert [connections.admit(f"2001:db8::{number}") for number in range(3)] == [True, True, False]
    assert connections.admit("2001:db8:0:1::1")
    assert admitted(connections, "::ffff:192.0.2.1", 1) + admitted(connections, "192.0.2.1", 9) == 2
    assert admitted(connections, "10.0.0.7", 20) == 20


def test_bodies_of_all_requests_together_are_limited(model: ModelFolder) -> None:
    """Each body alone is within the limit."""
    size = 400_000
    request = HEAD + b"Content-Length: %d\r\n\r\n" % size + PART + bytes(size // 2)
    with listening(model, body_bytes=1_000_000, all_body_bytes=1_000_000, body_seconds=5) as port:
        held = [opened(port, request) for _ in range(8)]
        wait_until(lambda: len(select.select(held, [], [], 0)[0]) >= 3)  # at 200,000 bytes each, five fit
        time.sleep(0.3)
        answered = select.select(held, [], [], 0)[0]
        assert len(answered) <= 5 and all(b" 429 " in connection.recv(1000) for connection in answered)
        for connection in held:
            connection.close()
        assert alive(port)


def test_bytes_that_are_not_http_get_a_problem_document(model: ModelFolder) -> None:
    with listening(model) as port, opened(port, b"\x16\x03\x01\x02\x00 hello\r\n\r\n") as connection:
        response = received(connection)
        assert b" 400 " in response and b"application/problem+json" in response
        assert b"openapi" in response and b"nosniff" in response


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(model: ModelFolder) -> None:
    """What follows could be a request that a proxy did not see."""
    head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = head + b"0\r\n\r\n" + head.split(b"Content")[0] + b"\r\n"
    with listening(model) as port, opened(port, sent) as connection:
        response = received(connection)
    assert response.count(b"HTTP/1.1") == 1 and b" 400 " in response


@pytest.mark.parametrize("path", ["livez", "api/model", "api/classify"])
def test_a_malformed_chunk_gets_one_response_and_no_traceback(model: ModelFolder, path: str) -> None:
    lines = [f"POST /{path} HTTP/1.1", "Host: localhost", "Content-Type: multipart/form-data; boundary=b"]
    lines += ["Transfer-Encoding: chunked", "", "zz", ""]
    logged: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = logged.append  # type: ignore[method-assign]
    with listening(model) as port:
        logging.getLogger("uvicorn.error").addHandler(handler)
        try:
            with opened(port, "\r\n".join(lines).encode()) as connection:
                response = received(connection)
            assert alive(port)
        finally:
            logging.getLogger("uvicorn.error").removeHandler(handler)
    assert response.count(b"HTTP/1.1") == 1 and b" 400 " in response
    assert logged == []


@pytest.mark.parametrize("line", ["Content-Length: 1\r\nContent-Length: 2", f"Content-Length: {'9' * 5000}", "Host: b"])
def test_repeated_and_endless_headers_are_refused(model: ModelFolder, line: str) -> None:
    head = f"GET /livez HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n"
    with listening(model) as port, opened(port, head.encode()) as connection:
        assert b" 400 " in connection.recv(100)


HOSTILE = {
    "a PNG of 60,000 pixels a side": png(60_000, 60_000, 8, 2, b""),
    "a PNG whose rows unpack to gigabytes": png(64, 64, 8, 2, bytes(200 << 20)),
    "a PNG whose text unpacks to gigabytes": png(
        8, 8, 8, 2, bytes(8 * 25), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20)))
    ),
    "a JPEG cut short": encoded(gradient(200, 200), "JPEG")[:700],
    "a PNG cut short": encoded(gradient(200, 200), "PNG")[:300],
    "a GIF of no pixels": b"GIF89a" + bytes(7) + b";",
    "an SVG that reads a file": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "a PostScript program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) (r) file\nshowpage\n",
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "nothing": b"",
    "a web page": b"<html><script>alert(1)</script></html>",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_does_not_affect_the_next_image(shared_client: TestClient, kind: str) -> None:
    response = shared_client.post("/api/classify", files=files(HOSTILE[kind], image_bytes(TULIP)))
    assert response.status_code == 200
    first, second = response.json()["predictions"]
    assert "problem" in first or first["top"]
    assert second["top"]
    assert "/etc" not in response.text and "Traceback" not in response.text


BOMB = encoded(np.zeros((4_000, 4_000, 3), np.uint8), "WebP", lossless=True)  # under 1 KB, a quarter of a CPU second


def sent_bombs(port: int, count: int) -> socket.socket:
    """A connection that has sent a request with this many bombs."""
    body = b"".join(PART + BOMB + b"\r\n" for _ in range(count)) + b"--b--\r\n"
    return opened(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def metrics(port: int) -> str:
    return httpx2.get(f"http://127.0.0.1:{port}/metrics").text


def images_answered(port: int) -> float:
    return float((re.search(r'engram_images_total\{outcome="answered"\} (\S+)', metrics(port)) or [0, 0])[1])


def test_a_client_that_decodes_bombs_does_not_delay_others(model: ModelFolder) -> None:
    """If each image of another client waited for a bomb, twelve bombs would be decoded before these twenty images."""
    with (
        listening(model, decoders=2) as port,
        sent_bombs(port, 12),
        httpx2.Client(transport=httpx2.HTTPTransport(local_address="127.0.0.2"), timeout=20) as other,
    ):
        wait_until(lambda: images_answered(port) > 0)
        for _ in range(20):
            assert (
                other.post(f"http://127.0.0.1:{port}/api/classify", files=files(image_bytes(TULIP))).status_code == 200
            )
        assert images_answered(port) - 20 < 8


def test_a_client_has_a_budget_of_cpu_time_for_decoding(serve: Serve) -> None:
    client = serve(decode_budget=0.5, decode_share=0.01)
    response = client.post("/api/classify", files=files(*[BOMB] * 20))
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 1
    assert client.post("/api/classify", files=files(image_bytes(TULIP))).status_code == 429
    decoders = client.app.state.services.decoders  # type: ignore[attr-defined]
    assert not decoders.seconds_to_wait("192.0.2.1")


def test_an_update_has_a_budget_of_cpu_time_for_decoding(serve: Serve) -> None:
    client = serve(update_decode_budget=0.5, decode_share=0.01)
    sent = client.post("/api/teach", files=files(*[BOMB] * 20), data={"classes": ["grey"] * 20})
    assert wait_for_job(client, sent.json()["id"])["state"] == "failed"
    assert client.post("/api/classify", files=files(image_bytes(TULIP))).status_code == 200


def test_decoding_stops_when_the_client_leaves(model: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    with listening(model) as port:
        with sent_bombs(port, 20):
            wait_until(lambda: images_answered(port) > 0)
        wait_until(lambda: 'path="/api/classify",status="400"' in metrics(port))
        left = images_answered(port)
        time.sleep(1)  # enough for several more
        assert images_answered(port) == left < 10
    gc.collect()  # a future whose exception nobody retrieved is logged when it is deleted
    assert not caplog.records


def test_names_with_parent_folders_write_nothing_outside(
    client: TestClient, model: ModelFolder, tmp_path: Path
) -> None:
    before = {path for path in tmp_path.rglob("*") if model.path not in path.parents}
    names = ["../../evil.png", "/evil.png", "..\\evil.png", "a/b/c.png", "C:\\evil.png", "%2e%2e%2fevil.png"]
    sent = [("files", (name, image_bytes(TULIP, number))) for number, name in enumerate(names)]
    climbing = ["../../up", "/root", "a/b", "..", "con", "x\\y"]
    job = client.post("/api/teach", files=sent, data={"classes": climbing})
    assert job.status_code in (202, 422)
    if job.status_code == 202:
        assert wait_for_job(client, job.json()["id"])["state"] in ("done", "failed")
    assert {path for path in tmp_path.rglob("*") if model.path not in path.parents} == before
    assert not Path("/evil.png").exists()
    assert verify(model).intact


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of six megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))


def test_uploads_to_a_full_disk_are_refused(serve: Serve, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    client = serve()
    large = encoded(np.random.default_rng(0).integers(0, 256, (1600, 1600, 3), dtype=np.uint8), "PNG")  # 7.7 MB
    for path, form in (("classify", {}), ("teach", {"data": {"classes": ["grey"]}})):
        response = client.post(f"/api/{path}", files=files(large), **form)
        assert response.status_code == 507
        assert response.headers["x-content-type-options"] == "nosniff"
    assert 'path="/api/teach",status="507"' in client.get("/metrics").text
    assert not list(small_disk.iterdir())
    assert client.post("/api/classify", files=files(image_bytes(TULIP))).status_code == 200


def test_an_edit_on_a_full_disk_is_refused(serve: Serve, model: ModelFolder, small_disk: Path) -> None:
    folder = copied(model, small_disk / "model")
    client = serve(folder)
    fill(small_disk)
    assert client.post("/api/rename", json={"from": TULIP, "to": "tulip"}).status_code == 507
    assert verify(folder).intact


def test_an_update_on_a_full_disk_leaves_the_model_unchanged(
    serve: Serve, model: ModelFolder, small_disk: Path
) -> None:
    folder = copied(model, small_disk / "model")
    client = serve(folder)
    assert wait_for_job(client, client.post("/api/teach", **update_form("ash")).json()["id"])["state"] == "done"
    fill(small_disk)
    job = wait_for_job(client, client.post("/api/teach", **update_form("grey")).json()["id"])
    assert job["state"] == "failed"
    assert str(small_disk) not in job["problem"]
    assert client.get("/readyz").json()["version"] == 3
    assert client.post("/api/classify", files=files(image_bytes(TULIP))).status_code == 200
    (small_disk / "filler").unlink()
    assert verify(folder).intact


def test_wrong_tokens_from_many_threads_are_throttled(model: ModelFolder) -> None:
    token = "a token that nobody guesses"
    request = b"GET /api/model HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer %d\r\n\r\n"
    with listening(model, token=token, token_failures=5) as port:
        statuses: list[bytes] = []

        def guess(number: int) -> None:
            with opened(port, request % number) as connection:
                statuses.append(connection.recv(1000).split()[1])

        threads = [threading.Thread(target=guess, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [b"401"] * 5 + [b"429"] * 15
        assert alive(port)


def test_a_decoder_that_is_killed_is_replaced_and_leaves_no_zombie(client: TestClient) -> None:
    """The dead process is waited for."""
    decoders = client.app.state.services.decoders  # type: ignore[attr-defined]
    for _ in range(3):
        client.post("/api/classify", files=files(image_bytes(TULIP)))
        process = decoders.processes[0].process
        os.kill(process.pid, 9)
        client.post("/api/classify", files=files(image_bytes(TULIP)))
        assert not process.is_alive()
    assert "engram_decoder_restarts_total 3.0" in client.get("/metrics").text


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_token_is_not_in_the_environment_of_a_decoder(model: ModelFolder) -> None:
    """In a new process: the fork server of this one may have been started before."""
    token = "a token that nobody guesses"
    command = [sys.executable, "-c", SERVED, str(model.path)]
    environment = {**os.environ, "ENGRAM_TOKEN": token}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        given = Path(f"/proc/{int(server.stdout.readline())}/environ").read_bytes()
        server.stdin.close()
    assert b"PATH=" in given
    assert token.encode() not in given


SERVED = """
import sys
from pathlib import Path
from engram.model import ModelFolder
from engram.server import Config, make_server
from engram.server.app import PRELOADED
from engram.data.images import UnreadableImage

if __name__ == "__main__":
    PRELOADED.remove("engram.server.updating")  # it takes seconds to import
    decoders = make_server(ModelFolder(Path(sys.argv[1])), Config(decoders=1)).config.app.state.services.decoders
    try:
        decoders.decode(b"none", 8)
    except UnreadableImage:
        print(decoders.processes[0].process.pid, flush=True)
    sys.stdin.read()
    decoders.close()
"""
