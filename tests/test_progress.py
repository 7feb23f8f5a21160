"""A stopwatch adds up the seconds of each phase and passes everything on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engram import progress
from engram.progress import SILENT, Phase, Stopwatch


class Listener:
    def __init__(self) -> None:
        self.heard: list[object] = []

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        self.heard.append((name, steps))
        yield self
        self.heard.append("left")

    def tell(self, **values: float) -> None:
        pass

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.heard.append((steps, note))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_seconds_add_up_by_phase_and_onto_those_of_before(clock: list[float]) -> None:
    watch = Stopwatch(seconds={"train": 10.0})
    for seconds in (1.5, 2.0):
        with watch.phase("train"):
            clock[0] += seconds
    with watch.phase("herd"):
        clock[0] += 0.25
    assert watch.seconds == {"train": 13.5, "herd": 0.25}


def test_a_phase_left_by_an_error_is_counted_too(clock: list[float]) -> None:
    watch = Stopwatch()
    with pytest.raises(ValueError, match="stop"), watch.phase("train"):
        clock[0] += 3
        raise ValueError("stop")
    assert watch.seconds == {"train": 3.0}


def test_the_seconds_that_were_given_are_not_changed(clock: list[float]) -> None:
    before = {"train": 1.0}
    with Stopwatch(seconds=before).phase("train"):
        clock[0] += 1
    assert before == {"train": 1.0}


def test_phases_and_steps_are_passed_on() -> None:
    listener = Listener()
    with Stopwatch(listener).phase("train", 4) as phase:
        phase.advance(3, "loss 1")
        phase.advance()
    assert listener.heard == [("train", 4), (3, "loss 1"), (1, ""), "left"]


def test_silence_takes_reports_and_does_nothing() -> None:
    with SILENT.phase("train", 2) as phase:
        phase.advance(note="loss 1")
