"""The folder of a model: the generation in use, and some earlier ones to go back to.

MODEL/
    .lock         held by whoever writes; readers take no lock
    current.json  the generation in use, and the SHA-256 of every generation's manifest
    generations/  a folder per generation, never changed once it is there
    networks/     a file per feature extractor, shared by all generations that use it

Every file that is read is reached from `current.json` by a chain of checksums, and is JSON or safetensors: nothing that
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
from engram.model.networks import NETWORKS
from engram.model.reading import CURRENT, LOCK, Check, Reader
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
        """Without a model, remove what was begun for one, `current.json` late: it marks the folder as engram's."""
        with suppress(OSError, EngramError):
            if not self.exists():
                for name in (GENERATIONS, NETWORKS):
                    if storage.is_there(self.path / name):
                        (self.path / name).rmdir()
                (self.path / CURRENT).unlink(missing_ok=True)
                (self.path / LOCK).unlink()

    def verify(self, check: Check = lambda manifest, tensors: ()) -> list[str]:
        """What is wrong with the folder, a sentence each, with what `check` finds in generations that are intact.

        What a killed writer left is no damage. It is swept first, if nobody is writing and the folder is writable.
        """
        left: list[str] = []
        asides: list[Path] = []
        with suppress(OSError):  # what cannot be listed cannot be swept
            for folder in (self.path, self.path / GENERATIONS, self.path / NETWORKS):
                asides += folder.glob(f"{storage.ASIDE}*")
        if asides or self.unnamed() or self.unused_networks():
            try:
                with storage.locked(self.path):
                    Writer(self.path).sweep()
            except EngramError:  # another is writing, or this one may not
                pass
            except OSError as error:
                left = [f"What a killed writer left cannot be removed: {error}."]
        return left + self.problems(check)

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
