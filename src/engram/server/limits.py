"""Limits on requests: their number, the size of their bodies, and the time to receive them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from engram.server.config import Config
from engram.server.connections import CLOSE, address_of
from engram.server.problems import Problem, too_many

UPLOADS = ("/api/classify", "/api/evaluate", "/api/teach")
HEALTH = ("/readyz", "/metrics")  # answered even if the server is busy, as /livez is


class RequestLimits:
    """Limits the requests in progress and the bytes and seconds of their bodies.

    uvicorn's `limit_concurrency` would also refuse health checks, and Starlette's `RequestBodyLimitMiddleware` limits
    neither time nor the bytes of all bodies together.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.in_progress: Counter[str] = Counter()
        self.body_bytes = 0

    @contextmanager
    def admit(self, scope: Scope, receive: Receive) -> Iterator[Receive]:
        """Count a request while it is in progress; yields a `receive` that limits its body."""
        is_upload = scope["path"] in UPLOADS
        limit = self.config.body_bytes if is_upload else self.config.json_bytes
        headers = Headers(scope=scope)  # h11 accepts only one Content-Length, of at most 20 digits
        if "content-length" in headers and "transfer-encoding" in headers:  # RFC 9112, 6.1; the connection is closed
            raise Problem(400, "A request must not have both Content-Length and Transfer-Encoding.")
        if int(headers.get("content-length", 0)) > limit:
            raise _too_large(limit)
        places = self._places(scope)
        if any(self.in_progress[place] >= most for place, most in places.items()):
            raise _busy()
        body = _Body(self, receive, limit, self.config.body_seconds if is_upload else self.config.json_seconds)
        self.in_progress.update(places.keys())
        try:
            yield body.receive
        finally:
            self.in_progress.subtract(places.keys())
            self.in_progress = +self.in_progress
            self.body_bytes -= body.received

    def _places(self, scope: Scope) -> dict[str, int]:
        """What a request counts as, with the limit of each. Nobody can take the places of those who have the token."""
        if scope["path"] == "/livez":
            return {}
        if scope["path"] in HEALTH:
            return {f"health {address_of(scope)}": self.config.health_requests}
        anonymous = {} if scope["state"]["authenticated"] else {"anonymous": self.config.anonymous_requests}
        return {"requests": self.config.requests, **anonymous}


class _Body:
    """The body of one request. Counts the bytes received, whatever Content-Length says."""

    def __init__(self, limits: RequestLimits, receive: Receive, limit: int, seconds: float) -> None:
        self.limits, self.limit, self._receive = limits, limit, receive
        self.received = 0
        self.complete = False
        self.deadline = time.monotonic() + seconds

    async def receive(self) -> Message:
        if self.complete:  # the next message is a disconnect
            return await self._receive()
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise Problem(408, "The request took too long to arrive. Send less at a time.", CLOSE) from None
        size = len(message.get("body", b""))
        self.received += size
        self.limits.body_bytes += size
        self.complete = not message.get("more_body", False)
        if self.received > self.limit:
            raise _too_large(self.limit)
        is_only_body = self.limits.body_bytes == self.received
        if self.limits.body_bytes > self.limits.config.all_body_bytes and not is_only_body:
            raise _busy()
        return message


def _busy() -> Problem:
    return too_many("The server is busy. Try again in a moment.", 1, CLOSE)


def _too_large(limit: int) -> Problem:
    return Problem(413, f"A request may have {limit:,} bytes at most. Send fewer or smaller images at a time.", CLOSE)
