"""Imports without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Inside, nothing is collected: imports leave no garbage, but several searches among 300,000 objects (0.2 s)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # nor is it searched for later
        if was_enabled:
            gc.enable()
