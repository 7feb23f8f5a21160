"""Settings that came later do not make another run of one that was begun without them."""

from __future__ import annotations

from engram.experiments.identity import identifying
from engram.methods import make


def test_what_changes_nothing_tells_no_run_from_another() -> None:
    settings = make("features").settings()
    before = {name: value for name, value in settings.items() if name not in ("codec", "codec_bytes")}
    assert identifying(settings) == identifying(before) == before


def test_what_changes_something_does() -> None:
    settings = make("features", codec="pq", codec_bytes=16).settings()
    assert identifying(settings) == settings
    assert "codec_bytes" not in identifying(make("features", codec="pq").settings())
