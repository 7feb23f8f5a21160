"""Reading a model's folder: without a lock, never a half state, and nothing that is damaged."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from engram import storage
from engram.errors import BusyError, DataError, UsageError
from engram.model.generation import GENERATIONS, inspect, number_of, read_manifest, strangers
from engram.model.manifest import Change, Manifest, NewerError, Pointer
from engram.model.networks import NETWORKS, NetworkReader, is_network_file, network_files, network_path
from engram.model.sealed import LONGEST

CURRENT = "current.json"
LOCK = ".lock"
TRIES = 20  # how often a reader begins again because a writer was faster

T = TypeVar("T")
# Finds problems in a generation whose files are intact.
Check = Callable[[Manifest, Mapping[str, Tensor]], Iterable[str]]


class Reader:
    """What can be known of a model without changing it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def exists(self) -> bool:
        """Whether there is a model, whole or damaged."""
        if not self.begun():
            return False
        try:
            return self.pointer().current is not None
        except DataError:
            return True

    def require(self) -> None:
        """Refuse to go on where there is no model. Whoever changes one asks this first: `writing` makes a folder."""
        if not self.exists():
            raise DataError(f"There is no model in {self.path}. Make one with: engram learn {self._quoted} FOLDER")

    def current(self) -> Manifest:
        """The manifest of the generation in use."""
        return self._steadily(lambda pointer: self._manifest(pointer, self._named(pointer, None)))

    def generations(self) -> list[int]:
        """The numbers of the generations there are, oldest first."""
        return self._steadily(lambda pointer: sorted(pointer.generations))

    def history(self) -> tuple[Change, ...]:
        """How every generation that was ever made came about, oldest first."""
        return self._steadily(self._history)

    def load(self, generation: int | None = None) -> tuple[Manifest, dict[str, Tensor]]:
        """A generation, the one in use unless told otherwise: the very bytes whose checksums were right."""

        def read(pointer: Pointer) -> tuple[Manifest, dict[str, Tensor]]:
            number = self._named(pointer, generation)
            digest = pointer.generations[number]
            manifest, tensors, problems = inspect(self.path, number, digest, NetworkReader(self.path))
            if manifest is None or problems:
                raise problems[0]
            return manifest, tensors

        return self._steadily(read)

    def problems(self, check: Check = lambda manifest, tensors: ()) -> list[str]:
        """What is wrong with the folder, a sentence each, with what `check` finds. Unfinished writes are not wrong."""
        if not self.begun():
            return [f"There is no model in {self.path}."]
        for _ in range(TRIES):
            before = self._content()
            found = self._problems(check)
            if not found or self._content() == before:
                break
        return list(dict.fromkeys(map(str, found)))  # generations may share a damaged network file

    def begun(self) -> bool:
        """Whether anything of a model is here, be it one of which nothing was saved yet."""
        if storage.is_there(self.path / CURRENT) or (self.path / GENERATIONS).is_symlink():
            return True
        return bool(self.folders())  # of another thing, such as pictures, there may be generations too

    def pointer(self) -> Pointer:
        """What `current.json` says."""
        return Pointer.unsealed(storage.read_inside(self.path, CURRENT, LONGEST), CURRENT)

    def folders(self) -> dict[int, Path]:
        """The folders of generations by number, whether `current.json` names them or not."""
        root = self.path / GENERATIONS
        numbers: dict[Path, int | None] = {}
        with suppress(OSError):  # as of a folder that is no folder: then there are none
            if not root.is_symlink():
                with os.scandir(root) as entries:
                    numbers = {Path(entry.path): number_of(entry.name) for entry in entries if _is_folder(entry)}
        return {number: path for path, number in numbers.items() if number is not None}

    def unnamed(self) -> list[Path]:
        """The folders of generations that `current.json` does not name: a writer will name them, or left them."""
        try:
            named = self.pointer().generations
        except DataError:  # then nobody knows which of them matter
            return []
        return [path for number, path in self.folders().items() if number not in named]

    def unused_networks(self) -> list[Path]:
        """The network files that no generation uses."""
        try:
            pointer = self.pointer()
            used = [self._manifest(pointer, number).network for number in pointer.generations]
        except DataError:  # any file may be in use
            return []
        paths = {self.path / network_path(file) for file in used if file is not None}
        return [path for path in network_files(self.path) if path not in paths]

    def digests(self) -> Mapping[int, str | None]:
        """The generations with the SHA-256 of their manifests; unknown ones, of those on disk, without a pointer."""
        try:
            return self.pointer().generations
        except DataError:
            return dict.fromkeys(self._on_disk())

    def _on_disk(self) -> list[int]:
        """The generations that may be used when the pointer is lost, oldest first: none from before a forgetting.

        Such are there if the one who published alone was killed before it had removed the others.
        """
        first = 0
        numbers = sorted(self.folders())
        for number in numbers:
            with suppress(DataError):
                first = number if read_manifest(self.path, number, None).parent is None else first
        return [number for number in numbers if number >= first]

    def _content(self) -> bytes | str:
        """What is in `current.json`, or why that cannot be said. It tells whether a writer replaced it."""
        try:
            return storage.read_inside(self.path, CURRENT, LONGEST)
        except DataError as error:
            return str(error)

    def _steadily(self, read: Callable[[Pointer], T]) -> T:
        """Read from the pointer on, and from there again if a writer meanwhile took away what it named."""
        self.require()
        for _ in range(TRIES):
            before = self._content()
            try:
                return read(self.pointer())
            except DataError as error:
                if self._content() == before:
                    raise self._explained(error) from error
        raise BusyError(f"The model {self.path} is changed faster than it can be read. Try again.")

    def _named(self, pointer: Pointer, generation: int | None) -> int:
        number = pointer.current if generation is None else generation
        if number is None or number not in pointer.generations:
            known = ", ".join(map(str, sorted(pointer.generations))) or "none"
            raise UsageError(f"There is no generation {number} in {self.path}. There are: {known}.")
        return number

    def _manifest(self, pointer: Pointer, number: int) -> Manifest:
        return read_manifest(self.path, number, pointer.generations[number])

    def _history(self, pointer: Pointer) -> tuple[Change, ...]:
        """As the newest generation that can be read knows it: going back to an earlier one undoes no history."""
        newest, *others = sorted(pointer.generations, reverse=True)
        for number in (newest, *others):
            with suppress(DataError):
                return self._manifest(pointer, number).history
        return self._manifest(pointer, newest).history

    def _explained(self, error: DataError) -> DataError:
        """An error about a file as one about the model, with the way out of it."""
        if isinstance(error, NewerError):
            return NewerError(f"The model {self.path} cannot be read: {error}")
        digests, networks = self.digests(), NetworkReader(self.path)
        newest_first = sorted(digests, reverse=True)
        whole = next((n for n in newest_first if not inspect(self.path, n, digests[n], networks).problems), None)
        if whole is None:
            remedy = "No generation of it is whole. Restore the folder from a copy."
        else:
            remedy = f"Generation {whole} is whole. Go back to it with: engram rollback {self._quoted} --to {whole}"
        return DataError(f"The model {self.path} is damaged: {error} {remedy}")

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.path))

    def _problems(self, check: Check) -> list[DataError]:
        try:
            empty = self.pointer().current is None
            found = [DataError(f"{CURRENT} names no generation: nothing was learned yet.")] if empty else []
        except NewerError as error:
            return [error]
        except DataError as error:
            found = [error]
        digests, networks = self.digests(), NetworkReader(self.path)
        for number in sorted(digests):
            manifest, tensors, damage = inspect(self.path, number, digests[number], networks)
            found += damage
            if manifest is not None and not damage:
                found += map(DataError, check(manifest, tensors))
        return found + self._strangers(digests)

    def _strangers(self, numbers: Collection[int]) -> list[DataError]:
        def known(entry: os.DirEntry[str]) -> bool:
            return entry.name in (LOCK, CURRENT, GENERATIONS) or (entry.name == NETWORKS and _is_folder(entry))

        def belongs(entry: os.DirEntry[str]) -> bool:
            number = number_of(entry.name)
            return number in numbers or (number is not None and _is_folder(entry)) or _is_aside(entry)

        found = strangers(self.path, "", lambda entry: known(entry) or _is_aside(entry))
        if os.path.isdir(self.path / GENERATIONS):
            found += strangers(self.path, GENERATIONS, belongs)
        if os.path.isdir(self.path / NETWORKS):
            found += strangers(self.path, NETWORKS, lambda entry: is_network_file(entry) or _is_aside(entry))
        with suppress(OSError):
            lock = (self.path / LOCK).lstat()
            if not stat.S_ISREG(lock.st_mode) or lock.st_size:
                found.append(DataError(f"{LOCK} is not an empty file. Remove it."))
        return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_aside(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(storage.ASIDE)
