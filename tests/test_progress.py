"""The progress that ignores reports."""

from __future__ import annotations

from engram.progress import SILENT


def test_silent_progress_accepts_reports() -> None:
    with SILENT.phase("train", 2) as phase:
        phase.advance(note="loss 1")
        phase.log(loss=1.0)
