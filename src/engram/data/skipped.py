"""`SkippedFile`: a file that is not among the pictures, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engram.text import printable


@dataclass(frozen=True)
class SkippedFile:
    """A file or folder that is not among the pictures, and a sentence that says why."""

    path: Path
    reason: str

    def to_json(self) -> dict[str, str]:
        """As plain values."""
        return {"path": str(self.path), "reason": self.reason}

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"
