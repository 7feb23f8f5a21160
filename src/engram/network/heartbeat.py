"""The heartbeat by which the ranks of a run notice that one of them has died.

A rank that waits in a collective operation cannot tell a dead rank from a busy one. So a thread of each rank
increments a counter in the store that all ranks share, once a second, and watches the counter of the next rank. A
second thread watches the first, because a store on an unreachable machine may never answer.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import socket
import threading
import time
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from engram.errors import ElsewhereError, EngramError, LostError

INTERVAL = 1.0  # seconds between two beats
MISSED_BEATS = 15  # after which a rank counts as dead; in beats, so that suspending all ranks does no harm
MISSED_BEATS_AT_START = 300  # the same before its first beat
CHECK_SECONDS = 4.0  # to wait for a beat of every rank after an error that a dead rank would explain
EXIT_SECONDS = 5.0  # for a rank to end by itself after the run has ended

RESUME = "Saved progress is kept: the same command with --resume continues, with any number of processes."
STORE_LOST = f"The process that coordinates the run, torchrun's on the first machine, is gone or out of reach. {RESUME}"


class Terminated(KeyboardInterrupt):
    """SIGTERM, which torchrun sends to all ranks when one has ended."""


class Failure(NamedTuple):
    """Why the run ended: the rank that reports it, its message, and the exit code of all ranks."""

    rank: int
    message: str
    exit_code: int


class Heartbeat:
    """Shows in a shared store that this rank is alive, and ends its process when the run ends elsewhere."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.exit_code = 1  # of all ranks, after `resolve`
        self.stopped = threading.Event()
        self.failure: Failure | None = None  # of the run, once it is known
        self.unanswered = 0  # intervals since the store last answered
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._watch)]

    def __enter__(self) -> Heartbeat:
        self.store.set(f"machine/{self.rank}", socket.gethostname())
        self.store.add(f"beat/{self.rank}", 1)
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more beats, and watch for none."""
        self.stopped.set()
        for thread in self.threads:
            thread.join(EXIT_SECONDS)  # one may wait for a store that never answers

    def resolve(self, error: BaseException) -> BaseException:
        """The error to raise on this rank, which met `error`: only the first rank that fails reports its own."""
        # A dead rank makes collective operations of the others raise RuntimeError, and torchrun terminate them.
        may_be_effect = isinstance(error, RuntimeError | Terminated)
        exit_code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        try:
            dead = self._dead_rank() if may_be_effect else None
            cause = (_message(error), exit_code) if dead is None else (self._dead_message(dead), 1)
            failure = self._report(*cause)
        except RuntimeError:  # the store is gone, so every rank reports
            failure = Failure(self.rank, str(error) if isinstance(error, EngramError) else STORE_LOST, 1)
        self.exit_code = failure.exit_code
        if failure.rank != self.rank:
            message = f"Process {failure.rank + 1} of {self.world_size} has failed: {failure.message}"
            return ElsewhereError(message, failure.exit_code)
        return error if failure.message == _message(error) else LostError(failure.message)

    def _report(self, message: str, exit_code: int) -> Failure:
        """Record why the run ends, unless a failure is recorded already; the recorded failure."""
        own = json.dumps(Failure(self.rank, message, exit_code))
        return Failure(*json.loads(self.store.compare_set("end", "", own)))

    def _reported(self) -> Failure | None:
        return Failure(*json.loads(self.store.get("end"))) if self.store.check(["end"]) else None

    def _dead_rank(self) -> int | None:
        """A rank that does not beat within `CHECK_SECONDS`; None if all do, or a failure is reported meanwhile."""
        before = [self.store.add(f"beat/{each}", 0) for each in range(self.world_size)]
        silent = set(range(self.world_size)) - {self.rank}
        start = time.monotonic()
        while silent and time.monotonic() < start + CHECK_SECONDS and self._reported() is None:
            time.sleep(INTERVAL / 5)
            silent = {each for each in silent if self.store.add(f"beat/{each}", 0) == before[each]}
        return min(silent) if silent and self._reported() is None else None

    def _dead_message(self, dead: int) -> str:
        known = self.store.check([f"machine/{dead}"])
        machine = self.store.get(f"machine/{dead}").decode() if known else "an unknown machine"
        return (
            f"Process {dead + 1} of {self.world_size}, on {machine}, has died: it was killed, ran out of memory, or "
            f"its machine is out of reach. The run has ended. {RESUME}"
        )

    def _beat(self) -> None:
        """Beat, and watch the next rank, until this rank stops or the run ends."""
        neighbour, seen, missed = (self.rank + 1) % self.world_size, 0, 0
        while self.failure is None and not self.stopped.wait(INTERVAL):
            try:
                self.store.add(f"beat/{self.rank}", 1)
                beats, failure = self.store.add(f"beat/{neighbour}", 0), self._reported()
                missed = 0 if beats != seen else missed + 1
                seen = beats
                if failure is None and missed >= (MISSED_BEATS if beats else MISSED_BEATS_AT_START):
                    failure = self._report(self._dead_message(neighbour), 1)
                self.failure, self.unanswered = failure, 0
            except RuntimeError:
                self.failure = Failure(self.rank, STORE_LOST, 1)

    def _watch(self) -> None:
        """End this process when the run has ended, or when the store no longer answers."""
        while not self.stopped.wait(INTERVAL):
            self.unanswered += 1
            if self.failure is None and self.unanswered > MISSED_BEATS:
                self.failure = Failure(self.rank, STORE_LOST, 1)
            if self.failure is not None:
                self._end(self.failure)
                return

    def _end(self, failure: Failure) -> None:
        """Interrupt the main thread; if that waits forever in a collective operation, exit."""
        _thread.interrupt_main(signal.SIGTERM)
        if self.stopped.wait(EXIT_SECONDS):
            return
        if failure.rank == self.rank:
            os.write(2, f"error: {failure.message}\n".encode())
        os._exit(failure.exit_code)


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, EngramError) else f"{type(error).__name__}: {error}"
