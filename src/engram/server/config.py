"""Settings and limits of a server."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from engram.data.images import LIMIT
from engram.errors import UsageError
from engram.text import printable

SHORTEST_TOKEN = 16  # characters


@dataclass(frozen=True, kw_only=True)
class Config:
    """The address of a server, who may use it, and its limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()  # further names accepted in the Host header
    token: str | None = None  # None: no authentication
    trusted_proxy: str | None = None  # addresses whose X-Forwarded-* headers are trusted
    device: str = "auto"
    webhook: str | None = None  # the URL to send events to
    webhook_allow: tuple[str, ...] = ()  # its allowed addresses and networks; default: its addresses at the start
    epochs: int | None = None  # of an update; None: depends on the images

    body_bytes: int = 256 << 20  # of one upload
    json_bytes: int = 64 << 10  # of any other request
    files: int = 2_000  # in one upload
    file_bytes: int = 64 << 20
    pixels: int = LIMIT  # of one image
    body_seconds: float = 120.0  # to receive an upload
    json_seconds: float = 10.0  # to receive any other body
    all_body_bytes: int = 1 << 30  # of all requests in progress
    head_seconds: float = 15.0  # to receive a request's head
    response_seconds: float = 60.0  # for the client to read a response
    requests: int = 32  # in progress at once
    anonymous_requests: int = 16  # of these, without the token if one is required
    health_requests: int = 8  # besides, from one address
    connections: int = 512  # open at once
    address_connections: int = 64  # of these, from one address, unless it is a trusted proxy
    reserved_connections: int = 64  # for addresses that have authenticated or have no other connection

    decoders: int = 3  # processes; one client uses all but one
    decode_seconds: int = 10  # CPU time for one image
    decode_bytes: int = 2 << 30  # memory for one image
    decode_budget: float = 10.0  # CPU seconds that a client's images may take beyond what their bytes explain
    update_decode_budget: float = 300.0  # the same for the images of an update
    decode_share: float = 0.25  # of a CPU: how fast these budgets recover

    batch_size: int = 64  # images in one forward pass
    batch_seconds: float = 0.003  # to wait for more images

    queue: int = 4  # updates that wait
    queue_bytes: int = 1 << 30  # of all their images
    finished_jobs: int = 100  # to remember
    finished_bytes: int = 8 << 20  # of them, as JSON
    lock_seconds: float = 1_800.0  # an update waits for another process that locks the model
    nice: int = 10  # added to the niceness of the processes of an update, and of the thread that loads its version

    token_failures: int = 10  # wrong tokens from one address before it is blocked
    block_seconds: float = 60.0
    session_seconds: float = 12 * 3600.0

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not re.fullmatch(r"[ -~]*", self.token)):
            raise UsageError(f"A token needs at least {SHORTEST_TOKEN} printable ASCII characters on one line.")
        address = _address(self.host)
        is_loopback = self.host == "localhost" or (address is not None and address.is_loopback)
        if self.token is None and not is_loopback:
            raise UsageError(
                f"Other machines can reach '{printable(self.host)}', so a token is required. "
                "Set one with --token-file or ENGRAM_TOKEN, or use --host 127.0.0.1."
            )
        for host in self.hosts:
            if not re.fullmatch(r"[A-Za-z0-9._-]+", host) and _address(host) is None:
                raise UsageError(
                    f"'{printable(host)}' is not a host name. "
                    "Write a name or an address without http:// and without a port, such as: --allow-host pi.local"
                )
        self.is_proxy("127.0.0.1")  # so that an invalid address is an error now

    def is_proxy(self, address: str) -> bool:
        """Whether this is the address of a trusted proxy, through which many clients come."""
        return any(ipaddress.ip_address(address) in network for network in self._proxies)

    @cached_property
    def _proxies(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        try:
            texts = () if self.trusted_proxy is None else self.trusted_proxy.split(",")
            return [ipaddress.ip_network(text.strip(), strict=False) for text in texts]
        except ValueError as error:
            raise UsageError(
                f"'{printable(self.trusted_proxy)}' is not an IP address. Name the proxy by its address or network, "
                "such as 10.0.0.2."
            ) from error

    @property
    def known_hosts(self) -> frozenset[str]:
        """The names accepted in the Host header, in lower case."""
        return frozenset(name.lower() for name in ("localhost", "127.0.0.1", "::1", self.host, *self.hosts))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(text)
    return None
