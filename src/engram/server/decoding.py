"""Decoding of untrusted images in processes with limited memory and CPU time, which are replaced when they die.

They send back plain bytes of a known length, so a crash costs one answer. Nothing else is limited: an exploited process
has the rights of the server's user. Restrict that user as in `deploy/`.
"""

from __future__ import annotations

import math
import multiprocessing
import queue
import resource
import signal
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from engram.data.images import UnreadableImage, decode
from engram.server.config import Config

HEADER = struct.Struct("<IQ")  # side of the square, limit of pixels; the file's content follows
PIXELS, REASON = b"p", b"r"  # first byte of a reply
LONGEST_REASON = 1_000
START_SECONDS = 60.0
TOO_COSTLY = "It needs too much time or memory to decode. Make it smaller, or save it again."


class Decoders:
    """A pool of decoding processes for use from several threads."""

    def __init__(self, config: Config, on_restart: Callable[[], None] = lambda: None) -> None:
        self.config, self.on_restart = config, on_restart
        self.threads = ThreadPoolExecutor(config.decoders, "decoding")  # requests wait here, not in the shared pool
        self.processes = [DecoderProcess(config) for _ in range(config.decoders)]
        self._idle = queue.LifoQueue[DecoderProcess]()
        for process in self.processes:
            self._idle.put(process)

    def decode(self, content: bytes, size: int) -> Tensor:
        """An image as uint8 (size, size, 3); raises `UnreadableImage`."""
        decoder = self._idle.get()
        try:
            reply = decoder.request(HEADER.pack(size, self.config.pixels) + content)
        except (EOFError, OSError):
            decoder.close()
            self.on_restart()
            raise UnreadableImage(TOO_COSTLY) from None
        finally:
            self._idle.put(decoder)
        if reply[:1] == REASON:
            raise UnreadableImage(reply[1 : 1 + LONGEST_REASON].decode("utf-8", "replace"))
        if reply[:1] != PIXELS or len(reply) != 1 + size * size * 3:
            raise UnreadableImage(TOO_COSTLY)
        return torch.frombuffer(bytearray(reply[1:]), dtype=torch.uint8).reshape(size, size, 3)

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.close()


class DecoderProcess:
    """One decoding process, started by the first request."""

    def __init__(self, config: Config) -> None:
        self.config = config
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
        arguments = (theirs, self.config.decode_seconds, self.config.decode_bytes)
        self.process = multiprocessing.get_context("forkserver").Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(START_SECONDS):
            raise EOFError
        self.pipe.recv_bytes()
        return self.pipe


def _work(pipe: Connection, seconds: int, memory: int) -> None:
    """Decode one message after another until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    try:
        return PIXELS + decode(message[HEADER.size :], size=size, limit=pixels).numpy().tobytes()
    except UnreadableImage as error:
        return REASON + str(error).encode("utf-8", "replace")


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
