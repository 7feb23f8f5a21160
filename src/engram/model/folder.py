"""The folder of a model: the version in use, and earlier ones to go back to.

MODEL/
    .lock         held by the writer; readers take no lock
    current.json  names the version in use, with the SHA-256 of every version's manifest
    versions/  a folder per version, never changed once it is there
        000007/
            manifest.json        describes it, with the SHA-256 of the other file and of its network file
            learner.safetensors  all tensors except those of the extractor
    networks/     a file per feature extractor, named by its SHA-256, shared by the versions that use it
    watch/        a folder per watched folder: which files were learned (`watching.py`)

Every file is reached from `current.json` by a chain of checksums, and is JSON or safetensors: loading runs no code.
Checksums find damage, not forgery: whoever can write to the folder can write checksums too.

A writer renames a new network file into place, then the version's folder, then replaces `current.json`, then
removes what is no longer used. Each is written aside and synced first. A kill at any moment leaves the old model or the
new one, and files that the next writer removes and names in a warning. Versions newer than all that `current.json`
names are never removed as leftovers: the file may be an older copy. The next publication lists them again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import shlex
import stat
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from engram import storage
from engram.errors import BusyError, DataError, EngramError, EngramWarning, UsageError
from engram.model.manifest import (
    LEARNER,
    MANIFEST,
    MAX_BYTES,
    NETWORKS,
    TIME,
    VERSIONS,
    Change,
    CheckShapes,
    File,
    Manifest,
    NewerError,
    Pointer,
    VersionReader,
    accept,
    find_strays,
    network_path,
    read_manifest,
    version_path,
)
from engram.text import printable

CURRENT, LOCK = "current.json", ".lock"
WATCH = "watch"  # the folder of `engram watch`; it may be there before the model
EXTRACTOR = "network.extractor."  # prefix of the tensors that go into a network file
KEEP = 5  # versions, including the one in use
TRIES = 20  # how often a reader starts again because a writer replaced what it was reading

T = TypeVar("T")
# Raises an error unless a model may have this manifest and these tensors.
CheckTensors = Callable[[Manifest, Mapping[str, Tensor]], None]
# Finds problems in an intact version.
FindProblems = Callable[[Manifest, Mapping[str, Tensor]], Iterable[str]]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_network(entry: os.DirEntry[str]) -> bool:
    named = re.fullmatch(r"[0-9a-f]{64}\.safetensors", entry.name)
    return named is not None and entry.is_file(follow_symlinks=False)


def _version_number(name: str) -> int | None:
    """The number of the version whose folder has this name."""
    number = int(name) if re.fullmatch(r"[0-9]{6,18}", name) else 0
    return number if number and f"{number:06d}" == name else None


def _list_folder(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    """The wanted entries of a folder; none if it is a link, or cannot be listed."""
    with suppress(OSError):
        if not folder.is_symlink():
            with os.scandir(folder) as entries:
                return [Path(entry.path) for entry in entries if wanted(entry)]
    return []


class ModelFolder:
    """A model's folder: read by anyone at any time, changed by one process at a time inside `with folder.writing()`.

    Reading takes no lock: if a writer changes the folder meanwhile, it starts again.
    """

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
        """The manifest of the version in use."""
        return self._retry(lambda pointer: self._manifest(pointer, self._number(pointer, None)))

    def versions(self) -> list[int]:
        """The numbers of the versions there are, oldest first."""
        return self._retry(lambda pointer: sorted(pointer.versions))

    def history(self) -> tuple[Change, ...]:
        """How every version that was ever made came about, oldest first."""
        return self._retry(self._history)

    def load(self, version: int | None = None, check: CheckShapes = accept) -> tuple[Manifest, dict[str, Tensor]]:
        """A version (default: the one in use), from the very bytes whose checksums were verified.

        `check` gets the types and shapes of its tensors before they are read, and may raise DataError.
        """
        return self._retry(lambda pointer: self._intact(pointer, version, check))

    def number_in_use(self) -> int | None:
        """The number of the version in use; None if there is none, or `current.json` is damaged."""
        with suppress(DataError):
            return self.pointer().current
        return None

    def digests(self) -> Mapping[int, str]:
        """The versions with the SHA-256 of their manifests; if the pointer is damaged, those on disk."""
        try:
            return self.pointer().versions
        except DataError:
            return self._on_disk()

    def manifests(self) -> list[Manifest]:
        """The manifests of all versions that can be read, oldest first."""
        found = []
        for number, digest in sorted(self._all_digests().items()):
            with suppress(DataError):
                found.append(read_manifest(self.path, number, digest)[0])
        return found

    def newer(self) -> list[int]:
        """The versions on disk that come after all that `current.json` names."""
        with suppress(DataError):
            return sorted(self._on_disk(after=max(self.pointer().versions, default=0)))
        return []

    def leftovers(self) -> list[str]:
        """What interrupted writers left, relative to the folder: the next writer removes it."""
        if not self._begun():
            return []
        folders = (self.path, self.path / VERSIONS, self.path / NETWORKS)
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
        return list(dict.fromkeys(map(str, found)))  # versions may share a damaged network file

    def cleanup_command(self) -> str:
        """A command that only removes what an interrupted writer left."""
        return f"engram rollback {self._quoted} --to {self.number_in_use()}"

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Hold the folder for one writer; create it if needed, and remove what killed writers left.

        If no model comes to be because of an error, everything is left as it was.
        """
        self.check_place()
        with storage.disk_errors(f"The folder {self.path} cannot be written to"):
            created = list(itertools.takewhile(lambda path: not os.path.lexists(path), (self.path, *self.path.parents)))
            storage.make_folder(self.path)
        try:
            with ExitStack() as stack:
                with storage.disk_errors(f"The folder {self.path} cannot be written to"):
                    removed = stack.enter_context(storage.locked(self.path))
                    stack.callback(self._remove_if_empty)
                    writer = Writer(self.path)
                    removed += writer.sweep()
                if removed:
                    names = ", ".join(printable(path.relative_to(self.path)) for path in removed)
                    what = f"An interrupted command left files in {printable(self.path)}; removed: {names}"
                    warnings.warn(what, EngramWarning, stacklevel=3)
                yield writer
        finally:
            with suppress(OSError, EngramError):
                if created and not self._begun():
                    for folder in created:
                        folder.rmdir()

    def check_place(self) -> None:
        """Raise UsageError if something other than a model is at this path."""
        if not storage.is_there(self.path):
            return
        if not self.path.is_dir():
            raise UsageError(f"{self.path} is not a folder. Choose an empty or new folder for the model.")
        with storage.disk_errors(f"The folder {self.path} cannot be read"), os.scandir(self.path) as entries:
            names = {entry.name for entry in entries if not entry.name.startswith(storage.ASIDE)} - {LOCK, WATCH}
        if names and not self._begun():
            raise UsageError(f"{self.path} holds something else ({min(names)}). Choose an empty or new folder.")

    def _remove_if_empty(self) -> None:
        """Without a model, remove what was created for one; `current.json` last, as it marks the folder as a model."""
        with suppress(OSError, EngramError):
            if not self.exists():
                for name in (VERSIONS, NETWORKS):
                    if storage.is_there(self.path / name):
                        (self.path / name).rmdir()
                (self.path / CURRENT).unlink(missing_ok=True)
                (self.path / LOCK).unlink()

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.path))

    def _begun(self) -> bool:
        """Whether any part of a model is here, even if no version was saved yet."""
        if storage.is_there(self.path / CURRENT) or (self.path / VERSIONS).is_symlink():
            return True
        return bool(self._folders())  # something else, such as a folder of images, may have a folder "versions" too

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
        reader = VersionReader(self.path)
        newest_first = sorted(self._all_digests().items(), reverse=True)
        intact = next((number for number, digest in newest_first if not reader.read(number, digest).problems), None)
        if intact is None:
            remedy = "No version of it is intact. Restore the folder from a copy."
        else:
            remedy = f"Version {intact} is intact. Go back to it with: engram rollback {self._quoted} --to {intact}"
        return DataError(f"The model {self.path} is damaged: {error} {remedy}")

    def _number(self, pointer: Pointer, version: int | None) -> int:
        number = pointer.current if version is None else version
        if number is None or number not in pointer.versions:
            known = ", ".join(map(str, sorted(pointer.versions))) or "none"
            raise UsageError(f"There is no version {number} in {self.path}. There are: {known}.")
        return number

    def _manifest(self, pointer: Pointer, number: int) -> Manifest:
        return read_manifest(self.path, number, pointer.versions[number])[0]

    def _intact(
        self, pointer: Pointer, version: int | None, check: CheckShapes = accept
    ) -> tuple[Manifest, dict[str, Tensor]]:
        number = self._number(pointer, version)
        manifest, tensors, problems = VersionReader(self.path, check).read(number, pointer.versions[number])
        if manifest is None or problems:
            raise problems[0]
        return manifest, tensors

    def _history(self, pointer: Pointer) -> tuple[Change, ...]:
        """From the newest version that can be read: going back to an earlier one does not undo history."""
        numbers = sorted(pointer.versions, reverse=True)
        for number in numbers:
            with suppress(DataError):
                return self._manifest(pointer, number).history
        return self._manifest(pointer, numbers[0]).history

    def _folders(self) -> dict[int, Path]:
        """The folders of versions by number, whether `current.json` names them or not."""
        paths = _list_folder(self.path / VERSIONS, _is_folder)
        return {number: path for path in paths if (number := _version_number(path.name)) is not None}

    def _all_digests(self) -> dict[int, str]:
        """`digests`, and versions on disk that are newer than these. The digest of a damaged manifest is ""."""
        digests = self.digests()
        return {**digests, **self._on_disk(after=max(digests, default=0))}

    def _with_newer(self, pointer: Pointer) -> Pointer:
        """The pointer with the versions on disk that are newer than all it names, if their manifests are intact."""
        newer = self._on_disk(after=max(pointer.versions, default=0)).items()
        intact = {number: digest for number, digest in newer if digest}
        return dataclasses.replace(pointer, versions={**pointer.versions, **intact})

    def _on_disk(self, after: int = 0) -> dict[int, str]:
        """The versions on disk after this number, with "" for those whose manifest is damaged.

        Versions from before a `forget` do not count: its writer may have been killed before it removed them.
        """
        found: dict[int, str] = {}
        for number in sorted(number for number in self._folders() if number > after):
            found[number] = ""
            with suppress(DataError):
                manifest, digest = read_manifest(self.path, number)
                found = {**({} if manifest.parent is None else found), number: digest}
        return found

    def _unused(self) -> list[Path]:
        """Folders of older versions that `current.json` does not name, and network files that no version uses."""
        try:
            pointer = self.pointer()
        except DataError:  # any of them may be in use
            return []
        last = max(pointer.versions, default=0)
        unused = [path for n, path in self._folders().items() if n < last and n not in pointer.versions]
        with suppress(DataError):  # with a damaged manifest any network may be in use
            files = [read_manifest(self.path, *each)[0].network for each in self._all_digests().items()]
            used = {self.path / network_path(file) for file in files if file is not None}
            unused += [path for path in _list_folder(self.path / NETWORKS, _is_network) if path not in used]
        return unused

    def _problems(self, find: FindProblems, check: CheckShapes) -> list[DataError]:
        try:
            empty = self.pointer().current is None
            found = [DataError(f"{CURRENT} names no version: nothing was learned yet.")] if empty else []
        except NewerError as error:
            return [error]
        except DataError as error:
            found = [error]
        digests, reader = self.digests(), VersionReader(self.path, check)
        for number, digest in sorted(digests.items()):
            manifest, tensors, damage = reader.read(number, digest)
            found += damage
            if manifest is not None and not damage:
                found += map(DataError, find(manifest, tensors))
        return found + self._strays(digests)

    def _strays(self, known: Collection[int]) -> list[DataError]:
        """What does not belong to the model, at the top and in its two folders."""

        def at_top(entry: os.DirEntry[str]) -> bool:
            return entry.name in (LOCK, CURRENT, VERSIONS) or (entry.name in (NETWORKS, WATCH) and _is_folder(entry))

        def is_version(entry: os.DirEntry[str]) -> bool:
            number = _version_number(entry.name)
            return number in known or (number is not None and _is_folder(entry))

        found: list[DataError] = []
        for folder, belongs in (("", at_top), (VERSIONS, is_version), (NETWORKS, _is_network)):
            if not folder or os.path.isdir(self.path / folder):
                found += find_strays(
                    self.path,
                    folder,
                    lambda entry, belongs=belongs: entry.name.startswith(storage.ASIDE) or belongs(entry),  # type: ignore[misc]
                )
        with suppress(OSError):
            lock = (self.path / LOCK).lstat()
            if not stat.S_ISREG(lock.st_mode) or lock.st_size:
                found.append(DataError(f"{LOCK} is not an empty file. Remove it."))
        return found


class Writer(ModelFolder):
    """A model's folder in the hands of the process that holds its lock."""

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        action: str,
        method: str,
        settings: Mapping[str, Any],
        classes: Sequence[str],
        details: Mapping[str, Any] | None = None,
        record: Mapping[str, Any] | None = None,
        keep: int = KEEP,
        alone: bool = False,
        check: CheckTensors = accept,
    ) -> Manifest:
        """Make a version and put it in use. `details` are its own; `record` stays in the history of later ones.

        `check` gets what will be written and may raise an error: then nothing is.

        The last `keep` versions stay; with `alone` only the new one, and the history loses its records. No file of
        the folder then contains what the model forgets. (The file system may not overwrite the removed files at once.)
        """
        with storage.disk_errors(f"The model {self.path} could not be saved"):
            before = self._with_newer(self._open())
            now = time.strftime(TIME, time.gmtime())
            number = max((*before.versions, *self._folders()), default=0) + 1
            kept = [] if alone else self._most_useful(before, keep - 1)
            manifest = Manifest(
                version=number,
                parent=None if alone else before.current,
                created=now,
                action=action,
                method=method,
                settings=dict(settings),
                classes=tuple(classes),
                history=(*self._past(before, kept, forget=alone), Change(number, now, action, dict(record or {}))),
                details=dict(details or {}),
                learner=File("", 0),  # known when it is written
                network=None,
            )
            check(manifest, tensors)
            manifest = self._add(manifest, tensors, {each: before.versions[each] for each in kept})
        self._remove_unused(essential=alone)
        return manifest

    def use(self, version: int) -> Manifest:
        """Put an earlier version, which must be intact, in use again. Later updates prune the others.

        This also repairs a damaged `current.json`, from the manifests on disk. What was forgotten stays forgotten, even
        if a kill prevented its removal.
        """
        self.require()
        repaired = False
        try:
            pointer = self.pointer()
        except NewerError as error:
            raise self._explained(error) from error
        except DataError:
            pointer, repaired = Pointer(current=None, versions={}), True
        pointer = self._with_newer(pointer)
        try:
            manifest, _ = self._intact(pointer, version)
        except DataError as error:
            raise self._explained(error) from error
        with storage.disk_errors(f"The model {self.path} could not be changed"):
            self._point(dataclasses.replace(pointer, current=version))
        if repaired:
            self._remove_unused(essential=True)
        return manifest

    def sweep(self) -> list[Path]:
        """Remove unfinished writes, older versions that `current.json` does not name, and unused network files."""
        removed: list[Path] = []
        for name in (VERSIONS, NETWORKS):
            folder = self.path / name
            if not folder.is_symlink():
                removed += storage.sweep(folder)
            unused = [path for path in self._unused() if path.parent == folder]  # after the versions are gone
            for path in unused:
                storage.remove(path)
            if unused:
                storage.sync(folder)
            removed += unused
        return removed

    def _open(self) -> Pointer:
        """The pointer. A new model gets one that names nothing, so that a missing one always means damage."""
        if not self._begun():
            with suppress(PermissionError):  # the parent of the folder may not be readable
                storage.sync(self.path.parent)
            self._point(Pointer(current=None, versions={}))
        try:
            for name in (VERSIONS, NETWORKS):
                if (self.path / name).is_symlink():
                    raise DataError(f"{name} is a link.")
            return self.pointer()
        except DataError as error:
            raise self._explained(error) from error

    def _past(self, pointer: Pointer, kept: Sequence[int], *, forget: bool) -> tuple[Change, ...]:
        try:
            history = self._history(pointer) if pointer.versions else ()
        except DataError:  # every manifest is damaged, which is no reason not to save
            return ()
        if forget:
            return tuple(dataclasses.replace(change, details={}) for change in history)
        return tuple(change if change.version in kept else _shortened(change) for change in history)

    def _most_useful(self, pointer: Pointer, count: int) -> list[int]:
        """The `count` versions most worth keeping: the one in use, its ancestors, then the newest."""
        line, number = [], pointer.current
        while number is not None and number in pointer.versions:
            line.append(number)
            try:
                number = self._manifest(pointer, number).parent
            except DataError:  # the parent of a damaged one is unknown
                break
        return sorted(pointer.versions, key=lambda each: (each in line, each), reverse=True)[:count]

    def _add(self, manifest: Manifest, tensors: Mapping[str, Tensor], others: Mapping[int, str]) -> Manifest:
        """Write a version and point to it and to the `others`. After an error everything is as before."""
        path = self.path / version_path(manifest.version)
        network = {name: tensor for name, tensor in tensors.items() if name.startswith(EXTRACTOR)}
        learner = storage.serialise_tensors({name: each for name, each in tensors.items() if name not in network})
        try:
            manifest = dataclasses.replace(manifest, network=self._store_network(network), learner=_file(learner))
            content = _checked(manifest)
            storage.make_synced_folder(path.parent)
            with storage.writing_folder(path) as folder:
                (folder / LEARNER).write_bytes(learner)
                (folder / MANIFEST).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            self._point(Pointer(current=manifest.version, versions={**others, manifest.version: digest}))
        except BaseException:
            with suppress(OSError):
                if self.number_in_use() != manifest.version:
                    storage.remove(path)
                self.sweep()
            raise
        return Manifest.parse(content, MANIFEST)

    def _store_network(self, tensors: Mapping[str, Tensor]) -> File | None:
        """Write a network file unless it is there and intact; None without tensors."""
        if not tensors:
            return None
        content = storage.serialise_tensors(tensors)
        file = _file(content)
        storage.make_synced_folder(self.path / NETWORKS)
        try:
            intact = storage.read_inside(self.path, network_path(file), file.bytes) == content
        except DataError:
            intact = False
        if not intact:
            storage.write_file(self.path / network_path(file), content)
        else:
            storage.sync(self.path / NETWORKS)  # whoever wrote the file may have been killed before this
        return file

    def _point(self, pointer: Pointer) -> None:
        before, path = self._content(), self.path / CURRENT
        try:
            storage.write_file(path, pointer.serialise())
        except OSError as error:
            # The rename may have happened, but not durably. What is reported as failed must not be in use.
            if isinstance(before, bytes) and self._content() != before:
                with suppress(OSError):
                    storage.write_file(path, before)
                if self._content() != before:
                    message = f"Whether the model {self.path} was changed will be known after a restart"
                    raise EngramError(f"{message}: {error.strerror or error}.") from error
            raise

    def _remove_unused(self, *, essential: bool) -> None:
        try:
            self.sweep()
        except OSError as error:
            if essential:  # otherwise the next writer tries again
                raise EngramError(
                    f"The model {self.path} was changed, but its earlier state cannot be removed: "
                    f"{error.strerror or error}. Fix the cause, then finish with: {self.cleanup_command()}"
                ) from error


def _file(content: bytes) -> File:
    return File(hashlib.sha256(content).hexdigest(), len(content))


def _checked(manifest: Manifest) -> bytes:
    """The content of a manifest's file; UsageError if it could not be read again."""
    try:
        content = manifest.serialise()
        if len(content) > MAX_BYTES:
            raise DataError(f"{MANIFEST} would have {len(content)} bytes; the limit is {MAX_BYTES}.")
        Manifest.parse(content, MANIFEST)
    except (DataError, TypeError, ValueError) as error:
        raise UsageError(f"This cannot be saved with a model. {error}") from error
    return content


def _shortened(change: Change) -> Change:
    """A change with the number of classes and of samples instead of a number for every class."""
    details = dict(change.details)
    for name, value in change.details.items():
        if isinstance(value, dict):
            details[name] = [len(value), sum(count for count in value.values() if isinstance(count, int))]
    return dataclasses.replace(change, details=details)
