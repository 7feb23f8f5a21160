"""Pictures from strangers are decoded in processes of their own, which may take little and are replaced when they die.

Nothing but plain bytes comes back from them, of a length that is checked: a crash costs one answer. Memory and time are
limited, and nothing else is. One that was taken over is the server's user, with its files and its network; to shut that
user in is up to whoever runs the server, as in `deploy/`.
"""

from __future__ import annotations

import math
import multiprocessing
import queue
import resource
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from engram.data.images import UnreadableImage, decode, extent
from engram.server.config import Config

ORDER = struct.Struct("<IQ")  # the side of the square (0: only how large the picture is), and the limit of pixels
EXTENT = struct.Struct("<II")
PIXELS, SIZE, REASON = b"pse"
LONGEST_REASON = 1_000
START_SECONDS = 60.0  # for a process to begin
GAVE_UP = "It takes more time or memory to decode than a picture should. Make it smaller, or save it again."


class Decoders:
    """So many processes that decode. Threads may ask at once; each waits for one that is idle."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.restarts = 0
        self.threads = ThreadPoolExecutor(config.decoders, "decoding")  # in which answers wait, not to block others
        self._idle: queue.LifoQueue[_Decoder] = queue.LifoQueue()
        self._all = [_Decoder(config) for _ in range(config.decoders)]
        for decoder in self._all:
            self._idle.put(decoder)

    def decode(self, content: bytes, size: int) -> Tensor:
        """A picture as a square of `size` pixels; raises `UnreadableImage`."""
        answer = self._ask(content, size)
        if answer[0] != PIXELS or len(answer) != 1 + size * size * 3:
            raise UnreadableImage(GAVE_UP)
        return torch.frombuffer(bytearray(answer[1:]), dtype=torch.uint8).reshape(size, size, 3)

    def extent(self, content: bytes) -> tuple[int, int]:
        """(width, height) of a picture; raises `UnreadableImage`."""
        answer = self._ask(content, 0)
        if answer[0] != SIZE or len(answer) != 1 + EXTENT.size:
            raise UnreadableImage(GAVE_UP)
        width, height = EXTENT.unpack(answer[1:])
        return width, height

    def close(self) -> None:
        """End all of them."""
        self.threads.shutdown(cancel_futures=True)
        for decoder in self._all:
            decoder.end()

    def _ask(self, content: bytes, size: int) -> bytes:
        decoder = self._idle.get()
        try:
            answer = decoder.ask(ORDER.pack(size, self.config.pixels) + content)
        except (EOFError, OSError):
            decoder.end()
            self.restarts += 1
            raise UnreadableImage(GAVE_UP) from None
        finally:
            self._idle.put(decoder)
        if answer[0] == REASON:
            raise UnreadableImage(answer[1 : 1 + LONGEST_REASON].decode("utf-8", "replace"))
        return answer


class _Decoder:
    """One process, begun when it is first asked."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection | None = None

    def ask(self, order: bytes) -> bytes:
        if self.pipe is None:
            self._start()
        assert self.pipe is not None
        self.pipe.send_bytes(order)
        if not self.pipe.poll(2 * self.config.decode_seconds + 1):  # it may have to wait for a processor
            raise EOFError
        answer = self.pipe.recv_bytes()
        if not answer:
            raise EOFError
        return answer

    def end(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = self.pipe = None

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(
            target=_work, args=(theirs, self.config.decode_seconds, self.config.decode_bytes), daemon=True
        )
        self.process.start()
        theirs.close()
        self.pipe = ours
        if not ours.poll(START_SECONDS):
            raise EOFError
        ours.recv_bytes()


def _work(pipe: Connection, seconds: int, memory: int) -> None:
    """Decode what comes until nothing comes any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _limit_memory(memory)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, OSError):
        pipe.send_bytes(b"ready")
        while True:
            order = pipe.recv_bytes()
            _limit_time(seconds)
            pipe.send_bytes(_answer(order))


def _answer(order: bytes) -> bytes:
    size, limit = ORDER.unpack_from(order)
    content = order[ORDER.size :]
    try:
        if not size:
            return bytes([SIZE]) + EXTENT.pack(*extent(content, limit=limit))
        return bytes([PIXELS]) + decode(content, size=size, limit=limit).numpy().tobytes()
    except UnreadableImage as error:
        return bytes([REASON]) + str(error).encode("utf-8", "replace")


def _limit_memory(extra: int) -> None:
    """So many bytes more than are taken now, where that can be told: a few of what is mapped are used."""
    status = Path("/proc/self/statm")
    if status.exists():
        limit = int(status.read_text().split()[0]) * resource.getpagesize() + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(seconds: int) -> None:
    """So many seconds of a processor from now on; then the system ends this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime) + seconds, hard))
