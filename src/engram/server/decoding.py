"""Decoding of untrusted images in processes with limited memory and CPU time, which are replaced when they die.

They send back plain bytes of a known length, so a crash costs one answer. Nothing else is limited: an exploited process
has the rights of the server's user. Restrict that user as in `deploy/`.

A few bytes can take seconds to decode. CPU time beyond what an ordinary image of the same bytes takes is charged to the
client, or to the update, and refused when a budget is used up.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import queue
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from engram.data.images import UnreadableImage, decode
from engram.server.config import Config

HEADER = struct.Struct("<IQ")  # side of the square, limit of pixels; the file's content follows
PIXELS, REASON = b"p", b"r"  # first byte of a reply
COST = struct.Struct("<cd")  # that byte and the CPU seconds taken
FREE_SECONDS, FREE_SECONDS_PER_BYTE = 0.01, 0.5e-6  # of CPU time: more than photos take
MAX_CLIENTS = 10_000  # with a debt, to remember
LONGEST_REASON = 1_000
START_SECONDS = 60.0
COSTLY_IMAGES = "These images take too long to decode for their size. Save them in another format."
TOO_COSTLY = "It needs too much time or memory to decode. Make it smaller, or save it again."


class Decoders:
    """A pool of decoding processes for use from several threads."""

    def __init__(self, config: Config, on_restart: Callable[[], None] = lambda: None, nice: int = 0) -> None:
        self.config, self.on_restart = config, on_restart
        self.threads = ThreadPoolExecutor(config.decoders, "decoding")  # requests wait here, not in the shared pool
        self.processes = [DecoderProcess(config, nice) for _ in range(config.decoders)]
        self._idle = queue.LifoQueue[DecoderProcess]()
        for process in self.processes:
            self._idle.put(process)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._paid: dict[str, float] = {}  # client → when its debt is paid
        self._lock = threading.Lock()

    def turn(self, client: str) -> asyncio.Semaphore:
        """One client decodes in all processes but one at once, so that others do not wait for it."""
        return self._turns.setdefault(client, asyncio.Semaphore(max(1, self.config.decoders - 1)))

    def debt(self, client: str) -> float:
        """CPU seconds that this client has used beyond the free ones and that have not recovered."""
        return max(0.0, self._paid.get(client, 0.0) - time.monotonic()) * self.config.decode_share

    def seconds_to_wait(self, client: str) -> float:
        """Until this client has half of its budget again; 0 if it has not used it up."""
        debt, budget = self.debt(client), self.config.decode_budget
        return 0.0 if debt < budget else (debt - budget / 2) / self.config.decode_share

    def _charge(self, client: str, seconds: float) -> None:
        if seconds <= 0:
            return
        with self._lock:
            begin = max(time.monotonic(), self._paid.pop(client, 0.0))
            self._paid[client] = begin + seconds / self.config.decode_share
            if len(self._paid) > MAX_CLIENTS:
                del self._paid[next(iter(self._paid))]

    def decode(self, content: bytes, size: int, client: str = "") -> Tensor:
        """An image as uint8 (size, size, 3); raises `UnreadableImage`."""
        decoder, begin = self._idle.get(), time.monotonic()
        try:
            reply = decoder.request(HEADER.pack(size, self.config.pixels) + content)
            kind, seconds = COST.unpack_from(reply)
        except (EOFError, OSError, struct.error):
            decoder.close()
            self.on_restart()
            self._charge(client, time.monotonic() - begin)
            raise UnreadableImage(TOO_COSTLY) from None
        finally:
            self._idle.put(decoder)
        self._charge(client, seconds - FREE_SECONDS - FREE_SECONDS_PER_BYTE * len(content))
        pixels = memoryview(reply)[COST.size :]
        if kind == REASON:
            raise UnreadableImage(bytes(pixels[:LONGEST_REASON]).decode("utf-8", "replace"))
        if kind != PIXELS or len(pixels) != size * size * 3:
            raise UnreadableImage(TOO_COSTLY)
        return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(size, size, 3)

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.close()


class DecoderProcess:
    """One decoding process, started by the first request."""

    def __init__(self, config: Config, nice: int) -> None:
        self.config, self.nice = config, nice
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection | None = None

    def request(self, message: bytes) -> bytes:
        """The reply to a message; raises EOFError or OSError if the process dies or takes too long."""
        pipe = self.pipe or self._start()
        pipe.send_bytes(message)
        if not pipe.poll(2 * self.config.decode_seconds + 1):  # wall time: it may wait for a CPU
            raise EOFError
        return pipe.recv_bytes()

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = self.pipe = None

    def _start(self) -> Connection:
        self.pipe, theirs = multiprocessing.Pipe()
        arguments = (theirs, self.config.decode_seconds, self.config.decode_bytes, self.nice)
        self.process = multiprocessing.get_context("forkserver").Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(START_SECONDS):
            raise EOFError
        self.pipe.recv_bytes()
        return self.pipe


def _work(pipe: Connection, seconds: int, memory: int, nice: int) -> None:
    """Decode one message after another until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(nice)
    torch.set_num_threads(1)
    _limit_memory(memory)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, OSError):
        pipe.send_bytes(b"ready")
        while True:
            message = pipe.recv_bytes()
            _limit_time(seconds)
            pipe.send_bytes(_reply(message))


def _reply(message: bytes) -> bytes:
    size, pixels = HEADER.unpack_from(message)
    begin = time.process_time()
    try:
        kind, content = PIXELS, decode(message[HEADER.size :], size=size, limit=pixels).numpy().tobytes()
    except UnreadableImage as error:
        kind, content = REASON, str(error).encode("utf-8", "replace")
    return COST.pack(kind, time.process_time() - begin) + content


def _limit_memory(extra: int) -> None:
    """Allow `extra` bytes of address space beyond what is mapped now. Only Linux tells how much that is."""
    status = Path("/proc/self/statm")
    if status.exists():
        limit = int(status.read_text().split()[0]) * resource.getpagesize() + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(seconds: int) -> None:
    """Allow this process so many seconds of CPU time from now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime) + seconds, hard))
