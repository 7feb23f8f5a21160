"""Reading the folder of a model, at any time and without a lock; `folder.py` describes it and writes to it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from engram import storage
from engram.errors import BusyError, DataError, UsageError
from engram.model.generations import (
    GENERATIONS,
    MANIFEST,
    NETWORKS,
    CheckShapes,
    GenerationReader,
    find_strays,
    generation_number,
    generation_path,
    is_folder,
    is_network_file,
    list_folder,
    network_path,
    read_manifest,
    unchecked,
)
from engram.model.manifest import MAX_BYTES, Change, Manifest, NewerError, Pointer

CURRENT, LOCK = "current.json", ".lock"
WATCH = "watch"  # the folder of `engram watch`; it may be there before the model
TRIES = 20  # how often a reader starts again because a writer replaced what it was reading

T = TypeVar("T")
# Finds problems in an intact generation.
Check = Callable[[Manifest, Mapping[str, Tensor]], Iterable[str]]


class FolderReader:
    """Reads a model's folder, without a lock: if a writer changes it meanwhile, reading starts again."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def exists(self) -> bool:
        """Whether there is a model, intact or damaged."""
        if not self._begun():
            return False
        try:
            return self.pointer().current is not None
        except DataError:
            return True

    def require(self) -> None:
        """Raise DataError if there is no model. Call it before `writing`, which creates the folder."""
        if not self.exists():
            raise DataError(f"There is no model in {self.path}. Make one with: engram learn {self._quoted} FOLDER")

    def current(self) -> Manifest:
        """The manifest of the generation in use."""
        return self._retry(lambda pointer: self._manifest(pointer, self._number(pointer, None)))

    def generations(self) -> list[int]:
        """The numbers of the generations there are, oldest first."""
        return self._retry(lambda pointer: sorted(pointer.generations))

    def history(self) -> tuple[Change, ...]:
        """How every generation that was ever made came about, oldest first."""
        return self._retry(self._history)

    def manifests(self) -> list[Manifest]:
        """The manifests of all generations that can be read, oldest first."""
        found = []
        for number, digest in sorted(self._all_digests().items()):
            with suppress(DataError):
                found.append(read_manifest(self.path, number, digest))
        return found

    def load(self, generation: int | None = None, check: CheckShapes = unchecked) -> tuple[Manifest, dict[str, Tensor]]:
        """A generation (default: the one in use), from the very bytes whose checksums were verified.

        `check` gets the types and shapes of its tensors before they are read, and may raise DataError.
        """

        def read(pointer: Pointer) -> tuple[Manifest, dict[str, Tensor]]:
            number = self._number(pointer, generation)
            manifest, tensors, problems = GenerationReader(self.path, check).read(number, pointer.generations[number])
            if manifest is None or problems:
                raise problems[0]
            return manifest, tensors

        return self._retry(read)

    def pointer(self) -> Pointer:
        """The content of `current.json`."""
        return Pointer.parse(storage.read_inside(self.path, CURRENT, MAX_BYTES), CURRENT)

    def number_in_use(self) -> int | None:
        """The number of the generation in use; None if there is none, or `current.json` is damaged."""
        with suppress(DataError):
            return self.pointer().current
        return None

    def digests(self) -> Mapping[int, str]:
        """The generations with the SHA-256 of their manifests; if the pointer is damaged, those on disk."""
        try:
            return self.pointer().generations
        except DataError:
            return self._on_disk()

    def _all_digests(self) -> dict[int, str]:
        """`digests`, and generations on disk that are newer than these. The digest of a damaged manifest is ""."""
        digests = self.digests()
        return {**digests, **self._on_disk(after=max(digests, default=0))}

    def problems(
        self,
        check: Check = lambda manifest, tensors: (),
        check_shapes: CheckShapes = unchecked,
    ) -> list[str]:
        """A sentence for each problem of the folder or found by the checks. Unfinished writes are not problems."""
        if not self._begun():
            return [f"There is no model in {self.path}."]
        for _ in range(TRIES):
            before = self._content()
            found = self._problems(check, check_shapes)
            if not found or self._content() == before:
                break
        return list(dict.fromkeys(map(str, found)))  # generations may share a damaged network file

    def leftovers(self) -> list[str]:
        """What interrupted writers left, relative to the folder: the next writer removes it."""
        if not self._begun():
            return []
        asides = [
            path
            for folder in (self.path, self.path / GENERATIONS, self.path / NETWORKS)
            for path in list_folder(folder, lambda entry: entry.name.startswith(storage.ASIDE))
        ]
        return sorted(str(path.relative_to(self.path)) for path in (*asides, *self._unused()))

    def newer(self) -> list[int]:
        """The generations on disk that come after all that `current.json` names."""
        with suppress(DataError):
            last = max(self.pointer().generations, default=0)
            return sorted(number for number in self._folders() if number > last)
        return []

    def finishing(self) -> str:
        """A command that changes nothing but removes what an interrupted writer left."""
        return f"engram rollback {self._quoted} --to {self.number_in_use()}"

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.path))

    def _begun(self) -> bool:
        """Whether any part of a model is here, even if no generation was saved yet."""
        if storage.is_there(self.path / CURRENT) or (self.path / GENERATIONS).is_symlink():
            return True
        return bool(self._folders())  # something else, such as a folder of images, may have a folder "generations" too

    def _content(self) -> bytes | str:
        """The bytes of `current.json`, or why it cannot be read. It changes when a writer replaces the file."""
        try:
            return storage.read_inside(self.path, CURRENT, MAX_BYTES)
        except DataError as error:
            return str(error)

    def _retry(self, read: Callable[[Pointer], T]) -> T:
        """Read from the pointer on, and start again if a writer meanwhile removed what it names."""
        self.require()
        for _ in range(TRIES):
            before = self._content()
            try:
                return read(self.pointer())
            except DataError as error:
                if self._content() == before:
                    raise self._explained(error) from error
        raise BusyError(f"The model {self.path} is changed faster than it can be read. Try again.")

    def _explained(self, error: DataError) -> DataError:
        """An error about a file as one about the model, with the remedy."""
        if isinstance(error, NewerError):
            return NewerError(f"The model {self.path} cannot be read: {error}")
        reader = GenerationReader(self.path)
        newest_first = sorted(self._all_digests().items(), reverse=True)
        intact = next((number for number, digest in newest_first if not reader.read(number, digest).problems), None)
        if intact is None:
            remedy = "No generation of it is intact. Restore the folder from a copy."
        else:
            remedy = f"Generation {intact} is intact. Go back to it with: engram rollback {self._quoted} --to {intact}"
        return DataError(f"The model {self.path} is damaged: {error} {remedy}")

    def _number(self, pointer: Pointer, generation: int | None) -> int:
        number = pointer.current if generation is None else generation
        if number is None or number not in pointer.generations:
            known = ", ".join(map(str, sorted(pointer.generations))) or "none"
            raise UsageError(f"There is no generation {number} in {self.path}. There are: {known}.")
        return number

    def _manifest(self, pointer: Pointer, number: int) -> Manifest:
        return read_manifest(self.path, number, pointer.generations[number])

    def _history(self, pointer: Pointer) -> tuple[Change, ...]:
        """From the newest generation that can be read: going back to an earlier one does not undo history."""
        newest, *others = sorted(pointer.generations, reverse=True)
        for number in (newest, *others):
            with suppress(DataError):
                return self._manifest(pointer, number).history
        return self._manifest(pointer, newest).history

    def _folders(self) -> dict[int, Path]:
        """The folders of generations by number, whether `current.json` names them or not."""
        paths = list_folder(self.path / GENERATIONS, is_folder)
        return {number: path for path in paths if (number := generation_number(path.name)) is not None}

    def _with_newer(self, pointer: Pointer) -> Pointer:
        """The pointer with the generations on disk that are newer than all it names, if their manifests are intact."""
        newer = self._on_disk(after=max(pointer.generations, default=0)).items()
        intact = {number: digest for number, digest in newer if digest}
        return dataclasses.replace(pointer, generations={**pointer.generations, **intact})

    def _on_disk(self, after: int = 0) -> dict[int, str]:
        """The generations on disk after this number, with "" for those whose manifest is damaged.

        None from before a `forget`: such are there if its writer was killed before removing them.
        """
        found: dict[int, str] = {}
        for number in sorted(number for number in self._folders() if number > after):
            found[number] = ""
            with suppress(DataError):
                content = storage.read_inside(self.path, f"{generation_path(number)}/{MANIFEST}", MAX_BYTES)
                digest = hashlib.sha256(content).hexdigest()
                first = read_manifest(self.path, number, digest).parent is None
                found = {**({} if first else found), number: digest}
        return found

    def _unused(self) -> list[Path]:
        """Folders of older generations that `current.json` does not name, and network files that no generation uses."""
        try:
            pointer = self.pointer()
        except DataError:  # any of them may be in use
            return []
        last = max(pointer.generations, default=0)
        unused = [path for n, path in self._folders().items() if n < last and n not in pointer.generations]
        with suppress(DataError):  # with a damaged manifest any network may be in use
            files = [read_manifest(self.path, *each).network for each in self._all_digests().items()]
            used = {self.path / network_path(file) for file in files if file is not None}
            unused += [path for path in list_folder(self.path / NETWORKS, is_network_file) if path not in used]
        return unused

    def _problems(self, check: Check, check_shapes: CheckShapes) -> list[DataError]:
        try:
            empty = self.pointer().current is None
            found = [DataError(f"{CURRENT} names no generation: nothing was learned yet.")] if empty else []
        except NewerError as error:
            return [error]
        except DataError as error:
            found = [error]
        digests, reader = self.digests(), GenerationReader(self.path, check_shapes)
        for number, digest in sorted(digests.items()):
            manifest, tensors, damage = reader.read(number, digest)
            found += damage
            if manifest is not None and not damage:
                found += map(DataError, check(manifest, tensors))
        return found + self._strays(set(digests))

    def _strays(self, numbers: set[int]) -> list[DataError]:
        """What does not belong to the model, at the top and in its two folders."""

        def belongs(entry: os.DirEntry[str]) -> bool:
            if entry.name.startswith(storage.ASIDE):
                return True
            place = os.path.relpath(os.path.dirname(entry.path), self.path)
            if place == NETWORKS:
                return is_network_file(entry)
            if place == GENERATIONS:
                number = generation_number(entry.name)
                return number in numbers or (number is not None and is_folder(entry))
            return entry.name in (LOCK, CURRENT, GENERATIONS) or (entry.name in (NETWORKS, WATCH) and is_folder(entry))

        found = find_strays(self.path, "", belongs)
        for folder in (GENERATIONS, NETWORKS):
            found += find_strays(self.path, folder, belongs) if os.path.isdir(self.path / folder) else []
        with suppress(OSError):
            lock = (self.path / LOCK).lstat()
            if not stat.S_ISREG(lock.st_mode) or lock.st_size:
                found.append(DataError(f"{LOCK} is not an empty file. Remove it."))
        return found
