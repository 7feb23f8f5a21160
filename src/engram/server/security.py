"""Access control: host names, origins, tokens and sessions."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Scope

from engram.server.config import Config
from engram.server.connections import address_of
from engram.server.problems import Problem, too_many

COOKIE = "engram_session"
PUBLIC = ("/", "/livez", "/readyz", "/api/session", "/favicon.ico")  # they reveal nothing about the model
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
BEARER = {"WWW-Authenticate": "Bearer"}
MAX_ADDRESSES = 10_000  # with wrong tokens, to remember
MAX_SESSIONS = 1_000


class Authenticator:
    """Decides who may send requests. Stores only digests of the token and of sessions."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.token_required = config.token is not None
        self._token = _digest(config.token or "")
        self._sessions: dict[str, float] = {}  # digest → when it expires
        self._failures: dict[str, list[float]] = {}  # address → when it sent wrong tokens
        self._lock = threading.Lock()

    def check_token(self, token: str, address: str) -> None:
        """Refuse a wrong token, and any token from an address that has sent too many wrong ones."""
        now = time.monotonic()
        with self._lock:
            recent = [then for then in self._failures.get(address, []) if now - then < self.config.block_seconds]
            if len(recent) >= self.config.token_failures:
                wait = self.config.block_seconds - (now - recent[0])
                raise too_many("Too many wrong tokens from this address. Try again later.", wait)
            if self.token_required and hmac.compare_digest(_digest(token), self._token):
                return
            if len(self._failures) >= MAX_ADDRESSES:
                self._failures.pop(next(iter(self._failures)))
            self._failures[address] = [*recent, now]
        raise Problem(401, "The token is wrong.", BEARER)

    def start_session(self) -> str:
        session, now = secrets.token_urlsafe(32), time.monotonic()
        with self._lock:
            self._sessions = {digest: end for digest, end in self._sessions.items() if end > now}
            if len(self._sessions) >= MAX_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[_digest(session)] = now + self.config.session_seconds
        return session

    def has_session(self, session: str) -> bool:
        with self._lock:
            return self._sessions.get(_digest(session), 0.0) > time.monotonic()

    def end_session(self, session: str) -> None:
        with self._lock:
            self._sessions.pop(_digest(session), None)

    def check(self, scope: Scope) -> None:
        """Refuse a request that is not allowed, before its body is read; note whether it is authenticated."""
        headers = Headers(scope=scope)
        self._check_host_and_origin(scope["method"], headers)
        scope.setdefault("state", {})["authenticated"] = not self.token_required or self._authenticates(scope, headers)

    def _check_host_and_origin(self, method: str, headers: Headers) -> None:
        """Starlette's TrustedHostMiddleware answers 400 in plain text, not 421 as a problem document."""
        if len(headers.getlist("origin")) > 1:
            raise Problem(400, "The header Origin must not be repeated.")
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d*)?", host)
        if match is None or (match[1] or match[2]) not in self.config.known_hosts:
            raise Problem(421, "This host name is not allowed. The server's operator can add it with --allow-host.")
        foreign = origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}")
        if foreign or (headers.get("sec-fetch-site") == "cross-site" and method not in SAFE_METHODS):
            raise Problem(403, "Requests from other sites are refused.")

    def _authenticates(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request has the token or a session; only public paths need neither."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and token:
            self.check_token(token.strip(), address_of(scope))
            return True
        if not self.has_session(HTTPConnection(scope).cookies.get(COOKIE, "")):
            if scope["path"] not in PUBLIC and not scope["path"].startswith("/static/"):
                raise Problem(401, "A token is required. Send 'Authorization: Bearer TOKEN', or sign in.", BEARER)
            return False
        # Browsers send cookies along by themselves, so a change needs proof that it comes from our own page.
        proven = "origin" in headers or headers.get("sec-fetch-site") == "same-origin"
        if scope["method"] not in SAFE_METHODS and not proven:
            raise Problem(403, "A change by a session needs an Origin header. Send one, or the token.")
        return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
