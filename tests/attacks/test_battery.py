"""A few attacks of each kind from the battery of `benchmarks/attacks.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from battery import SECTIONS

FEW = [
    ("kills", "merge", 4),
    ("damage", "any file", 20),
    ("damage", "older current.json", 3),
    ("forgery", "manifests", 30),
    ("forgery", "tensors", 30),
    ("protocol", "hostile requests", 40),
]


@pytest.mark.skipif(sys.platform != "linux", reason="kills with strace, and reads /proc")
@pytest.mark.parametrize(("section", "name", "count"), FEW, ids=[f"{section}: {name}" for section, name, _ in FEW])
def test_attacks_find_nothing(section: str, name: str, count: int) -> None:
    with tempfile.TemporaryDirectory() as place:  # a short path: a server's sockets lie in it
        found = SECTIONS[section][name].run(count, Path(place))
    assert found["bad"] == 0, found
    assert found["attempts"] >= count
