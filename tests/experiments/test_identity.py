"""Settings that came later do not make another run of one that was begun without them."""

from __future__ import annotations

import json

from engram.experiments.identity import LATER, identifying
from engram.methods import make


def test_what_changes_nothing_tells_no_run_from_another() -> None:
    settings = make("features").settings()
    before = {name: value for name, value in settings.items() if name not in LATER}
    assert identifying(settings) == identifying(before) == identifying(json.loads(json.dumps(settings))) == before
    assert LATER.keys() <= settings.keys()


def test_what_changes_something_does() -> None:
    changed = identifying(make("features", codec="pq", codec_bytes=16, crop=24).settings())
    assert (changed["codec"], changed["codec_bytes"], changed["crop"]) == ("pq", 16, 24)
    assert "codec_bytes" not in identifying(make("features", codec="pq").settings())
