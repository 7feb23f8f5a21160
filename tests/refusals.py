"""The calls in which a disk may fail, as seen from Python."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from engram import storage


def always(*arguments: Any, **options: Any) -> bool:
    return True


def to_write(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> bool:
    return "w" in mode


# The module of a function, its name, and which calls of it count.
STEPS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "sync": (os, "fsync", always),
    "replace": (os, "replace", always),
    "rename": (os, "rename", always),
    "make a folder": (os, "mkdir", always),
    "open to write": (io, "open", to_write),
    "remove": (storage, "remove", always),
}


class Failing:
    """A function that fails when it is called for the n-th time, once or from then on."""

    def __init__(
        self,
        function: Callable[..., Any],
        number: int,
        code: int,
        concerns: Callable[..., bool],
        *,
        forever: bool = False,
    ) -> None:
        self.function, self.left, self.code, self.concerns, self.forever = function, number, code, concerns, forever

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.concerns(*arguments, **options):
            self.left -= 1
            if self.left == 0 or (self.left < 0 and self.forever):
                raise OSError(self.code, os.strerror(self.code))
        return self.function(*arguments, **options)
