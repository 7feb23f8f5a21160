"""docs/images.md says of every kind of picture and folder what engram says, and no more than is true."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from images_page import PAGE, PLACES, READ, REFUSED, Picture, Place, outcome, page, refusal

from engram.data.images import DECODERS, SIGNATURES, decode


@pytest.fixture
def any_name(tmp_path: Path) -> None:
    """Skip where the file system does not keep the names that the cases need."""
    try:
        for name in (b"cat", b"Cat", b"k\xe4fer", "caf\u00e9".encode(), "cafe\u0301".encode()):
            (tmp_path / os.fsdecode(name)).touch()
    except OSError:
        pytest.skip("a file system of UTF-8 alone")
    if len(os.listdir(tmp_path)) < 5:
        pytest.skip("a file system that takes two names for one")


documented = pytest.mark.skipif(not PAGE.exists(), reason="a copy without the documents")


@pytest.mark.parametrize("picture", READ, ids=lambda picture: picture.what)
def test_what_is_read_is_seen_as_the_page_says(picture: Picture) -> None:
    assert picture.how and picture.seen is not None
    if not picture.content:
        pytest.skip("pillow-heif is not installed (the extra heic)")
    found = decode(picture.content).numpy()
    assert found.shape == picture.seen.shape
    assert np.abs(found.astype(int) - picture.seen).max() <= picture.tolerance
    assert decode(picture.content, size=8).shape == (8, 8, 3)


@pytest.mark.parametrize("picture", REFUSED, ids=lambda picture: picture.what)
def test_what_is_not_read_is_said_to_be_so_in_a_sentence_about_it(picture: Picture) -> None:
    message = refusal(picture.content)
    assert message.startswith(("It ", "Its ")) and message.endswith(".") and "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.what)
def test_a_place_is_learned_from_or_refused_as_the_page_says(place: Place, any_name: None) -> None:
    learned, said = outcome(place)
    assert learned == place.learned, said
    assert said.isprintable() and said.endswith(".")
    assert "/tmp" not in said


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
