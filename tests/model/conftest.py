"""Tests of models do not wait for the disk."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails here, and fsync would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
