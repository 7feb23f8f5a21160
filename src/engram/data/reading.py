"""`Reading`: how the files of a folder data set become images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from engram.data.images import Fit, check_side
from engram.errors import UsageError, unknown
from engram.text import printable


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What may be asked of a data set of files. None leaves it to the data set."""

    size: int | None = None  # pixels a side of the squares that pictures become
    fit: Fit | None = None  # how they become squares
    class_list: Path | None = None  # a file that names the classes to take, one a line
    cache: int | None = None  # bytes that decoded images may take on disk, to be read instead of the files; None: none
    workers: int | None = None  # threads that read and decode; None: as many as torch may use

    def __post_init__(self) -> None:
        if self.size is not None:
            check_side(self.size)
        if self.fit is not None and self.fit not in get_args(Fit):
            raise unknown("fit", self.fit, get_args(Fit))
        if self.cache is not None and self.cache < 1:
            raise UsageError(f"A cache has at least one byte; found {self.cache}.")
        if self.class_list is not None:
            object.__setattr__(self, "class_list", Path(self.class_list))
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"At least one worker must read the files; found {self.workers}.")

    def told(self) -> dict[str, Any]:
        """What was asked of the images themselves, as plain values for the record."""
        told = {
            "image_size": self.size,
            "fit": self.fit,
            "class_list": self.class_list and printable(self.class_list.name),
        }
        return {name: value for name, value in told.items() if value is not None}

    @property
    def asked(self) -> bool:
        """Whether anything is asked for at all."""
        return self != Reading()
