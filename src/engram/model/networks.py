"""The feature extractors of a model on disk: one file each, shared by all generations that use it.

networks/
    <sha256>.safetensors  the tensors of an extractor, named by the SHA-256 of this file
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from engram import storage
from engram.errors import DataError
from engram.model.manifest import File

NETWORKS = "networks"
EXTRACTOR = "network.extractor."  # prefix of the tensors that go into a network file


class NetworkReader:
    """Reads network files of a model, each at most once: generations share them."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._found: dict[File, tuple[dict[str, Tensor], list[DataError]]] = {}

    def read(self, file: File) -> tuple[dict[str, Tensor], list[DataError]]:
        """The tensors of a network file, and what is wrong with it."""
        if file not in self._found:
            name = network_path(file)
            try:
                content = read_saved(self._model, name, file)
                self._found[file] = storage.parse_tensors(content, name), []
            except DataError as error:
                self._found[file] = {}, [error]
        return self._found[file]


def network_path(file: File) -> str:
    """The path of a network file, relative to the model's folder."""
    return f"{NETWORKS}/{file.sha256}.safetensors"


def is_network_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of `networks` is a regular file with the name of a network file."""
    named = re.fullmatch(r"[0-9a-f]{64}\.safetensors", entry.name) is not None
    return named and entry.is_file(follow_symlinks=False)


def network_files(model: Path) -> list[Path]:
    """All network files of a model, used or not."""
    folder = model / NETWORKS
    with suppress(OSError):  # without a readable folder there are none
        if not folder.is_symlink():
            with os.scandir(folder) as entries:
                return [Path(entry.path) for entry in entries if is_network_file(entry)]
    return []


def split_network(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the extractor, and all others."""
    network = {name: tensor for name, tensor in tensors.items() if name.startswith(EXTRACTOR)}
    return network, {name: tensor for name, tensor in tensors.items() if name not in network}


def store_network(model: Path, tensors: Mapping[str, Tensor]) -> File | None:
    """Write the network file of these tensors unless it is there, intact. Without tensors there is none."""
    if not tensors:
        return None
    content = storage.serialise_tensors(tensors)
    file = File(hashlib.sha256(content).hexdigest(), len(content))
    folder, path = model / NETWORKS, model / network_path(file)
    if not folder.exists():
        folder.mkdir()
        storage.sync(model)
    try:
        intact = storage.read_inside(model, network_path(file), file.bytes) == content
    except DataError:
        intact = False
    if intact:
        storage.sync(folder)  # whoever renamed the file may have been killed before syncing
    else:
        with storage.writing(path) as aside:
            aside.write_bytes(content)
    return file


def read_saved(model: Path, name: str, file: File) -> bytes:
    """The content of a file of the model, if it is what was saved."""
    content = storage.read_inside(model, name, file.bytes)
    if len(content) < file.bytes:
        raise DataError(f"{name} was cut short: it has {len(content)} of {file.bytes} bytes.")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(f"{name} was changed: it does not have the SHA-256 it was saved with.")
    return content
