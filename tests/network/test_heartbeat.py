"""The heartbeat of ranks, with short intervals."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import PrefixStore, TCPStore

from engram.errors import ElsewhereError, LostError, UsageError
from engram.network import heartbeat
from engram.network.heartbeat import Failure, Heartbeat, Terminated


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "INTERVAL": 0.02,
        "MISSED_BEATS": 50,
        "MISSED_BEATS_AT_START": 150,
        "CHECK_SECONDS": 1.0,
    }.items():
        monkeypatch.setattr(heartbeat, name, value)


class Watched(Heartbeat):
    """Records the failure that would end its process."""

    seen: Failure | None = None

    def _end(self, failure: Failure) -> None:
        self.seen = failure


@pytest.fixture
def three() -> Iterator[list[Watched]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
    yield [Watched(PrefixStore("test", store), rank, 3) for rank, store in enumerate(stores)]


def wait_for_failure(*watched: Watched) -> None:
    limit = time.monotonic() + 20
    while any(each.seen is None for each in watched) and time.monotonic() < limit:
        time.sleep(0.01)


def test_live_ranks_see_no_failure(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        time.sleep(0.5)
    assert [each.seen for each in three] == [None, None, None]


def test_a_silent_rank_is_reported_dead_to_all_others(three: list[Watched]) -> None:
    with three[0], three[2]:
        with three[1]:
            time.sleep(0.1)
        wait_for_failure(three[0], three[2])
    assert three[0].seen == three[2].seen is not None
    assert three[0].seen.message.startswith("Process 2 of 3, on ")
    assert "--resume" in three[0].seen.message
    assert three[0].seen.exit_code == 1


def test_a_rank_has_more_time_for_its_first_beat(three: list[Watched]) -> None:
    with three[0]:
        time.sleep(1.5)
        assert three[0].seen is None
        wait_for_failure(three[0])
    assert three[0].seen is not None
    assert three[0].seen.message.startswith("Process 2 of 3, on ")


def test_only_the_first_of_several_errors_is_reported(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        own, other = UsageError("wrong"), UsageError("wrong")
        assert three[1].resolve(own) is own
        raised = three[0].resolve(other)
        assert isinstance(raised, ElsewhereError)
        assert (str(raised), raised.exit_code) == ("Process 2 of 3 has failed: wrong", 2)
        wait_for_failure(three[2])
        assert three[2].seen == Failure(1, "wrong", 2)


def test_an_error_caused_by_a_dead_rank_is_reported_as_its_death(three: list[Watched]) -> None:
    with three[0], three[2]:
        with three[1]:
            time.sleep(0.1)
        raised = three[0].resolve(RuntimeError("Connection closed by peer"))
        assert isinstance(raised, LostError)
        assert str(raised).startswith("Process 2 of 3, on ")
        assert isinstance(three[2].resolve(Terminated()), ElsewhereError)


def test_an_error_while_all_ranks_live_stays_what_it_is(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        bug = RuntimeError("shapes do not fit")
        start = time.monotonic()
        assert three[0].resolve(bug) is bug
        assert time.monotonic() - start < heartbeat.CHECK_SECONDS  # as soon as every rank has beaten
        assert three[0].exit_code == 1


def test_an_interrupt_of_all_ranks_is_reported_once(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        interrupts = [KeyboardInterrupt(), KeyboardInterrupt(), Terminated()]
        raised = [each.resolve(interrupt) for each, interrupt in zip(three, interrupts, strict=True)]
        assert raised[0] is interrupts[0]
        assert all(isinstance(raised, ElsewhereError) and raised.exit_code == 130 for raised in raised[1:])


def test_a_lost_store_ends_all_ranks() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False)
    with Watched(PrefixStore("test", store), 0, 2) as own:
        del server
        wait_for_failure(own)
        assert own.seen is not None and own.seen.message == heartbeat.STORE_LOST
        assert isinstance(own.resolve(RuntimeError("no answer")), LostError)


def test_a_store_that_never_answers_ends_all_ranks(three: list[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()
    with three[0], three[1], three[2]:
        monkeypatch.setattr(three[0], "_reported", lambda: gone.wait() and None)
        wait_for_failure(three[0])
        gone.set()
    assert three[0].seen is not None and three[0].seen.rank == 0
    assert three[0].seen.message == heartbeat.STORE_LOST
