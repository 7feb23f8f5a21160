"""How processes know of each other's end: each gives signs of life, and the first to know why all must end says so.

A process that waits for another one's numbers cannot tell a dead one from one that works alone for long. So a thread of
each counts up a number in the store that all of them see, once a second, and looks at its neighbour's. A second thread
looks at the first, for a store on a machine that is out of reach may never answer.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import socket
import threading
import time
from types import TracebackType
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from engram.errors import ElsewhereError, EngramError, LostError

BEAT = 1.0  # seconds from one sign of life to the next
PATIENCE = 15  # signs that may be missed before a process is taken for dead; counted, so that all may be suspended
ARRIVAL = 300  # the same, before its first
DOUBT = 4.0  # seconds to hear from everyone when something has failed that a death would explain
GRACE = 5.0  # seconds that a process has to end by itself once the run has ended

GO_ON = "What was saved is kept: the same command with --resume goes on, with any number of processes."


class Terminated(KeyboardInterrupt):
    """SIGTERM, which torchrun sends to all when one has ended, as an interrupt."""


class End(NamedTuple):
    """Why a run ended: who said so, what, and the exit code of all."""

    rank: int
    message: str
    exit_code: int


class Lifeline:
    """This process among all, in a store that all of them reach."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.exit_code = 1  # of all, once there is a verdict
        self.left = threading.Event()
        self.end: End | None = None  # of the run, once it is known
        self.unanswered = 0  # how often the store was waited for, since it last answered
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._watch)]

    def __enter__(self) -> Lifeline:
        self.store.set(f"machine/{self.rank}", socket.gethostname())
        self.store.add(f"beat/{self.rank}", 1)
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Give no more signs of life, and look for none."""
        self.left.set()
        for thread in self.threads:
            thread.join(GRACE)  # one may wait for a store that never answers

    def verdict(self, error: BaseException) -> BaseException:
        """What a process that met `error` ends with: of all that have something to say, only the first says it."""
        try:
            end = self._end_of(error)
        except RuntimeError:  # the store is gone, and no one can be told anything: so everyone says it
            end = End(self.rank, _words(error) if isinstance(error, EngramError) else _orphaned(), 1)
        self.exit_code = end.exit_code
        if end.rank != self.rank:
            return ElsewhereError(
                f"Process {end.rank + 1} of {self.world_size} has failed: {end.message}", end.exit_code
            )
        return error if end.message == _words(error) else LostError(end.message)

    def _end_of(self, error: BaseException) -> End:
        if isinstance(error, RuntimeError | Terminated):  # so fails what waited for a process that is dead
            dead = self._silent()
            if dead is not None:
                return self._declare(self._obituary(dead), 1)
        exit_code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        return self._declare(_words(error), exit_code)

    def _declare(self, message: str, exit_code: int) -> End:
        """End the run for this reason, unless another process has ended it before: why it ended."""
        own = json.dumps(End(self.rank, message, exit_code))
        return End(*json.loads(self.store.compare_set("end", "", own)))

    def _ended(self) -> End | None:
        return End(*json.loads(self.store.get("end"))) if self.store.check(["end"]) else None

    def _silent(self) -> int | None:
        """A process that gives no sign of life for a while; None once all have, or the run is known to be over."""
        before = [self.store.add(f"beat/{each}", 0) for each in range(self.world_size)]
        quiet = set(range(self.world_size)) - {self.rank}
        start = time.monotonic()
        while quiet and time.monotonic() < start + DOUBT and self._ended() is None:
            time.sleep(BEAT / 5)
            quiet = {each for each in quiet if self.store.add(f"beat/{each}", 0) == before[each]}
        return min(quiet) if quiet and self._ended() is None else None

    def _obituary(self, dead: int) -> str:
        machine = self.store.get(f"machine/{dead}").decode() if self.store.check([f"machine/{dead}"]) else "no machine"
        return (
            f"Process {dead + 1} of {self.world_size}, on {machine}, ended without a word: it was killed, ran out of memory, "
            f"or its machine is out of reach. So the run has ended. {GO_ON}"
        )

    def _beat(self) -> None:
        """Give signs of life and look for the neighbour's, until this process leaves or the run ends."""
        neighbour, seen, missed = (self.rank + 1) % self.world_size, 0, 0
        while self.end is None and not self.left.wait(BEAT):
            try:
                self.store.add(f"beat/{self.rank}", 1)
                beats, end = self.store.add(f"beat/{neighbour}", 0), self._ended()
                missed = 0 if beats != seen else missed + 1
                seen = beats
                if end is None and missed >= (PATIENCE if beats else ARRIVAL):
                    end = self._declare(self._obituary(neighbour), 1)
                self.end, self.unanswered = end, 0
            except RuntimeError:
                self.end = End(self.rank, _orphaned(), 1)

    def _watch(self) -> None:
        """See to it that this process ends with the run; also where the store does not even refuse to answer."""
        while not self.left.wait(BEAT):
            self.unanswered += 1
            if self.end is None and self.unanswered > PATIENCE:
                self.end = End(self.rank, _orphaned(), 1)
            if self.end is not None:
                self._see_to(self.end)
                return

    def _see_to(self, end: End) -> None:
        """Have the main thread end, in good order if it can; it may be waiting for what will never come."""
        _thread.interrupt_main(signal.SIGTERM)
        if self.left.wait(GRACE):
            return
        if end.rank == self.rank:
            os.write(2, f"error: {end.message}\n".encode())
        os._exit(end.exit_code)


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, EngramError) else f"{type(error).__name__}: {error}"


def _orphaned() -> str:
    return f"The process that holds the run together, torchrun's on the first machine, is gone or out of reach. {GO_ON}"
