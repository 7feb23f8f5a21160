"""How much a request may bring, how long that may take, and how many may be under way."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.server.config import Config
from engram.server.problems import Problem, problem_response

WITH_PICTURES = ("/api/classify", "/api/teach")
HEALTH = ("/livez", "/readyz", "/metrics")  # answered however busy the server is


class Limits:
    """Counts bytes as they come, whatever the headers say of them."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self.app, self.config = app, config
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what is too much."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        config = self.config
        most = config.body_bytes if scope["path"] in WITH_PICTURES else config.json_bytes
        length = Headers(scope=scope).get("content-length", "0")
        refusal = None
        if not (length.isascii() and length.isdecimal()) or len(length) > 18:
            refusal = Problem(400, "The header Content-Length is not a number.", {"Connection": "close"})
        elif int(length) > most:
            refusal = _too_large(most)
        elif self.under_way >= config.requests and scope["path"] not in HEALTH:
            busy = "The server has its hands full. Try again in a moment."
            refusal = Problem(503, busy, {"Retry-After": "1", "Connection": "close"})
        if refusal is not None:
            await problem_response(refusal)(scope, receive, send)
            return
        self.under_way += 1
        try:
            await self.app(scope, self._counted(receive, most), send)
        finally:
            self.under_way -= 1

    def _counted(self, receive: Receive, most: int) -> Receive:
        deadline = time.monotonic() + self.config.body_seconds
        taken, whole = 0, False

        async def counted() -> Message:
            nonlocal taken, whole
            if whole:  # what comes now is that the client has gone
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise Problem(408, "The request took too long to arrive. Send less at a time.", CLOSE) from None
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > most:
                raise _too_large(most)
            return message

        return counted


CLOSE = {"Connection": "close"}


def _too_large(most: int) -> Problem:
    return Problem(413, f"A request may bring {most:,} bytes at most. Send fewer or smaller pictures at a time.", CLOSE)
