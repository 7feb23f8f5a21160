"""The files of one generation on disk, and the network files that generations share.

generations/000007/
    manifest.json        describes it, with the SHA-256 of the other file and of its network file
    learner.safetensors  all tensors except those of the extractor
networks/
    <sha256>.safetensors the tensors of an extractor, named by the SHA-256 of this file
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engram import storage
from engram.errors import DataError, UsageError
from engram.model.manifest import MAX_BYTES, File, Manifest
from engram.storage import TensorShape

GENERATIONS, NETWORKS = "generations", "networks"
MANIFEST, LEARNER = "manifest.json", "learner.safetensors"
EXTRACTOR = "network.extractor."  # prefix of the tensors that go into a network file


# Raises DataError unless these are the types and shapes of a model's tensors.
CheckShapes = Callable[[Manifest, Mapping[str, TensorShape]], None]


def unchecked(manifest: Manifest, shapes: Mapping[str, TensorShape]) -> None:
    """Accept tensors of any type and shape."""


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


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, and not a link to one."""
    return entry.is_dir(follow_symlinks=False)


def is_network_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a regular file with the name of a network file."""
    named = re.fullmatch(r"[0-9a-f]{64}\.safetensors", entry.name) is not None
    return named and entry.is_file(follow_symlinks=False)


def generation_number(name: str) -> int | None:
    """The number of the generation whose folder has this name."""
    number = int(name) if re.fullmatch(r"[0-9]{6,18}", name) else 0
    return number if number and f"{number:06d}" == name else None


def list_folder(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    """The wanted entries of a folder; none if it is a link, or cannot be listed."""
    with suppress(OSError):
        if not folder.is_symlink():
            with os.scandir(folder) as entries:
                return [Path(entry.path) for entry in entries if wanted(entry)]
    return []


def find_strays(model: Path, folder: str, belongs: Callable[[os.DirEntry[str]], bool]) -> list[DataError]:
    """An error for each entry of a folder of the model that does not belong there."""
    try:
        with os.scandir(model / folder) as entries:
            names = sorted(entry.name for entry in entries if not belongs(entry) and os.path.lexists(entry.path))
    except OSError as error:
        return [DataError(f"{folder or 'The folder'} cannot be listed: {error.strerror}.")]
    return [DataError(f"{Path(folder, name)} does not belong to the model. Remove it.") for name in names]


def read_manifest(model: Path, number: int, digest: str) -> Manifest:
    """The manifest of a generation, whose file has the SHA-256 `digest`."""
    name = f"{generation_path(number)}/{MANIFEST}"
    content = storage.read_inside(model, name, MAX_BYTES)
    manifest = Manifest.parse(content, name)
    if manifest.generation != number:
        raise DataError(f"{name} is the manifest of generation {manifest.generation}.")
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataError(f"{name} was changed: it is not the manifest that was saved.")
    return manifest


class GenerationReader:
    """Reads and checks generations of a model; network files, which they share, once each.

    Sizes and checksums of all files are compared, and the types and shapes of their tensors given to `check`, which may
    raise DataError, before any file is read into memory.
    """

    def __init__(self, model: Path, check: CheckShapes = unchecked) -> None:
        self.model, self.check = model, check
        self._shapes: dict[File, dict[str, TensorShape] | DataError] = {}
        self._networks: dict[File, dict[str, Tensor]] = {}

    def read(self, number: int, digest: str) -> Contents:
        """A generation, with every file checked."""
        folder = generation_path(number)
        manifest: Manifest | None = None
        tensors: dict[str, Tensor] = {}
        shapes: dict[str, TensorShape] = {}
        found: list[DataError] = []
        try:
            manifest = read_manifest(self.model, number, digest)
            files = {f"{folder}/{LEARNER}": manifest.learner}
            files |= {} if manifest.network is None else {network_path(manifest.network): manifest.network}
            for name, file in files.items():
                try:
                    shapes |= self._shapes_of(name, file)
                except DataError as error:
                    found.append(error)
            if not found:
                try:
                    self.check(manifest, shapes)
                except DataError as error:
                    raise DataError(f"{folder}: {error}") from error
                for name, file in files.items():
                    tensors |= self._tensors(name, file)
        except DataError as error:
            found.append(error)
        path = self.model / folder
        if os.path.isdir(path) and not os.path.islink(path):  # otherwise the manifest could not be read
            found += find_strays(self.model, folder, lambda entry: entry.name in (MANIFEST, LEARNER))
        return Contents(manifest, tensors, found)

    def _shapes_of(self, name: str, file: File) -> dict[str, TensorShape]:
        if file not in self._shapes:
            try:
                self._shapes[file] = _verified_shapes(self.model, name, file)
            except DataError as error:
                self._shapes[file] = error
        found = self._shapes[file]
        if isinstance(found, DataError):
            raise found
        return found

    def _tensors(self, name: str, file: File) -> dict[str, Tensor]:
        if file in self._networks:
            return self._networks[file]
        content = storage.read_inside(self.model, name, file.bytes)
        if hashlib.sha256(content).hexdigest() != file.sha256:  # the very bytes that are used
            raise DataError(f"{name} was changed while it was read.")
        tensors = storage.parse_tensors(content, name)
        if name == network_path(file):
            self._networks[file] = tensors
        return tensors


def _verified_shapes(model: Path, name: str, file: File) -> dict[str, TensorShape]:
    """The types and shapes of the tensors in a file; DataError unless its size and checksum are right."""
    with storage.open_inside(model, name, file.bytes) as (opened, size):
        if size < file.bytes:
            raise DataError(f"{name} was cut short: it has {size} of {file.bytes} bytes.")
        if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
            raise DataError(f"{name} was changed: it does not have the SHA-256 it was saved with.")
        opened.seek(0)
        return storage.read_shapes(opened, size, name)


def write_generation(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> bytes:
    """Write the files of a generation into its folder; returns the content of its manifest."""
    learner = storage.serialise_tensors(tensors)
    file = File(hashlib.sha256(learner).hexdigest(), len(learner))
    try:
        content = dataclasses.replace(manifest, learner=file).serialise()
        if len(content) > MAX_BYTES:
            raise DataError(f"{MANIFEST} would have {len(content)} bytes; the limit is {MAX_BYTES}.")
        Manifest.parse(content, MANIFEST)  # what cannot be read is not written
    except (DataError, TypeError, ValueError) as error:
        raise UsageError(f"This cannot be saved with a model. {error}") from error
    (folder / LEARNER).write_bytes(learner)
    (folder / MANIFEST).write_bytes(content)
    return content


def store_network(model: Path, tensors: Mapping[str, Tensor], verified: Iterable[File]) -> File | None:
    """Write a network file unless it is there and intact; None without tensors.

    The checksums of the `verified` files are known to be right, so tensors are compared with theirs and not hashed.
    """
    if not tensors:
        return None
    file = next((each for each in verified if _holds(model, each, tensors)), None)
    if file is None:
        content = storage.serialise_tensors(tensors)
        file = File(hashlib.sha256(content).hexdigest(), len(content))
        storage.make_synced_folder(model / NETWORKS)
        try:
            intact = storage.read_inside(model, network_path(file), file.bytes) == content
        except DataError:
            intact = False
        if not intact:
            storage.write_file(model / network_path(file), content)
            return file
    storage.sync(model / NETWORKS)  # whoever wrote the file may have been killed before this
    return file


def _holds(model: Path, file: File, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a network file holds exactly these tensors, bit by bit."""
    try:
        saved = storage.parse_tensors(storage.read_inside(model, network_path(file), file.bytes), network_path(file))
    except DataError:
        return False
    return saved.keys() == tensors.keys() and all(
        (tensor.dtype, tensor.shape) == (saved[name].dtype, saved[name].shape)
        and torch.equal(_bits(tensor), _bits(saved[name]))
        for name, tensor in tensors.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
