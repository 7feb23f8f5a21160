"""Limits on requests, on real connections where headers can lie."""

from __future__ import annotations

import http.client
import resource
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from images_made import chunk, png
from models_made import TULIP
from server_made import (
    HEAD,
    PART,
    Serve,
    files,
    image_bytes,
    listening,
    not_loading,
    opened,
    update_form,
    wait_for_job,
    wait_until,
)
from starlette.testclient import TestClient

from engram.model import ModelFolder
from engram.server import Config, make_server


def exchange(port: int, header: str, *body: bytes) -> bytes:
    """The response to these bytes; the server may close the connection before all are sent."""
    response = b""
    with opened(port, HEAD + f"{header}\r\n\r\n".encode()) as connection:
        with suppress(OSError):
            for part in body:
                connection.sendall(part)
        with suppress(OSError):
            while b"}" not in response and (received := connection.recv(65536)):
                response += received
    return response


def test_a_content_length_above_the_limit_is_refused_at_once(model: ModelFolder) -> None:
    with listening(model, body_bytes=10_000) as port:
        response = exchange(port, "Content-Length: 99999999")
        assert b" 413 " in response and b"10,000" in response


def test_an_endless_body_in_chunks_is_cut_off(model: ModelFolder) -> None:
    with listening(model, body_bytes=100_000) as port:
        more = b"%x\r\n%s\r\n" % (10_000, bytes(10_000))
        response = exchange(port, "Transfer-Encoding: chunked", b"%x\r\n%s\r\n" % (len(PART), PART), *[more] * 1_000)
        assert b" 413 " in response


def test_a_body_shorter_than_its_content_length_times_out(model: ModelFolder) -> None:
    with listening(model, body_seconds=0.5) as port:
        begin = time.monotonic()
        response = exchange(port, "Content-Length: 5000", PART)
        assert b" 408 " in response
        assert time.monotonic() - begin < 10


def test_a_body_longer_than_its_content_length_is_a_malformed_form(model: ModelFolder) -> None:
    with listening(model) as port:
        response = exchange(port, "Content-Length: 20\r\nConnection: close", PART, bytes(1000))
        assert b" 400 " in response or b" 422 " in response


def test_too_many_files_are_refused(serve: Serve) -> None:
    client = serve(files=3)
    assert client.post("/api/classify", files=files(*[image_bytes(TULIP)] * 3)).status_code == 200
    for count in (4, 5, 50):
        response = client.post("/api/classify", files=files(*[b"x"] * count))
        assert response.status_code == 413
        assert "3" in response.json()["detail"]


def test_a_file_that_is_too_large_is_refused(serve: Serve) -> None:
    assert serve(file_bytes=1000).post("/api/classify", files=files(bytes(1001))).status_code == 413


def test_a_json_body_has_a_small_limit(serve: Serve) -> None:
    response = serve(json_bytes=1000).post("/api/forget", json={"classes": ["x" * 100] * 20})
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"content": b"{}", "headers": {"Content-Type": "application/json"}}, 415),
        ({"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400),
        ({"content": b"", "headers": {"Content-Type": "multipart/form-data"}}, 400),
        ({"files": [("other", ("a.png", b"x"))]}, 422),
        ({"data": {"files": "text"}, "files": [("other", ("a.png", b"x"))]}, 422),
    ],
)
def test_an_invalid_form_is_a_problem(shared_client: TestClient, form: dict[str, Any], status: int) -> None:
    for path in ("/api/classify", "/api/teach"):
        response = shared_client.post(path, **form)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "classes",
    [
        ["a"],
        ["a", "b", "c"],
        ["a", ""],
        ["a", "x" * 301],
        ["a", "x" * 10_001],
        ["a", "\u200f"],
        ["a", "b\u2028c"],
        ["a", "A"],
        ["a", "b\x07"],
    ],
)
def test_every_file_needs_a_valid_class_name(shared_client: TestClient, classes: list[str]) -> None:
    response = shared_client.post("/api/teach", files=files(b"x", b"y"), data={"classes": classes})
    assert response.status_code == 422
    assert shared_client.get("/api/jobs").json() == {"jobs": []}


def test_an_image_of_too_many_pixels_is_not_decoded(serve: Serve) -> None:
    bomb = png(60_000, 60_000, 8, 2, b"")
    begin = time.monotonic()
    (response,) = serve().post("/api/classify", files=files(bomb)).json()["predictions"]
    assert "60,000" in response["problem"]
    assert time.monotonic() - begin < 20


def test_a_decoder_that_exceeds_its_memory_is_replaced(serve: Serve) -> None:
    client = serve(decode_bytes=1 << 20)
    rows = b"".join(b"\0" + bytes(3 * 4000) for _ in range(4000))
    large = png(4000, 4000, 8, 2, rows)
    for _ in range(2):
        (response,) = client.post("/api/classify", files=files(large)).json()["predictions"]
        assert response["problem"]
    (response,) = client.post("/api/classify", files=files(image_bytes(TULIP))).json()["predictions"]
    assert response["top"]


def test_requests_above_the_limit_get_retry_after(serve: Serve) -> None:
    client = serve(requests=1)
    assert client.get("/api/jobs").status_code == 200
    limits = client.app.state.services.limits  # type: ignore[attr-defined]
    limits.in_progress["requests"] = 1
    response = client.get("/api/jobs")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert client.get("/livez").status_code == 200
    limits.in_progress.clear()


def test_health_checks_do_not_take_the_places_of_other_requests(serve: Serve, tmp_path: Path) -> None:
    """40 of them wait while a first model is looked for."""
    client = serve(ModelFolder(tmp_path / "none"), token="t" * 16)
    with ThreadPoolExecutor(40) as threads:
        with not_loading(client):
            checks = [threads.submit(client.get, "/readyz") for _ in range(40)]
            wait_until(lambda: sum(check.done() for check in checks) >= 32)
            response = client.get("/api/jobs", headers={"Authorization": f"Bearer {'t' * 16}"})
            assert response.status_code == 200
            assert client.get("/livez").status_code == 200
        assert Counter(check.result().status_code for check in checks) == {429: 32, 503: 8}


SLOW = b"POST /api/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"


def test_clients_without_the_token_cannot_take_all_places(model: ModelFolder) -> None:
    def asked(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection("localhost", port, timeout=20)
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status

    token = "t" * 16
    with listening(model, token=token, requests=3, anonymous_requests=2) as port, ExitStack() as held:
        for _ in range(4):
            held.enter_context(opened(port, SLOW % b"session"))
        wait_until(lambda: asked("/") == 429)
        assert asked("/api/model", authorization=f"Bearer {token}") == 200


def test_a_json_body_has_a_short_time_limit(model: ModelFolder) -> None:
    with listening(model, json_seconds=0.3) as port, opened(port, SLOW % b"rename") as connection:
        assert b" 408 " in connection.recv(65536)


def test_an_update_skips_a_decompression_bomb(client: TestClient) -> None:
    sent = update_form("grey", 6)
    sent["files"].append(("files", ("bomb.png", png(60_000, 60_000, 8, 2, b"", chunk(b"tEXt", b"a\0b")))))
    sent["data"]["classes"].append("grey")
    job = wait_for_job(client, client.post("/api/teach", **sent).json()["id"])
    assert job["state"] == "done"
    assert [left["path"] for left in job["result"]["skipped"]] == ["bomb.png"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"from": "\\ud800", "to": "x"}',
        b'{"from": "x", "to": "\\ud800\\u0000"}',
        b'{"from": ' + b"[" * 30_000,
        b'{"from": ' + b"9" * 30_000 + b"}",
        b'{"from": "a", "from": NaN}',
        b"\xff\xfe",
        b"",
        b"null",
    ],
)
def test_invalid_json_is_a_problem(shared_client: TestClient, body: bytes) -> None:
    for path in ("rename", "rollback", "session"):
        response = shared_client.post(f"/api/{path}", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (400, 422)
        assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("query", ["top=0", "top=-1", "top=x", "reject=nan", "reject=inf", "reject=2", "top=1e9"])
def test_a_query_out_of_range_is_a_problem(shared_client: TestClient, query: str) -> None:
    assert shared_client.post(f"/api/classify?{query}", files=files(image_bytes(TULIP))).status_code == 422


def test_file_names_in_responses_are_printable(shared_client: TestClient) -> None:
    sent = [("files", (name, b"x")) for name in ("../../etc/passwd", "a\x1b[31m.png", "ä" * 500, "<b>.png")]
    names = [each["name"] for each in shared_client.post("/api/classify", files=sent).json()["predictions"]]
    assert all(name.isprintable() and len(name) <= 200 for name in names)
    assert names[3] == "<b>.png"


def test_connections_and_uploads_may_all_be_open_at_once(model: ModelFolder) -> None:
    """An uploaded file above 1 MB is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this process may open few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        make_server(model, Config(connections=512, all_body_bytes=1 << 30)).config.app.state.services.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512 + 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_server_starts_without_heavy_libraries() -> None:
    """Its own processes import them when they are needed, such as for a network of the Hugging Face hub."""
    heavy = ("faiss", "matplotlib", "onnx", "ray", "scipy", "sklearn", "torchvision", "transformers")
    code = f"import sys, engram.server; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
