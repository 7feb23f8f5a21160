"""The model in use: what one request sees from its beginning to its end, and the next one when it has changed."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass

from engram.errors import DataError, EngramError
from engram.model import Model, ModelFolder, inconsistencies, restore_model
from engram.server.problems import NoModel

AGAIN = 5.0  # seconds after which one that could not be read is tried again: a file may be back, or memory free
SHARE = 0.1  # of the time at most goes into that: answers wait meanwhile

log = logging.getLogger("engram.server")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A generation of the model, verified."""

    generation: int
    model: Model
    size: int  # the side of the squares that pictures become


class Snapshots:
    """Gives the snapshot of a folder, read anew when another generation is in use there."""

    def __init__(self, folder: ModelFolder, device: str = "auto") -> None:
        self.folder, self.device = folder, device
        self._lock = threading.Lock()
        self._seen: tuple[int, str | None] | None = None  # the generation that was looked at last, and its checksum
        self._again = math.inf  # when to look at it again though it is the same
        self._snapshot: Snapshot | None = None

    @property
    def generation(self) -> int | None:
        """The one that answers; None without a model."""
        snapshot = self._snapshot
        return None if snapshot is None else snapshot.generation

    @property
    def damaged(self) -> int | None:
        """The one that should answer and is damaged; −1 where not even its number can be read."""
        seen = self._seen
        return None if seen is None or seen[0] == self.generation else seen[0]

    def current(self) -> Snapshot:
        """The model as it is now. One that turns out to be damaged is not put in the place of one that is whole."""
        with self._lock:
            seen = self._look()
            if seen is None:
                self._snapshot = self._seen = None
                raise NoModel
            if seen != self._seen or time.monotonic() >= self._again:
                self._exchange(seen)
            if self._snapshot is None:
                raise NoModel(503, "The model is damaged. On the server, 'engram verify' says how, and what helps.")
            return self._snapshot

    def _look(self) -> tuple[int, str | None] | None:
        """Which generation is in use, as far as can be told without reading it."""
        if not self.folder.exists():
            return None
        try:
            pointer = self.folder.pointer()
        except DataError:
            return (-1, None)
        return None if pointer.current is None else (pointer.current, pointer.generations.get(pointer.current))

    def _exchange(self, seen: tuple[int, str | None]) -> None:
        begin, again, changed = time.monotonic(), math.inf, False
        try:
            self._snapshot = self._read()
            changed = self._snapshot.generation != seen[0]  # since it was looked at: then it is looked at again
        except NoModel:
            raise
        except Exception as error:  # whatever a state that is none leads to
            if seen != self._seen:  # said once, not at every try
                _say(error)
            now = time.monotonic()
            again = now + max(AGAIN, (now - begin) / SHARE)
        self._seen, self._again = None if changed else seen, again

    def _read(self) -> Snapshot:
        manifest, tensors = self.folder.load()
        model = restore_model(manifest, tensors, self.device)
        problems = list(inconsistencies(model))
        if problems:
            raise DataError(" ".join(problems))
        if model.image_size is None:
            raise NoModel(503, "This model has learned vectors, not pictures. It can be asked from Python alone.")
        return Snapshot(manifest.generation, model, model.image_size)


def _say(error: Exception) -> None:
    if isinstance(error, EngramError):
        log.error("The model was not exchanged: %s", error)
    else:
        log.error("The model was not exchanged.", exc_info=error)
