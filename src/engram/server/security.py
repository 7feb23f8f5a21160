"""Who may use the server: the names it is called by, where requests come from, tokens and sessions."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.server.config import Config
from engram.server.problems import Problem, problem_response, too_many

COOKIE = "engram_session"
OPEN = ("/", "/livez", "/readyz", "/api/session", "/favicon.ico")  # for everyone: they tell nothing of the model
SAFE = ("GET", "HEAD", "OPTIONS")
MOST_ADDRESSES = 10_000  # that are remembered to have sent wrong tokens
MOST_SESSIONS = 1_000
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
NEEDS_TOKEN = Problem(
    401, "A token is needed. Send it as 'Authorization: Bearer TOKEN', or sign in.", {"WWW-Authenticate": "Bearer"}
)


class Guard:
    """Knows the token, and the sessions that were begun with it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._digest = None if config.token is None else _digest(config.token)
        self._sessions: dict[str, float] = {}  # the digest of each, and until when it lasts
        self._failures: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    @property
    def token_required(self) -> bool:
        """Whether a token is needed at all."""
        return self._digest is not None

    def check_token(self, token: str, address: str) -> None:
        """Refuse a token that is wrong, and any from an address that has sent too many of those."""
        now = time.monotonic()
        with self._lock:
            recent = [at for at in self._failures.get(address, []) if now - at < self.config.failure_seconds]
            if len(recent) >= self.config.failures:
                wait = self.config.failure_seconds - (now - recent[0])
                raise too_many("Too many wrong tokens came from here. Wait before you try again.", wait)
            if self._digest is not None and hmac.compare_digest(_digest(token), self._digest):
                return
            if len(self._failures) >= MOST_ADDRESSES:
                self._failures.pop(next(iter(self._failures)))
            self._failures[address] = [*recent, now]
        raise Problem(401, "The token is wrong.", {"WWW-Authenticate": "Bearer"})

    def begin(self) -> str:
        """A new session."""
        session = secrets.token_urlsafe(32)
        now = time.monotonic()
        with self._lock:
            self._sessions = {each: end for each, end in self._sessions.items() if end > now}
            if len(self._sessions) >= MOST_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[_digest(session)] = now + self.config.session_seconds
        return session

    def has(self, session: str | None) -> bool:
        """Whether a session was begun, and lasts."""
        with self._lock:
            return session is not None and self._sessions.get(_digest(session), 0.0) > time.monotonic()

    def end(self, session: str | None) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(_digest(session or ""), None)


@dataclass(frozen=True)
class Security:
    """Stands before everything else."""

    app: ASGIApp
    guard: Guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what may not be asked; put the headers on every answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
        except Problem as problem:
            problem.headers = {**(problem.headers or {}), "Connection": "close"}  # its body is not read
            await problem_response(problem)(scope, receive, with_headers)
            return
        await self.app(scope, receive, with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = _only(headers, "host")
        if _name(host) not in self.guard.config.known_hosts:
            raise Problem(421, "The server is not known by this name. Whoever runs it can allow it with --allow-host.")
        origin = _only(headers, "origin")
        if origin is not None and not _same(origin, host):
            raise Problem(403, "Requests from other sites are refused.")
        if headers.get("sec-fetch-site") == "cross-site" and scope["method"] not in SAFE:
            raise Problem(403, "Requests from other sites are refused.")
        session = session_of(headers)
        signed_in = self.guard.has(session)
        scope.setdefault("state", {})["authenticated"] = signed_in or not self.guard.token_required
        if not self.guard.token_required:
            return
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and token:
            client = scope.get("client")
            self.guard.check_token(token.strip(), client[0] if client else "")
            scope["state"]["authenticated"] = True
            return
        if scope["path"] in OPEN or scope["path"].startswith("/static/"):
            if signed_in:
                _check_own(scope["method"], headers, origin)
            return
        if not signed_in:
            raise NEEDS_TOKEN
        _check_own(scope["method"], headers, origin)


def session_of(headers: Headers) -> str | None:
    """The session that a request says it belongs to."""
    return cookie_parser(headers.get("cookie", "")).get(COOKIE)


def cookie(session: str, *, secure: bool, seconds: float) -> str:
    """The header that begins a session, or with 0 seconds ends it."""
    parts = [f"{COOKIE}={session}", "HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={round(seconds)}"]
    return "; ".join(parts + ["Secure"] * secure)


def _check_own(method: str, headers: Headers, origin: str | None) -> None:
    """A cookie goes along by itself: that our own page asks has to be said too. (Its Origin was compared before.)"""
    if method not in SAFE and origin is None and headers.get("sec-fetch-site") != "same-origin":
        raise Problem(403, "A change by a session has to say where it comes from. Send an Origin header, or the token.")


def _only(headers: Headers, name: str) -> str | None:
    """A header that may be there once."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise Problem(400, f"The header {name} may be there once.")
    return values[0] if values else None


def _name(host: str | None) -> str | None:
    """The name in a Host header, without the port."""
    try:
        parts = urlsplit(f"//{host or ''}")
        _ = parts.port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname


def _same(origin: str, host: str | None) -> bool:
    scheme, separator, place = origin.partition("://")
    return scheme in ("http", "https") and bool(separator) and place.lower() == (host or "").lower()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
