"""How much requests may bring, alone and together, how long that may take, and how many may be under way."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.server.config import Config
from engram.server.problems import Problem, problem_response, too_many

WITH_PICTURES = ("/api/classify", "/api/teach")
HEALTH = ("/livez", "/readyz", "/metrics")  # answered however busy the server is
CLOSE = {"Connection": "close"}  # what is left of the body is not read


class Limits:
    """Counts bytes as they come, whatever the headers say of them."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self.app, self.config = app, config
        self.under_way = 0
        self.strangers = 0  # of them from whoever has shown no token: they must not take the places of those who have
        self.held = 0  # bytes of their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what is too much."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        most = self.config.body_bytes if scope["path"] in WITH_PICTURES else self.config.json_bytes
        refusal = self._refusal(scope, most)
        if refusal is not None:
            await problem_response(refusal)(scope, receive, send)
            return
        pictures, stranger = scope["path"] in WITH_PICTURES, self._is_stranger(scope)
        body = _Body(self, receive, most, self.config.body_seconds if pictures else self.config.json_seconds)
        self.under_way += 1
        self.strangers += stranger
        try:
            await self.app(scope, body.receive, send)
        finally:
            self.under_way -= 1
            self.strangers -= stranger
            self.held -= body.taken

    def _refusal(self, scope: Scope, most: int) -> Problem | None:
        length = Headers(scope=scope).get("content-length", "0")
        if not (length.isascii() and length.isdecimal()) or len(length) > 18:
            return Problem(400, "The header Content-Length is not a number.", CLOSE)
        if int(length) > most:
            return _too_large(most)
        full = self.under_way >= self.config.requests
        if self._is_stranger(scope):
            full = full or self.strangers >= self.config.strangers
        if full and scope["path"] not in HEALTH:
            return _busy()
        return None

    @staticmethod
    def _is_stranger(scope: Scope) -> bool:
        """Whether a token is needed, and this request has shown none; `Security`, which stands before, has looked."""
        return not scope.get("state", {}).get("authenticated", True)


class _Body:
    """The body of one request, as it arrives."""

    def __init__(self, limits: Limits, receive: Receive, most: int, seconds: float) -> None:
        self.limits, self.most, self._receive = limits, most, receive
        self.taken = 0
        self.whole = False
        self.deadline = time.monotonic() + seconds

    async def receive(self) -> Message:
        if self.whole:  # what comes now is that the client has gone
            return await self._receive()
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise Problem(408, "The request took too long to arrive. Send less at a time.", CLOSE) from None
        size = len(message.get("body", b""))
        self.taken += size
        self.limits.held += size
        self.whole = not message.get("more_body", False)
        if self.taken > self.most:
            raise _too_large(self.most)
        if self.limits.held > self.limits.config.bodies_bytes and self.limits.held > self.taken:
            raise _busy()
        return message


def _busy() -> Problem:
    return too_many("The server has its hands full. Try again in a moment.", 1, CLOSE)


def _too_large(most: int) -> Problem:
    return Problem(413, f"A request may bring {most:,} bytes at most. Send fewer or smaller pictures at a time.", CLOSE)
