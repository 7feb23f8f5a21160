"""Text from outside: names of classes, files of names, cells of CSV files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engram.text import csv_text, names_in, unfit


@pytest.mark.parametrize("name", ["\u3164", "\u2800\u2800", "\u115f\u1160", "\uffa0", "\u200b", " \u3164 "])
def test_a_name_that_is_shown_as_blank_cannot_name_a_class(name: str) -> None:
    assert unfit(name)
    assert unfit(f"a{name}b") is None  # between letters it can be seen


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "＝", "＋", "－", "＠"])
def test_a_csv_cell_is_never_a_formula(sign: str) -> None:
    assert csv_text(f"{sign}1+1") == f"'{sign}1+1"
    assert csv_text(f"a{sign}1") == f"a{sign}1"


@pytest.mark.timeout(20)
def test_names_are_read_from_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path / "absent"):
        with pytest.raises(OSError, match=path.name):
            names_in(path)
