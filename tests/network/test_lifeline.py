"""How processes know of each other's end, without much waiting: the signs of life are fast here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import PrefixStore, TCPStore

from engram.errors import ElsewhereError, LostError, UsageError
from engram.network.parallel import lifeline
from engram.network.parallel.lifeline import End, Lifeline, Terminated


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEAT": 0.02, "PATIENCE": 50, "ARRIVAL": 150, "DOUBT": 1.0}.items():
        monkeypatch.setattr(lifeline, name, value)


class Watched(Lifeline):
    """One that notes the end it sees, where another would end its process."""

    seen: End | None = None

    def _see_to(self, end: End) -> None:
        self.seen = end


@pytest.fixture
def three() -> Iterator[list[Watched]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
    yield [Watched(PrefixStore("test", store), rank, 3) for rank, store in enumerate(stores)]


def wait_for_the_end(*watched: Watched) -> None:
    limit = time.monotonic() + 20
    while any(each.seen is None for each in watched) and time.monotonic() < limit:
        time.sleep(0.01)


def test_processes_that_live_hear_nothing_of_an_end(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        time.sleep(0.5)
    assert [each.seen for each in three] == [None, None, None]


def test_a_process_that_falls_silent_is_declared_dead_and_all_others_hear_of_it(three: list[Watched]) -> None:
    with three[0], three[2]:
        with three[1]:
            time.sleep(0.1)
        wait_for_the_end(three[0], three[2])
    assert three[0].seen == three[2].seen is not None
    assert three[0].seen.message.startswith("Process 2 of 3, on ")
    assert "ended without a word" in three[0].seen.message
    assert "--resume goes on, with any number of processes" in three[0].seen.message
    assert three[0].seen.exit_code == 1


def test_a_process_has_longer_to_arrive_than_to_answer(three: list[Watched]) -> None:
    with three[0]:
        time.sleep(1.5)
        assert three[0].seen is None
        wait_for_the_end(three[0])
    assert three[0].seen is not None
    assert three[0].seen.message.startswith("Process 2 of 3, on no machine,")


def test_of_several_errors_the_first_is_said_and_the_others_end_as_it_does(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        own, other = UsageError("wrong"), UsageError("wrong")
        assert three[1].verdict(own) is own
        verdict = three[0].verdict(other)
        assert isinstance(verdict, ElsewhereError)
        assert (str(verdict), verdict.exit_code) == ("Process 2 of 3 has failed: wrong", 2)
        wait_for_the_end(three[2])
        assert three[2].seen == End(1, "wrong", 2)


def test_what_fails_because_another_is_dead_is_said_to_be_its_death(three: list[Watched]) -> None:
    with three[0], three[2]:
        with three[1]:
            time.sleep(0.1)
        verdict = three[0].verdict(RuntimeError("Connection closed by peer"))
        assert isinstance(verdict, LostError)
        assert str(verdict).startswith("Process 2 of 3, on ")
        assert isinstance(three[2].verdict(Terminated()), ElsewhereError)


def test_what_fails_while_all_are_alive_stays_what_it_is(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        bug = RuntimeError("shapes do not fit")
        start = time.monotonic()
        assert three[0].verdict(bug) is bug
        assert time.monotonic() - start < lifeline.DOUBT  # as soon as all were heard of
        assert three[0].exit_code == 1


def test_an_interrupt_of_all_is_said_once(three: list[Watched]) -> None:
    with three[0], three[1], three[2]:
        interrupts = [KeyboardInterrupt(), KeyboardInterrupt(), Terminated()]
        verdicts = [each.verdict(interrupt) for each, interrupt in zip(three, interrupts, strict=True)]
        assert verdicts[0] is interrupts[0]
        assert all(isinstance(verdict, ElsewhereError) and verdict.exit_code == 130 for verdict in verdicts[1:])


def test_a_store_that_is_gone_is_the_end_of_all() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False)
    with Watched(PrefixStore("test", store), 0, 2) as own:
        del server
        wait_for_the_end(own)
        assert own.seen is not None and "torchrun's on the first machine, is gone" in own.seen.message
        assert isinstance(own.verdict(RuntimeError("no answer")), LostError)


def test_so_is_a_store_that_does_not_even_refuse_to_answer(
    three: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    with three[0], three[1], three[2]:
        monkeypatch.setattr(three[0], "_ended", lambda: gone.wait() and None)
        wait_for_the_end(three[0])
        gone.set()
    assert three[0].seen is not None and three[0].seen.rank == 0
    assert "out of reach" in three[0].seen.message
