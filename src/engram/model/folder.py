"""The folder of a model: the generation in use, and earlier ones to go back to.

MODEL/
    .lock         held by the writer; readers take no lock
    current.json  names the generation in use, with the SHA-256 of every generation's manifest
    generations/  a folder per generation, never changed once it is there
        000007/
            manifest.json        describes it, with the SHA-256 of the other file and of its network file
            learner.safetensors  all tensors except those of the extractor
    networks/     a file per feature extractor, named by its SHA-256, shared by the generations that use it
    watch/        a folder per watched folder: which files were learned (`watching.py`)

Every file is reached from `current.json` by a chain of checksums, and is JSON or safetensors: loading runs no code.
Checksums find damage, not forgery: whoever can write to the folder can write checksums too.

A writer renames a new network file into place, then the generation's folder, then replaces `current.json`, then
removes what is no longer used. Each is written aside and synced first. A kill at any moment leaves the old model or the
new one, and files that the next writer removes and names in a warning. Generations newer than all that `current.json`
names are never removed as leftovers: the file may be an older copy. The next publication lists them again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from engram import storage
from engram.errors import DataError, EngramError, EngramWarning, UsageError
from engram.model.manifest import MAX_BYTES, TIME, Change, File, Manifest, NewerError, Pointer
from engram.model.reading import (
    CURRENT,
    GENERATIONS,
    LEARNER,
    LOCK,
    MANIFEST,
    NETWORKS,
    WATCH,
    FolderReader,
    accept,
    generation_path,
    network_path,
)
from engram.text import printable

EXTRACTOR = "network.extractor."  # prefix of the tensors that go into a network file
KEEP = 5  # generations, including the one in use

# Raises an error unless a model may have this manifest and these tensors.
CheckTensors = Callable[[Manifest, Mapping[str, Tensor]], None]


class ModelFolder(FolderReader):
    """A model's folder: read by anyone at any time, changed by one process at a time inside `with folder.writing()`."""

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
                for name in (GENERATIONS, NETWORKS):
                    if storage.is_there(self.path / name):
                        (self.path / name).rmdir()
                (self.path / CURRENT).unlink(missing_ok=True)
                (self.path / LOCK).unlink()


class Writer(FolderReader):
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
        """Make a generation and put it in use. `details` are its own; `record` stays in the history of later ones.

        `check` gets what will be written and may raise an error: then nothing is.

        The last `keep` generations stay. With `alone` no other stays, and no record of an earlier one: what the model
        is to forget is then in no file of its folder. (The blocks of removed files are the file system's to overwrite.)
        """
        if keep < 1:
            raise UsageError(f"A model keeps 1 generation at least, not {keep}.")
        with storage.disk_errors(f"The model {self.path} could not be saved"):
            before = self._with_newer(self._open())
            now = time.strftime(TIME, time.gmtime())
            number = max((*before.generations, *self._folders()), default=0) + 1
            kept = [] if alone else self._most_useful(before, keep - 1)
            manifest = Manifest(
                generation=number,
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
            manifest = self._add(manifest, tensors, {each: before.generations[each] for each in kept})
        self._remove_unused(essential=alone)
        return manifest

    def use(self, generation: int) -> Manifest:
        """Put an earlier generation, which must be intact, in use again. Others stay until they are pruned.

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
            pointer, repaired = Pointer(current=None, generations={}), True
        pointer = self._with_newer(pointer)
        try:
            manifest, _ = self._intact(pointer, generation)
        except DataError as error:
            raise self._explained(error) from error
        with storage.disk_errors(f"The model {self.path} could not be changed"):
            self._point(dataclasses.replace(pointer, current=generation))
        if repaired:
            self._remove_unused(essential=True)
        return manifest

    def sweep(self) -> list[Path]:
        """Remove unfinished writes, older generations that `current.json` does not name, and unused network files."""
        removed: list[Path] = []
        for name in (GENERATIONS, NETWORKS):
            folder = self.path / name
            if not folder.is_symlink():
                removed += storage.sweep(folder)
            unused = [path for path in self._unused() if path.parent == folder]  # after the generations are gone
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
            self._point(Pointer(current=None, generations={}))
        try:
            for name in (GENERATIONS, NETWORKS):
                if (self.path / name).is_symlink():
                    raise DataError(f"{name} is a link.")
            return self.pointer()
        except DataError as error:
            raise self._explained(error) from error

    def _past(self, pointer: Pointer, kept: Sequence[int], *, forget: bool) -> tuple[Change, ...]:
        try:
            history = self._history(pointer) if pointer.generations else ()
        except DataError:  # every manifest is damaged, which is no reason not to save
            return ()
        if forget:
            return tuple(dataclasses.replace(change, details={}) for change in history)
        return tuple(change if change.generation in kept else _shortened(change) for change in history)

    def _most_useful(self, pointer: Pointer, count: int) -> list[int]:
        """The `count` generations most worth keeping: the one in use, its ancestors, then the newest."""
        line, number = [], pointer.current
        while number is not None and number in pointer.generations:
            line.append(number)
            try:
                number = self._manifest(pointer, number).parent
            except DataError:  # the parent of a damaged one is unknown
                break
        return sorted(pointer.generations, key=lambda each: (each in line, each), reverse=True)[:count]

    def _add(self, manifest: Manifest, tensors: Mapping[str, Tensor], others: Mapping[int, str]) -> Manifest:
        """Write a generation and point to it and to the `others`. After an error everything is as before."""
        path = self.path / generation_path(manifest.generation)
        network = {name: tensor for name, tensor in tensors.items() if name.startswith(EXTRACTOR)}
        learner = storage.serialise_tensors({name: each for name, each in tensors.items() if name not in network})
        try:
            manifest = dataclasses.replace(manifest, network=self._store_network(network), learner=_file(learner))
            content = _checked(manifest)

            def fill(folder: Path) -> None:
                (folder / LEARNER).write_bytes(learner)
                (folder / MANIFEST).write_bytes(content)

            storage.make_synced_folder(path.parent)
            storage.publish_folder(path, fill)
            digest = hashlib.sha256(content).hexdigest()
            self._point(Pointer(current=manifest.generation, generations={**others, manifest.generation: digest}))
        except BaseException:
            with suppress(OSError):
                if self.number_in_use() != manifest.generation:
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
                    f"{error.strerror or error}. Fix the cause, then finish with: {self.finishing()}"
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
