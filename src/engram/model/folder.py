"""The folder of a model that is kept for years: a generation in use, and some earlier ones to go back to.

MODEL/
    .lock         held by whoever writes; readers take no lock
    current.json  which generation is in use, and the SHA-256 of the manifest of every one there is
    generations/  a folder per generation, never changed once it is there

Everything that is read is reached from `current.json` by a chain of checksums, and is JSON or safetensors: nothing that
is loaded can run code. Checksums find damage, not forgery: whoever can write the folder can write checksums too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engram import storage
from engram.errors import EngramError, UsageError
from engram.model.generation import GENERATIONS
from engram.model.reading import CURRENT, LOCK, Reader
from engram.model.writing import Writer, disk_errors


class ModelFolder(Reader):
    """A model's folder: read by anyone at any time, changed by one at a time inside `with folder.writing()`."""

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Hold the folder, made if need be, for one writer, and sweep what killed ones left.

        A folder in which no model comes to be, because of an error, is left as it was found.
        """
        self.check_place()
        with disk_errors(f"The folder {self.path} cannot be written to"):
            made = list(
                itertools.takewhile(lambda folder: not os.path.lexists(folder), (self.path, *self.path.parents))
            )
            storage.make_folder(self.path)
        try:
            with ExitStack() as held:
                with disk_errors(f"The folder {self.path} cannot be written to"):
                    held.enter_context(storage.locked(self.path))
                    held.callback(self._leave)
                    writer = Writer(self.path)
                    writer.sweep()
                yield writer
        finally:
            with suppress(OSError, EngramError):
                if made and not self.begun():
                    for folder in made:
                        folder.rmdir()

    def _leave(self) -> None:
        """Without a model there is nothing to keep: what was begun for one goes, in an order that can be cut short."""
        with suppress(OSError, EngramError):
            if not self.exists():
                if storage.is_there(self.path / GENERATIONS):
                    (self.path / GENERATIONS).rmdir()
                (self.path / CURRENT).unlink(missing_ok=True)
                (self.path / LOCK).unlink()

    def verify(self) -> list[str]:
        """What is wrong with the folder, a sentence each; none, if all of it is as it was saved.

        What a killed writer left is no damage. It is swept first, if nobody is writing and the folder is writable.
        """
        left: list[str] = []
        asides: list[Path] = []
        with suppress(OSError):  # a place that may not be looked at has no litter of ours
            asides = [*self.path.glob(f"{storage.ASIDE}*"), *(self.path / GENERATIONS).glob(f"{storage.ASIDE}*")]
        if asides or self.unnamed():
            try:
                with storage.locked(self.path):
                    Writer(self.path).sweep()
            except EngramError:  # another is writing, or this one may not
                pass
            except OSError as error:
                left = [f"What a killed writer left cannot be removed: {error}."]
        return left + self.problems()

    def check_place(self) -> None:
        """Refuse a place that is taken by something that is no model."""
        if not storage.is_there(self.path):
            return
        if not self.path.is_dir():
            raise UsageError(f"{self.path} is not a folder, and a model is one. Choose an empty or new folder.")
        with disk_errors(f"The folder {self.path} cannot be read"), os.scandir(self.path) as entries:
            names = {entry.name for entry in entries if not entry.name.startswith(storage.ASIDE)} - {LOCK}
        if names and not self.begun():
            raise UsageError(f"{self.path} holds something else ({min(names)}). Choose an empty or new folder.")
