"""Limits on connections and requests: their number, from one address and in all, their size and their time."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from engram.errors import EngramError
from engram.server.config import Config
from engram.server.problems import MESSAGES, Problem, problem_response, too_many

BACKLOG = 4_096  # connections that wait in the kernel
REFUSALS = 100  # in one turn of the event loop, so that a flood does not hold up requests
MAX_KNOWN = 10_000  # addresses that have authenticated
CLOSE = {"Connection": "close"}  # the rest of the body is not read
UPLOADS = ("/api/classify", "/api/evaluate", "/api/teach")
HEALTH = ("/readyz", "/metrics")  # answered even if the server is busy, as /livez is


def peer(host: str) -> str:
    """The host behind an address: over IPv6, a host owns a whole /64 network."""
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:  # IPv4, or what a proxy made up
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address), 64), strict=False))


def address_of(scope: Scope) -> str:
    """The peer that sent a request, behind a trusted proxy too; empty if unknown."""
    return peer(scope["client"][0]) if scope.get("client") else ""


class Connections:
    """The open connections by address, and the addresses that have authenticated."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.open: Counter[str] = Counter()
        self.total = 0
        self._known: dict[str, None] = {}

    def admit(self, address: str) -> bool:
        """Whether an address may have one more connection, which is then counted until `release`."""
        who, limits = peer(address), self.config
        mine, left = self.open[who], limits.connections - self.total
        reserved = left <= limits.reserved_connections and mine > 0 and who not in self._known
        if left <= 0 or reserved or (mine >= limits.address_connections and not limits.is_proxy(address)):
            return False
        self.open[who] += 1
        self.total += 1
        return True

    def release(self, address: str) -> None:
        who = peer(address)
        self.open[who] -= 1
        self.total -= 1
        if not self.open[who]:
            del self.open[who]

    def authenticated(self, who: str) -> None:
        """Give a peer a claim to the reserved connections."""
        if who not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[who] = None


class ListeningSocket(socket.socket):
    """Closes connections that are not admitted before asyncio makes a transport and a protocol, ten times as slow."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        for _ in range(REFUSALS):
            accepted, address = super().accept()
            if self.connections.admit(address[0]):
                return _CountedSocket(accepted.detach(), partial(self.connections.release, address[0])), address
            accepted.close()
        raise BlockingIOError  # asyncio calls again after the other events of this turn


class _CountedSocket(socket.socket):
    """Calls `release` once, when it is closed or deleted."""

    def __init__(self, fileno: int, release: Callable[[], None]) -> None:
        super().__init__(fileno=fileno)
        self._release = weakref.finalize(self, release)

    def close(self) -> None:
        self._release()
        super().close()


class HTTPServer(uvicorn.Server):
    """uvicorn on sockets that limit connections: its `limit_concurrency` leaves idle ones open and knows no address."""

    def __init__(self, app: FastAPI, config: Config, connections: Connections) -> None:
        self.connections = connections
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                loop="asyncio",  # uvloop does not call `accept`
                http=partial(TimedProtocol, limits=config),  # type: ignore[arg-type]
                ws="none",
                log_level="warning",
                server_header=False,
                proxy_headers=config.trusted_proxy is not None,
                forwarded_allow_ips=config.trusted_proxy or "",
                backlog=BACKLOG,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=10,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets or list(self._listen()))
        except OSError as error:
            raise EngramError(
                f"Cannot listen at {self.config.host}, port {self.config.port}: {error.strerror}. "
                "Choose another with --host or --port."
            ) from error

    def _listen(self) -> Iterator[socket.socket]:
        """One socket for each address of the host, as `asyncio.loop.create_server` makes them."""
        for family, *_, address in socket.getaddrinfo(self.config.host, self.config.port, type=socket.SOCK_STREAM):
            with socket.create_server(address[:2], family=family, backlog=BACKLOG) as bound:
                listener = ListeningSocket(fileno=bound.detach())
            listener.connections = self.connections
            yield listener


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that drops clients who send a request's head too slowly or do not read responses.

    uvicorn has no such timeouts: `timeout_keep_alive` starts after the first response.
    """

    def __init__(self, *arguments: Any, limits: Config, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.limits = limits
        self.head_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.head_timer, self.write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_timer = self.loop.call_later(self.limits.response_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # a request whose body turned out to be malformed: this is its only response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = problem_response(Problem(400, MESSAGES[400], CLOSE))
            head = h11.Response(status_code=400, headers=response.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _update_head_timer(self) -> None:
        """The timer runs from the first byte that can begin a request until its head is complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None
        elif self.head_timer is None and self.timeout_keep_alive_task is None:
            self.head_timer = self.loop.call_later(self.limits.head_seconds, self.transport.abort)


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
