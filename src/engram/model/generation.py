"""One generation of a model on disk: written, read and inspected.

generations/000007/
    manifest.json        what it is, and the SHA-256 of every other file and of its network file
    learner.safetensors  all tensors but those of the network file
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from engram import storage
from engram.errors import DataError, UsageError
from engram.model.manifest import File, Manifest
from engram.model.networks import NetworkReader, read_saved
from engram.model.sealed import LONGEST

GENERATIONS = "generations"
MANIFEST = "manifest.json"
LEARNER = "learner.safetensors"


class Inspection(NamedTuple):
    """What was found of a generation. It may be used if there are no problems."""

    manifest: Manifest | None
    tensors: dict[str, Tensor]
    problems: list[DataError]  # a sentence each, naming the file relative to the model's folder


def place(number: int) -> str:
    """The folder of a generation, relative to the model's."""
    return f"{GENERATIONS}/{number:06d}"


def number_of(name: str) -> int | None:
    """The generation that a folder of this name in `generations` is, if it is one."""
    number = int(name) if re.fullmatch(r"[0-9]{6,18}", name) else 0
    return number if number and f"{number:06d}" == name else None


def write(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> bytes:
    """Write the files of a generation into its folder; returns the content of its manifest."""
    learner = folder / LEARNER
    storage.save_tensors(learner, tensors)
    saved = File(storage.checksum(learner), learner.stat().st_size)
    try:
        content = dataclasses.replace(manifest, files={LEARNER: saved}).sealed()
        if len(content) > LONGEST:
            raise DataError(f"{MANIFEST} would have {len(content)} bytes, which is more than {LONGEST}.")
        Manifest.unsealed(content, MANIFEST)  # what could not be read is not written
    except (DataError, TypeError, ValueError) as error:
        raise UsageError(f"This cannot be kept with a model. {error}") from error
    (folder / MANIFEST).write_bytes(content)
    return content


def read_manifest(model: Path, number: int, digest: str | None) -> Manifest:
    """The manifest of a generation, of the SHA-256 `digest` (None: as far as it agrees with itself)."""
    name = f"{place(number)}/{MANIFEST}"
    content = storage.read_inside(model, name, LONGEST)
    manifest = Manifest.unsealed(content, name)
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise DataError(f"{name} was changed: it is another manifest than the one that was saved.")
    if manifest.generation != number:
        raise DataError(f"{name} is the manifest of generation {manifest.generation}.")
    if LEARNER not in manifest.files or MANIFEST in manifest.files:
        raise DataError(f"{name} is inconsistent: it must name {LEARNER}, and not itself.")
    return manifest


def inspect(model: Path, number: int, digest: str | None, networks: NetworkReader) -> Inspection:
    """Read and check every file of a generation. Both loading and verifying do this."""
    try:
        manifest = read_manifest(model, number, digest)
    except DataError as error:
        return Inspection(None, {}, [error, *_extras(model, number, {LEARNER})])
    tensors: dict[str, Tensor] = {}
    problems: list[DataError] = []
    for name, file in manifest.files.items():
        try:
            content = read_saved(model, f"{place(number)}/{name}", file)
            if name == LEARNER:
                tensors = storage.parse_tensors(content, f"{place(number)}/{name}")
        except DataError as error:
            problems.append(error)
    network, damage = networks.read(manifest.network) if manifest.network is not None else ({}, [])
    problems += [*damage, *_extras(model, number, manifest.files)]
    return Inspection(manifest, tensors | network, problems)


def _extras(model: Path, number: int, files: Collection[str]) -> list[DataError]:
    folder = model / place(number)
    if os.path.islink(folder) or not os.path.isdir(folder):  # which is said already: the manifest could not be read
        return []
    return strangers(model, place(number), lambda entry: entry.name == MANIFEST or entry.name in files)


def strangers(model: Path, folder: str, belongs: Callable[[os.DirEntry[str]], bool]) -> list[DataError]:
    """A sentence for everything in a folder of the model that does not belong there."""
    try:
        with os.scandir(model / folder) as entries:
            names = sorted(entry.name for entry in entries if not belongs(entry) and os.path.lexists(entry.path))
    except OSError as error:
        return [DataError(f"{folder or 'The folder'} cannot be listed: {error.strerror}.")]
    return [DataError(f"{Path(folder, name)} does not belong to the model. Remove it.") for name in names]
