"""Changing a model's folder: publish a generation, or use another one. Each change is atomic and durable.

A new network file is written aside, synced and renamed into place; then the same is done with the generation's folder;
then `current.json` is replaced; then generations and network files that are no longer used are removed. A kill at any
moment leaves the old model or the new one, and litter that the next writer sweeps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from engram import storage
from engram.errors import DataError, EngramError, UsageError
from engram.model.generation import GENERATIONS, MANIFEST, inspect, place, read_manifest, write
from engram.model.manifest import SCHEMA, TIME, VERSION, Change, Manifest, NewerError, Pointer
from engram.model.networks import NETWORKS, NetworkReader, split_network, store_network
from engram.model.reading import CURRENT, Reader
from engram.model.sealed import LONGEST

KEEP = 5  # generations, the one in use among them


class Writer(Reader):
    """A model's folder in the hands of whoever holds its lock."""

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
    ) -> Manifest:
        """Make a generation and put it in use. `details` are its own; `record` stays in the history of later ones.

        The last `keep` generations stay. With `alone` no other does, and no record of an earlier one: what a model is
        to forget is then in no file of its folder. (The blocks of removed files are the file system's to overwrite.)
        """
        if keep < 1:
            raise UsageError(f"A model keeps 1 generation at least, not {keep}.")
        with disk_errors(f"The model {self.path} could not be saved"):
            before = self._opened()
            now = time.strftime(TIME, time.gmtime())
            number = max(before.generations, default=0) + 1
            change = Change(number, now, action, dict(record or {}))
            kept = [] if alone else self._worth_most(before, keep - 1)
            manifest = Manifest(
                schema=SCHEMA,
                generation=number,
                parent=None if alone else before.current,
                created=now,
                engram=VERSION,
                action=action,
                method=method,
                settings=dict(settings),
                classes=tuple(classes),
                history=(*self._past(before, kept, forgotten=alone), change),
                details=dict(details or {}),
                files={},
            )
            manifest = self._add(manifest, tensors, {each: before.generations[each] for each in kept})
        self._remove_unnamed(essential=alone)
        return manifest

    def use(self, generation: int) -> Manifest:
        """Put an earlier generation, which must be whole, in use again. Others stay until they are pruned.

        This also mends a `current.json` that is damaged: from the manifests, as far as each agrees with itself. What
        was forgotten stays forgotten, even if whoever did it was killed before all of it was removed.
        """
        self.require()
        lost = False
        try:
            pointer = self.pointer()
        except NewerError as error:
            raise self._explained(error) from error
        except DataError:
            pointer, lost = self._found(), True
        self._named(pointer, generation)
        digest = pointer.generations[generation]
        manifest, _, problems = inspect(self.path, generation, digest, NetworkReader(self.path))
        if manifest is None or problems:
            raise self._explained(problems[0])
        with disk_errors(f"The model {self.path} could not be changed"):
            self._point(Pointer(current=generation, generations=pointer.generations))
        if lost:
            self._remove_unnamed(essential=True)
        return manifest

    def sweep(self) -> None:
        """Remove unfinished writes, generations that `current.json` does not name, and network files nobody uses."""
        for name, find_unused in ((GENERATIONS, self.unnamed), (NETWORKS, self.unused_networks)):
            folder = self.path / name
            if not folder.is_symlink():
                storage.sweep(folder)
            unused = find_unused()
            for path in unused:
                storage.remove(path)
            if unused:
                storage.sync(folder)

    def _opened(self) -> Pointer:
        """The pointer as it is. A new model gets one that names nothing: where none is, something was lost."""
        if not self.begun():
            with suppress(PermissionError):  # a parent that may not be opened will keep the folder's name all the same
                storage.sync(self.path.parent)
            self._point(Pointer(current=None, generations={}))
        for name in (GENERATIONS, NETWORKS):
            if (self.path / name).is_symlink():
                raise self._explained(DataError(f"{name} is a link."))
        try:
            return self.pointer()
        except DataError as error:
            raise self._explained(error) from error

    def _past(self, pointer: Pointer, kept: Sequence[int], *, forgotten: bool) -> tuple[Change, ...]:
        try:
            history = self._history(pointer) if pointer.generations else ()
        except DataError:  # every manifest is damaged; that is no reason not to save what is whole
            return ()
        if forgotten:
            return tuple(dataclasses.replace(change, details={}) for change in history)
        return tuple(change if change.generation in kept else _in_short(change) for change in history)

    def _worth_most(self, pointer: Pointer, count: int) -> list[int]:
        """The `count` generations worth keeping most: the one in use, those it came from, then the newest."""
        line, number = [], pointer.current
        while number is not None and number in pointer.generations:
            line.append(number)
            try:
                number = self._manifest(pointer, number).parent
            except DataError:  # a damaged one does not say
                break
        return sorted(pointer.generations, key=lambda each: (each in line, each), reverse=True)[:count]

    def _add(self, manifest: Manifest, tensors: Mapping[str, Tensor], others: Mapping[int, str]) -> Manifest:
        """Write a generation and point to it and to the `others`. After an error all is as before."""
        path = self.path / place(manifest.generation)
        contents: list[bytes] = []
        network, rest = split_network(tensors)
        try:
            manifest = dataclasses.replace(manifest, network=store_network(self.path, network))
            if not path.parent.exists():
                path.parent.mkdir()
                storage.sync(self.path)
            storage.publish_folder(path, lambda folder: contents.append(write(folder, manifest, rest)))
            digest = hashlib.sha256(contents[0]).hexdigest()
            self._point(Pointer(current=manifest.generation, generations={**others, manifest.generation: digest}))
        except BaseException:
            with suppress(OSError):
                self.sweep()
            raise
        return Manifest.unsealed(contents[0], MANIFEST)

    def _point(self, pointer: Pointer) -> None:
        before, path = self._content(), self.path / CURRENT
        try:
            _replace(path, pointer.sealed())
        except OSError as error:
            # Renamed, it may still not be on the disk for good; what is reported as failed must not be in use.
            if isinstance(before, bytes) and self._content() != before:
                with suppress(OSError):
                    _replace(path, before)
                if self._content() != before:
                    message = f"Whether the model {self.path} was changed will show after a restart: {_reason(error)}."
                    raise EngramError(message) from error
            raise

    def _remove_unnamed(self, *, essential: bool) -> None:
        try:
            self.sweep()
        except OSError as error:
            if essential:  # otherwise the next writer tries again, and nobody misses anything
                raise EngramError(
                    f"The model {self.path} was changed, but what it was before cannot be removed: {_reason(error)}. "
                    f"When that is mended, finish with: engram verify {self._quoted}"
                ) from error

    def _found(self) -> Pointer:
        """The generations on disk that may be used, and whose manifests agree with themselves."""
        digests = {}
        for number in self._on_disk():
            with suppress(DataError):
                read_manifest(self.path, number, None)
                content = storage.read_inside(self.path, f"{place(number)}/{MANIFEST}", LONGEST)
                digests[number] = hashlib.sha256(content).hexdigest()
        return Pointer(current=max(digests, default=None), generations=digests)


def _in_short(change: Change) -> Change:
    """A change with numbers in the place of what it says of every class: names of thousands, for years, add up."""
    details = dict(change.details)
    for name, value in change.details.items():
        if isinstance(value, dict):
            details[name] = [len(value), sum(count for count in value.values() if isinstance(count, int))]
    return dataclasses.replace(change, details=details)


def _replace(path: Path, content: bytes) -> None:
    with storage.writing(path) as aside:
        aside.write_bytes(content)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """What the disk refuses, as a sentence that begins with `what` could not be done."""
    try:
        yield
    except OSError as error:
        raise EngramError(f"{what}: {_reason(error)}. Nothing of it was changed.") from error
