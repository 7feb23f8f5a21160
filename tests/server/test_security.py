"""Host names, origins, tokens, sessions and proxies."""

from __future__ import annotations

import errno
import re
from unittest.mock import Mock

import httpx2
import pytest
from models_made import TULIP
from server_made import Serve, files, image_bytes, listening
from starlette.testclient import TestClient

from engram.errors import UsageError
from engram.model import ModelFolder
from engram.server import Config

TOKEN = "a token that nobody guesses"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HERE = {"Origin": "http://localhost"}
RENAME = {"from": TULIP, "to": "tulip"}


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil@localhost", "localhost:x", "", "127.0.0.1.nip.io", "[::1"]
)
def test_an_unknown_host_is_refused(shared_client: TestClient, host: str) -> None:
    for path in ("/", "/livez", "/api/model", "/made/up"):
        response = shared_client.get(path, headers={"Host": host})
        assert response.status_code == 421, path
        assert response.headers["content-type"] == "application/problem+json"


def test_allowed_hosts_are_accepted(serve: Serve) -> None:
    client = serve(hosts=("pi.local", "fe80::1", "192.168.1.5"))
    addresses = ("[::1]:8000", "[fe80::1]:8000", "192.168.1.5:8000")
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "pi.local:80", *addresses):
        assert client.get("/livez", headers={"Host": host}).status_code == 200, host


@pytest.mark.parametrize("host", ["pi.local:8127", "http://pi.local", "pi.local/", "[fe80::1]", "a@pi.local", "*", ""])
def test_an_invalid_allowed_host_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"'{host}'")):
        Config(hosts=(host,))


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:9", "ftp://localhost", "localhost"]
)
def test_a_foreign_origin_is_refused(shared_client: TestClient, origin: str) -> None:
    for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT"):
        response = shared_client.request(method, "/api/model", headers={"Origin": origin})
        assert response.status_code == 403, method
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_cross_site_change_without_an_origin_is_refused(client: TestClient) -> None:
    response = client.post("/api/rename", json=RENAME, headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 403
    assert client.post("/api/rename", json=RENAME, headers=HERE).status_code == 200


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        *((path, None) for path in ("/", "/livez", "/api/model", "/made/up", "/static/none")),
        *(("/api/model", failure) for failure in (RuntimeError("defect"), OSError(errno.ENOSPC, "full"))),
    ],
)
def test_every_response_has_security_headers(
    shared_client: TestClient, path: str, failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if failure is not None:
        monkeypatch.setattr("engram.server.api.inspect", Mock(side_effect=failure))
    headers = shared_client.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"


PROTECTED = [
    ("GET", "/api/model"),
    ("GET", "/api/jobs"),
    ("GET", "/api/jobs/x"),
    ("DELETE", "/api/jobs/x"),
    ("POST", "/api/classify"),
    ("POST", "/api/teach"),
    ("POST", "/api/forget"),
    ("POST", "/api/rename"),
    ("POST", "/api/merge"),
    ("POST", "/api/rollback"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "//api/model"),
    ("GET", "/static"),
]


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "engram_session=made-up"}])
def test_protected_routes_require_the_token(serve: Serve, header: dict[str, str]) -> None:
    client = serve(token=TOKEN, token_failures=len(PROTECTED))
    for method, path in PROTECTED:
        assert client.request(method, path, headers=header).status_code == 401, (method, path)


def test_the_token_opens_every_route(serve: Serve) -> None:
    client = serve(token=TOKEN)
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 200
    assert client.get("/api/model", headers=BEARER).status_code == 200
    assert client.get("/metrics", headers=BEARER).status_code == 200
    assert client.post("/api/classify", files=files(image_bytes(TULIP)), headers=BEARER).status_code == 200
    assert client.post("/api/rename", json=RENAME, headers=BEARER).status_code == 200


def test_a_browser_signs_in_and_out(serve: Serve) -> None:
    client = serve(token=TOKEN)
    assert client.get("/api/session").json() == {"authenticated": False, "token_required": True, "model": None}
    assert client.post("/api/session", json={"token": "wrong"}).status_code == 401
    begun = client.post("/api/session", json={"token": TOKEN}, headers=HERE)
    assert begun.status_code == 204
    cookie = begun.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    session = cookie.partition(";")[0]
    assert client.get("/api/session").json() == {"authenticated": True, "token_required": True, "model": "secret-place"}
    assert client.get("/api/model").status_code == 200
    assert client.delete("/api/session", headers=HERE).status_code == 204
    assert client.get("/api/model", headers={"Cookie": session}).status_code == 401


def test_a_change_by_a_session_needs_its_origin(serve: Serve) -> None:
    client = serve(token=TOKEN)
    client.post("/api/session", json={"token": TOKEN}, headers=HERE)
    assert client.post("/api/rename", json=RENAME).status_code == 403
    assert client.delete("/api/session").status_code == 403
    for site in ("cross-site", "same-site", "none"):
        assert client.post("/api/rename", json=RENAME, headers={"Sec-Fetch-Site": site}).status_code == 403
    assert client.post("/api/rename", json=RENAME, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_server_without_a_token_needs_no_session(shared_client: TestClient) -> None:
    session = shared_client.get("/api/session").json()
    assert session == {"authenticated": True, "token_required": False, "model": "secret-place"}


def test_wrong_tokens_block_an_address(serve: Serve) -> None:
    client = serve(token=TOKEN, token_failures=3)
    wrong = [client.post("/api/session", json={"token": "wrong"}).status_code for _ in range(4)]
    assert wrong == [401, 401, 401, 429]
    response = client.get("/api/model", headers=BEARER)
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60


def test_a_session_expires(serve: Serve) -> None:
    client = serve(token=TOKEN, session_seconds=0.0)
    cookie = client.post("/api/session", json={"token": TOKEN}, headers=HERE).headers["set-cookie"]
    assert client.get("/api/model", headers={"Cookie": cookie.partition(";")[0]}).status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_public_address_requires_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="--token-file"):
        Config(host=host)
    assert Config(host=host, token=TOKEN)


def test_a_short_token_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 16"):
        Config(token="secret")


@pytest.mark.parametrize(("trusted", "secure"), [("127.0.0.1", True), ("10.1.2.3", False)])
def test_only_a_trusted_proxy_sets_scheme_and_address(model: ModelFolder, trusted: str, secure: bool) -> None:
    with listening(model, trusted_proxy=trusted, token=TOKEN) as port:
        headers = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.7"}
        response = httpx2.post(f"http://127.0.0.1:{port}/api/session", json={"token": TOKEN}, headers=headers)
        assert ("Secure" in response.headers["set-cookie"]) is secure
        for _ in range(20):
            httpx2.get(f"http://127.0.0.1:{port}/api/model", headers={**headers, "Authorization": "Bearer wrong"})
        # Behind a proxy, a client that guesses does not block the others.
        others = httpx2.get(
            f"http://127.0.0.1:{port}/api/model", headers={**headers, **BEARER, "X-Forwarded-For": "192.0.2.8"}
        )
        assert others.status_code == (200 if secure else 429)


@pytest.mark.parametrize("proxy", ["proxy.local", "*", "10.0.0.2,*", ""])
def test_a_proxy_without_an_ip_address_is_refused(proxy: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"'{proxy}'")):
        Config(trusted_proxy=proxy)


@pytest.mark.parametrize("token", ["0123456789abcdef\t", "0123456789abcdef\n0123456789abcdef"])
def test_a_token_that_does_not_fit_a_header_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="ASCII"):
        Config(token=token)
