"""Reading the folder of a model, at any time and without a lock; `folder.py` describes it and writes to it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from engram import storage
from engram.errors import BusyError, DataError, UsageError
from engram.model.manifest import MAX_BYTES, Change, File, Manifest, NewerError, Pointer
from engram.storage import TensorShape

CURRENT, LOCK, GENERATIONS, NETWORKS = "current.json", ".lock", "generations", "networks"
WATCH = "watch"  # the folder of `engram watch`; it may be there before the model
MANIFEST, LEARNER = "manifest.json", "learner.safetensors"
TRIES = 20  # how often a reader starts again because a writer replaced what it was reading

T = TypeVar("T")
# Raises DataError unless a model can have tensors of these types and shapes.
CheckShapes = Callable[[Manifest, Mapping[str, TensorShape]], None]
# Finds problems in an intact generation.
FindProblems = Callable[[Manifest, Mapping[str, Tensor]], Iterable[str]]


def accept(*checked: Any) -> None:
    """A check that finds nothing wrong."""


class Contents(NamedTuple):
    """A generation as it was read. It may be used if there are no problems."""

    manifest: Manifest | None
    tensors: dict[str, Tensor]
    problems: list[DataError]


def generation_path(number: int) -> str:
    """The folder of a generation, relative to the model's."""
    return f"{GENERATIONS}/{number:06d}"


def network_path(file: File) -> str:
    """A network file, relative to the model's folder."""
    return f"{NETWORKS}/{file.sha256}.safetensors"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_network(entry: os.DirEntry[str]) -> bool:
    named = re.fullmatch(r"[0-9a-f]{64}\.safetensors", entry.name)
    return named is not None and entry.is_file(follow_symlinks=False)


def _generation_number(name: str) -> int | None:
    """The number of the generation whose folder has this name."""
    number = int(name) if re.fullmatch(r"[0-9]{6,18}", name) else 0
    return number if number and f"{number:06d}" == name else None


def _list_folder(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    """The wanted entries of a folder; none if it is a link, or cannot be listed."""
    with suppress(OSError):
        if not folder.is_symlink():
            with os.scandir(folder) as entries:
                return [Path(entry.path) for entry in entries if wanted(entry)]
    return []


def _find_strays(model: Path, folder: str, belongs: Callable[[os.DirEntry[str]], bool]) -> list[DataError]:
    """An error for each entry of a folder of the model that does not belong there."""
    try:
        with os.scandir(model / folder) as entries:
            names = sorted(entry.name for entry in entries if not belongs(entry) and os.path.lexists(entry.path))
    except OSError as error:
        return [DataError(f"{folder or 'The folder'} cannot be listed: {error.strerror}.")]
    return [DataError(f"{Path(folder, name)} does not belong to the model. Remove it.") for name in names]


def _read_manifest(model: Path, number: int, digest: str | None = None) -> tuple[Manifest, str]:
    """The manifest of a generation and its SHA-256, which must be `digest` if that is given."""
    name = f"{generation_path(number)}/{MANIFEST}"
    content = storage.read_inside(model, name, MAX_BYTES)
    manifest, found = Manifest.parse(content, name), hashlib.sha256(content).hexdigest()
    if manifest.generation != number:
        raise DataError(f"{name} is the manifest of generation {manifest.generation}.")
    if digest not in (None, found):
        raise DataError(f"{name} was changed: it is not the manifest that was saved.")
    return manifest, found


class _GenerationReader:
    """Reads and checks generations of a model; network files, which they share, once each.

    Sizes and checksums of all files are compared, and the types and shapes of their tensors given to `check`, which may
    raise DataError, before any file is read into memory.
    """

    def __init__(self, model: Path, check: CheckShapes = accept) -> None:
        self.model, self.check = model, check
        self.shapes = functools.cache(functools.partial(_verified_shapes, model))
        self.networks = functools.cache(functools.partial(_verified_tensors, model))

    def read(self, number: int, digest: str) -> Contents:
        """A generation, with every file checked."""
        folder = generation_path(number)
        manifest: Manifest | None = None
        tensors: dict[str, Tensor] = {}
        found: list[DataError] = []
        try:
            manifest, _ = _read_manifest(self.model, number, digest)
            files = {} if manifest.network is None else {network_path(manifest.network): manifest.network}
            files[f"{folder}/{LEARNER}"] = manifest.learner
            shapes = [self.shapes(name, file) for name, file in files.items()]
            found += (each for each in shapes if isinstance(each, DataError))
            if not found:
                try:
                    self.check(manifest, {name: each for some in shapes for name, each in some.items()})  # type: ignore[union-attr]
                except DataError as error:
                    raise DataError(f"{folder}: {error}") from error
                for name, file in files.items():
                    shared = file == manifest.network
                    tensors |= self.networks(name, file) if shared else _verified_tensors(self.model, name, file)
        except DataError as error:
            found.append(error)
        path = self.model / folder
        if os.path.isdir(path) and not os.path.islink(path):  # otherwise the manifest could not be read
            found += _find_strays(self.model, folder, lambda entry: entry.name in (MANIFEST, LEARNER))
        return Contents(manifest, tensors, found)


def _verified_shapes(model: Path, name: str, file: File) -> dict[str, TensorShape] | DataError:
    """The types and shapes of the tensors in a file, or what is wrong with its size, checksum or header."""
    try:
        with storage.open_inside(model, name, file.bytes) as (opened, size):
            if size < file.bytes:
                return DataError(f"{name} was cut short: it has {size} of {file.bytes} bytes.")
            if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                return DataError(f"{name} was changed: it does not have the SHA-256 it was saved with.")
            opened.seek(0)
            return storage.read_shapes(opened, size, name)
    except DataError as error:
        return error


def _verified_tensors(model: Path, name: str, file: File) -> dict[str, Tensor]:
    content = storage.read_inside(model, name, file.bytes)
    if hashlib.sha256(content).hexdigest() != file.sha256:  # the very bytes that are used
        raise DataError(f"{name} was changed while it was read.")
    return storage.parse_tensors(content, name)


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

    def pointer(self) -> Pointer:
        """The content of `current.json`."""
        return Pointer.parse(storage.read_inside(self.path, CURRENT, MAX_BYTES), CURRENT)

    def current(self) -> Manifest:
        """The manifest of the generation in use."""
        return self._retry(lambda pointer: self._manifest(pointer, self._number(pointer, None)))

    def generations(self) -> list[int]:
        """The numbers of the generations there are, oldest first."""
        return self._retry(lambda pointer: sorted(pointer.generations))

    def history(self) -> tuple[Change, ...]:
        """How every generation that was ever made came about, oldest first."""
        return self._retry(self._history)

    def load(self, generation: int | None = None, check: CheckShapes = accept) -> tuple[Manifest, dict[str, Tensor]]:
        """A generation (default: the one in use), from the very bytes whose checksums were verified.

        `check` gets the types and shapes of its tensors before they are read, and may raise DataError.
        """
        return self._retry(lambda pointer: self._intact(pointer, generation, check))

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

    def manifests(self) -> list[Manifest]:
        """The manifests of all generations that can be read, oldest first."""
        found = []
        for number, digest in sorted(self._all_digests().items()):
            with suppress(DataError):
                found.append(_read_manifest(self.path, number, digest)[0])
        return found

    def newer(self) -> list[int]:
        """The generations on disk that come after all that `current.json` names."""
        with suppress(DataError):
            return sorted(self._on_disk(after=max(self.pointer().generations, default=0)))
        return []

    def leftovers(self) -> list[str]:
        """What interrupted writers left, relative to the folder: the next writer removes it."""
        if not self._begun():
            return []
        folders = (self.path, self.path / GENERATIONS, self.path / NETWORKS)
        asides = [_list_folder(each, lambda entry: entry.name.startswith(storage.ASIDE)) for each in folders]
        return sorted(str(path.relative_to(self.path)) for path in (*itertools.chain(*asides), *self._unused()))

    def problems(self, find: FindProblems = lambda *intact: (), check: CheckShapes = accept) -> list[str]:
        """A sentence for each problem of the folder or found by the checks. Unfinished writes are not problems."""
        if not self._begun():
            return [f"There is no model in {self.path}."]
        for _ in range(TRIES):
            before = self._content()
            found = self._problems(find, check)
            if not found or self._content() == before:
                break
        return list(dict.fromkeys(map(str, found)))  # generations may share a damaged network file

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
        reader = _GenerationReader(self.path)
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
        return _read_manifest(self.path, number, pointer.generations[number])[0]

    def _intact(
        self, pointer: Pointer, generation: int | None, check: CheckShapes = accept
    ) -> tuple[Manifest, dict[str, Tensor]]:
        number = self._number(pointer, generation)
        manifest, tensors, problems = _GenerationReader(self.path, check).read(number, pointer.generations[number])
        if manifest is None or problems:
            raise problems[0]
        return manifest, tensors

    def _history(self, pointer: Pointer) -> tuple[Change, ...]:
        """From the newest generation that can be read: going back to an earlier one does not undo history."""
        newest, *others = sorted(pointer.generations, reverse=True)
        for number in (newest, *others):
            with suppress(DataError):
                return self._manifest(pointer, number).history
        return self._manifest(pointer, newest).history

    def _folders(self) -> dict[int, Path]:
        """The folders of generations by number, whether `current.json` names them or not."""
        paths = _list_folder(self.path / GENERATIONS, _is_folder)
        return {number: path for path in paths if (number := _generation_number(path.name)) is not None}

    def _all_digests(self) -> dict[int, str]:
        """`digests`, and generations on disk that are newer than these. The digest of a damaged manifest is ""."""
        digests = self.digests()
        return {**digests, **self._on_disk(after=max(digests, default=0))}

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
                manifest, digest = _read_manifest(self.path, number)
                found = {**({} if manifest.parent is None else found), number: digest}
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
            files = [_read_manifest(self.path, *each)[0].network for each in self._all_digests().items()]
            used = {self.path / network_path(file) for file in files if file is not None}
            unused += [path for path in _list_folder(self.path / NETWORKS, _is_network) if path not in used]
        return unused

    def _problems(self, find: FindProblems, check: CheckShapes) -> list[DataError]:
        try:
            empty = self.pointer().current is None
            found = [DataError(f"{CURRENT} names no generation: nothing was learned yet.")] if empty else []
        except NewerError as error:
            return [error]
        except DataError as error:
            found = [error]
        digests, reader = self.digests(), _GenerationReader(self.path, check)
        for number, digest in sorted(digests.items()):
            manifest, tensors, damage = reader.read(number, digest)
            found += damage
            if manifest is not None and not damage:
                found += map(DataError, find(manifest, tensors))
        return found + self._strays(digests)

    def _strays(self, known: Collection[int]) -> list[DataError]:
        """What does not belong to the model, at the top and in its two folders."""

        def at_top(entry: os.DirEntry[str]) -> bool:
            return entry.name in (LOCK, CURRENT, GENERATIONS) or (entry.name in (NETWORKS, WATCH) and _is_folder(entry))

        def is_generation(entry: os.DirEntry[str]) -> bool:
            number = _generation_number(entry.name)
            return number in known or (number is not None and _is_folder(entry))

        found: list[DataError] = []
        for folder, belongs in (("", at_top), (GENERATIONS, is_generation), (NETWORKS, _is_network)):
            if not folder or os.path.isdir(self.path / folder):
                found += _find_strays(
                    self.path,
                    folder,
                    lambda entry, belongs=belongs: entry.name.startswith(storage.ASIDE) or belongs(entry),  # type: ignore[misc]
                )
        with suppress(OSError):
            lock = (self.path / LOCK).lstat()
            if not stat.S_ISREG(lock.st_mode) or lock.st_size:
                found.append(DataError(f"{LOCK} is not an empty file. Remove it."))
        return found
