"""`Files`: the pictures of an index as images, each decoded when it is asked for.

A run of days must not end because of one file. Of a JPEG that is cut short, what there is of it is used; a grey image
stands in for what cannot be decoded at all. Each such file is named in a warning, once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from engram.data.images import JPEG_END, Fit, UnreadableImage, content_of, decode
from engram.data.index import Index
from engram.data.lazy import Lazy, Pixels, filled
from engram.errors import DataError, EngramWarning
from engram.text import printable

DECODING = 1  # to be counted up when the same file gives another image than before
GREY = 128
NAMED = 20  # files that warnings name
FEW = 10  # unreadable files among those asked for at once, or a tenth of them: with more, the disk or the data is wrong

PARTLY = "What there is of it is used."
NOT_AT_ALL = "A grey image stands in for it."
CHANGED = "What it holds now is used, and the next run will see other data."


class _Problem(NamedTuple):
    row: int
    reason: str
    consequence: str


class Files(Lazy):
    """Images (N, size, size, 3) of all pictures of an index."""

    def __init__(self, index: Index, size: int, fit: Fit, workers: int | None = None) -> None:
        self.index, self.size, self.fit, self.workers = index, size, fit, workers
        self.shape = (len(index), size, size, 3)
        self.problems: dict[int, str] = {}  # what was found wrong so far, by row
        self._telling = threading.Lock()

    def __getitem__(self, rows: Tensor) -> Tensor:
        asked, found = rows.tolist(), []

        def make(number: int, pixels: Pixels) -> None:
            if problem := self._decode(asked[number], pixels):
                found.append(problem)

        images = filled(len(asked), self.shape[1:], make, self.workers)
        if found:
            self._tell(sorted(found), len(asked))
        return images

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        yield f"decoded by {DECODING} to {self.size}, {self.fit}".encode()
        yield from self.index.identity(rows)

    def _decode(self, row: int, pixels: Pixels) -> _Problem | None:
        """Write the image of a row; what was wrong with its file, if anything."""
        try:
            content = content_of(self.index.path(row))
        except UnreadableImage as error:
            pixels[:] = GREY
            return _Problem(row, str(error), NOT_AT_ALL)
        try:
            pixels[:] = decode(content, size=self.size, fit=self.fit).numpy()
        except UnreadableImage as error:
            try:
                pixels[:] = decode(content + JPEG_END, size=self.size, fit=self.fit).numpy()
                return _Problem(row, str(error), PARTLY)
            except UnreadableImage:
                pixels[:] = GREY
                return _Problem(row, str(error), NOT_AT_ALL)
        before = int(self.index.sizes[row])
        if len(content) == before:
            return None
        self.index.drop()
        return _Problem(row, f"It had {before:,} bytes when it was found, and has {len(content):,} now.", CHANGED)

    def _tell(self, found: list[_Problem], asked: int) -> None:
        """Warn of files that were not warned of before. Where too many cannot be read at all, it is no accident."""
        unreadable = [problem for problem in found if problem.consequence == NOT_AT_ALL]
        if len(unreadable) > max(FEW, asked // 10):
            first = unreadable[0]
            raise DataError(
                f"Of {asked:,} files, {len(unreadable):,} cannot be read. {printable(self.index.path(first.row))}: "
                f"{first.reason} See whether {printable(self.index.root)} is there, and whole."
            )
        with self._telling:
            new = [problem for problem in found if problem.row not in self.problems]
            room = max(NAMED - len(self.problems), -1)
            sentences = [
                f"{printable(self.index.path(row))}: {reason} {consequence}" for row, reason, consequence in new
            ]
            self.problems |= {problem.row: sentence for problem, sentence in zip(new, sentences, strict=True)}
        for sentence in sentences[: max(room, 0)]:
            warnings.warn(sentence, EngramWarning, stacklevel=2)
        if 0 <= room < len(new):
            warnings.warn(f"More files in {printable(self.index.root)} are like these.", EngramWarning, stacklevel=2)
