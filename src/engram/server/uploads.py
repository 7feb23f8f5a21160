"""Pictures on their way to a lesson: in one file without a name, which is gone as soon as it is closed."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from typing import IO


class Upload:
    """Files with the names they were sent with and their classes, one after another in one unnamed file."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.classes: list[str] = []
        self.bytes = 0
        self._ends: list[int] = [0]
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`; on Linux it never has a name)
        self._digest = hashlib.sha256()
        self._lock = threading.Lock()

    def add(self, name: str, kind: str, content: bytes) -> None:
        """One more file."""
        self._file.write(content)
        self._file.flush()  # so that a full disk is told now, and not when the lesson's turn has come
        self.names.append(name)
        self.classes.append(kind)
        self.bytes += len(content)
        self._ends.append(self.bytes)
        for part in (name.encode("utf-8", "replace"), kind.encode("utf-8", "replace"), content):
            self._digest.update(len(part).to_bytes(8, "little") + part)

    def content(self, number: int) -> bytes:
        """What is in one of them."""
        begin, end = self._ends[number], self._ends[number + 1]
        with self._lock:
            self._file.seek(begin)
            return self._file.read(end - begin)

    def counts(self) -> dict[str, int]:
        """How many files there are of each class."""
        return dict(Counter(self.classes))

    @property
    def digest(self) -> str:
        """The SHA-256 of all of it."""
        return self._digest.hexdigest()

    def __len__(self) -> int:
        return len(self.names)

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):  # nothing of it is needed any more
            self._file.close()
