"""docs/images.md describes every kind of image and folder as engram treats it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from images_page import PAGE, PLACES, READ, REFUSED, Case, Place, outcome, page, refusal

from engram.data.images import DECODERS, SIGNATURES, decode


@pytest.fixture
def any_name(tmp_path: Path) -> None:
    """Skip on file systems that do not preserve the names in the cases."""
    try:
        for name in (b"cat", b"Cat", b"k\xe4fer", "caf\u00e9".encode(), "cafe\u0301".encode()):
            (tmp_path / os.fsdecode(name)).touch()
    except OSError:
        pytest.skip("a file system of UTF-8 alone")
    if len(os.listdir(tmp_path)) < 5:
        pytest.skip("a file system that takes two names for one")


documented = pytest.mark.skipif(not PAGE.exists(), reason="a copy without the documents")


@pytest.mark.parametrize("case", READ, ids=lambda case: case.what)
def test_images_are_decoded_as_the_page_says(case: Case) -> None:
    assert case.how and case.seen is not None
    if not case.content:
        pytest.skip("pillow-heif is not installed (the extra heic)")
    found = decode(case.content).numpy()
    assert found.shape == case.seen.shape
    assert np.abs(found.astype(int) - case.seen).max() <= case.tolerance
    assert decode(case.content, size=8).shape == (8, 8, 3)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.what)
def test_an_unreadable_file_gets_one_short_message(case: Case) -> None:
    message = refusal(case.content)
    assert message.startswith(("It ", "Its ")) and message.endswith(".") and "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.what)
def test_a_folder_is_learned_or_refused_as_the_page_says(place: Place, any_name: None) -> None:
    learned, message = outcome(place)
    assert learned == place.learned, message
    assert message.isprintable() and message.endswith(".")
    assert "/tmp" not in message


@documented
def test_the_page_is_up_to_date(any_name: None) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/python tests/images_page.py"


@documented
def test_the_page_has_every_format_that_is_known() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in {name for *_, name in SIGNATURES}:
        assert (name if name in DECODERS else f"Its format is {name}, and only") in text, name


def test_the_page_has_every_case_once() -> None:
    cases = [case.what for case in (*READ, *REFUSED, *PLACES)]
    assert len(set(cases)) == len(cases)
