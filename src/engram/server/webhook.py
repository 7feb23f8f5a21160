"""The webhook: sends what the server classified and learned to one URL of the operator.

A thread sends the events from a bounded queue, so no response waits for the receiver.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from engram.errors import UsageError
from engram.text import printable

QUEUE = 100  # events that wait
QUEUE_BYTES = 16 << 20  # of all of them; further events are dropped
ATTEMPTS = 6  # of one event
FIRST_PAUSE = 1.0  # seconds after the first failure; each pause is twice as long as the one before
TIMEOUT = 10.0  # seconds to connect, and to wait for each part of the response
CLOSE_SECONDS = 2.0  # to end the thread; a request under way is abandoned
FINAL = range(300, 500)  # statuses after which an event is not sent again ...
AGAIN = (408, 425, 429)  # ... except these

log = logging.getLogger("engram.server")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Webhook:
    """Sends events as JSON by POST, in order, with retries. Without a URL it does nothing.

    Requests go only to addresses in `allowed` (addresses and networks), or else those that the host has at the start.
    The address is checked each time, and connected to without resolving it again. Redirects are not followed.
    """

    def __init__(self, url: str | None, allowed: Sequence[str] = (), first_pause: float = FIRST_PAUSE) -> None:
        self.first_pause = first_pause
        self._queue: deque[bytes] = deque()
        self._lock = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if url is not None:
            self._parse(url)
            self._allowed = [_network(each) for each in allowed] or [_network(each) for each in self._addresses()]
            self._address()  # fail now if no address is allowed
            self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
            self._thread.start()

    def _parse(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https") or parts.username or not url.isascii() or " " in url:
            raise UsageError("The webhook needs a URL such as https://example.org/hook, without a user name.")
        self.host, self.secure = host, parts.scheme == "https"
        self.port = port or (443 if self.secure else 80)
        self.path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def send(self, event: str, **content: Any) -> None:
        """Queue an event; if the queue is full, it is dropped. This does not block."""
        if self._thread is None:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = json.dumps({"event": event, "id": secrets.token_hex(8), "time": now, **content}).encode()
        with self._lock:
            if len(self._queue) >= QUEUE or sum(map(len, self._queue)) + len(body) > QUEUE_BYTES:
                log.warning("An event for the webhook was dropped: %d are waiting.", len(self._queue))
                return
            self._queue.append(body)
            self._lock.notify()

    def clear(self) -> None:
        """Drop all events that wait."""
        with self._lock:
            self._queue.clear()

    def close(self) -> None:
        """End the thread; events that wait are dropped."""
        if self._thread is None:
            return
        self._closed.set()
        with self._lock:
            self._lock.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._queue:
            log.warning("%d events for the webhook were not sent.", len(self._queue))

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._closed.is_set())
                if self._closed.is_set():
                    return
                body = self._queue.popleft()
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt and self._closed.wait(self.first_pause * 2 ** (attempt - 1)):
                break
            try:
                status = self._post(body)
            except (OSError, http.client.HTTPException, UsageError) as error:
                problem = str(error) or type(error).__name__
                continue
            if 200 <= status < 300:
                return
            problem = f"it answered with status {status}"
            if status in FINAL and status not in AGAIN:
                break
        log.warning("An event was not delivered to the webhook at %s: %s.", self.host, printable(problem.rstrip(".")))

    def _post(self, body: bytes) -> int:
        """The status of the response."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT)
        try:
            connection.sock = socket.create_connection((self._address(), self.port), TIMEOUT)
            if self.secure:
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(connection.sock, server_hostname=self.host)
            connection.request("POST", self.path, body, {"Content-Type": "application/json", "User-Agent": "engram"})
            return connection.getresponse().status
        finally:
            connection.close()

    def _address(self) -> str:
        """An address of the host that is allowed."""
        addresses = self._addresses()
        for address in addresses:
            if any(ipaddress.ip_address(address) in network for network in self._allowed):
                return address
        raise UsageError(
            f"The webhook's host {self.host} has the address {', '.join(addresses)}, which is not allowed. "
            "Allow it with --webhook-allow."
        )

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UsageError(f"The webhook's host {printable(self.host)} cannot be resolved: {error}.") from error
        return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise UsageError(
            f"'{printable(text)}' is not an address or network that a webhook may go to, such as 10.0.0.2."
        ) from None
