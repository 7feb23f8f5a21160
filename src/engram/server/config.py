"""How a server is set up, and the limits that it keeps."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from engram.data.images import LIMIT
from engram.errors import UsageError
from engram.text import printable

SHORTEST_TOKEN = 16  # characters: below, it can be guessed


@dataclass(frozen=True, kw_only=True)
class Config:
    """Where a server listens, who may use it, and how much of it."""

    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()  # other names that it may be called by
    token: str | None = None  # None: whoever reaches it may use it
    proxy: str | None = None  # the address of one whose word is taken on who asks, and whether by https
    device: str = "auto"
    epochs: int | None = None  # of a lesson; None: by what arrives

    body_bytes: int = 256 << 20  # of one request
    json_bytes: int = 64 << 10  # of a request that brings no pictures
    files: int = 2_000  # of one request
    file_bytes: int = 64 << 20
    pixels: int = LIMIT  # of one picture
    body_seconds: float = 120.0  # for a body to arrive
    json_seconds: float = 10.0  # for one that brings no pictures
    bodies_bytes: int = 1 << 30  # of all requests under way
    head_seconds: float = 15.0  # for a request's first lines to arrive
    answer_seconds: float = 60.0  # for an answer to be taken
    requests: int = 32  # under way at once
    strangers: int = 16  # of them from those who have shown no token, where one is needed
    connections: int = 512  # open at once

    decoders: int = 2  # processes that decode
    decode_seconds: int = 10  # of a processor, for one picture
    decode_bytes: int = 2 << 30  # of memory, for one picture

    batch: int = 64  # pictures in one forward pass
    batch_seconds: float = 0.003  # to wait for others to come along

    queue: int = 4  # lessons that wait
    finished: int = 100  # lessons that are remembered
    lesson_bytes: int = 1 << 30  # of all pictures that wait
    busy_seconds: float = 1_800.0  # for another command to let go of the model's folder, while a lesson waits
    nice: int = 10  # how far a lesson stands back behind answers

    failures: int = 10  # wrong tokens from one address, before it has to wait
    failure_seconds: float = 60.0
    session_seconds: float = 12 * 3600.0

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not re.fullmatch(r"[ -~]*", self.token)):
            raise UsageError(f"A token has at least {SHORTEST_TOKEN} characters, all of them ASCII, on one line.")
        if self.token is None and not is_loopback(self.host):
            raise UsageError(
                f"Without a token only this machine may reach the server, and '{self.host}' may be reached by others. "
                "Set one with --token-file or ENGRAM_TOKEN, or use --host 127.0.0.1."
            )
        for host in self.hosts:
            if not _is_name(host):
                raise UsageError(
                    f"The server cannot be called '{printable(host)}'. "
                    "Write a name or an address without http:// and without a port, such as: --allow-host pi.local"
                )
        for proxy in () if self.proxy is None else self.proxy.split(","):
            if _network(proxy.strip()) is None:
                raise UsageError(
                    f"A trusted proxy is known by its address, such as 10.0.0.2, or a network; found '{printable(proxy)}'."
                )
        for name in ("body_bytes", "json_bytes", "files", "file_bytes", "pixels", "requests", "decoders", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ').capitalize()} must be at least 1.")

    @property
    def known_hosts(self) -> frozenset[str]:
        """The names that a request may call the server by."""
        return frozenset(name.lower() for name in ("localhost", "127.0.0.1", "::1", self.host, *self.hosts))


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _is_name(host: str) -> bool:
    """Whether a browser can call a server so: what it says is compared without the port."""
    return re.fullmatch(r"[A-Za-z0-9._-]+", host) is not None or _address(host) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
