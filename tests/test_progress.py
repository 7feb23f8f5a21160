"""Progress that is reported to nobody."""

from __future__ import annotations

from engram.progress import SILENT


def test_silence_takes_reports_and_does_nothing() -> None:
    with SILENT.phase("train", 2) as phase:
        phase.advance(note="loss 1")
