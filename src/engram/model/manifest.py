"""The files of a model: `Manifest` describes a version, `Pointer` names the one in use; reading a version.

Both JSON files carry their own checksum: the first entry is `sha256`, the digest of every byte after its digits, so any
changed byte is found without a second file. Parsing is strict: no field may be missing, added or of another type.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue
from torch import Tensor

from engram import storage
from engram.errors import DataError
from engram.storage import TensorShape

SCHEMA = 1
# Not from the package itself, which imports the rooms above this one.
ENGRAM_VERSION = importlib.metadata.version("engram")
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC
OPENING = b'{\n  "sha256": "'
DIGITS = 64
MAX_BYTES = 16 * 2**20  # of either file; the names of a million classes fit
VERSIONS, NETWORKS = "versions", "networks"
MANIFEST, LEARNER = "manifest.json", "learner.safetensors"


class NewerError(DataError):
    """Written by a later version of engram."""


def seal(value: Mapping[str, Any]) -> bytes:
    """`value` as JSON with its checksum. ValueError or TypeError if it is not JSON."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    rest = f'",{text[1:]}\n'.encode()
    return OPENING + hashlib.sha256(rest).hexdigest().encode() + rest


def unseal(content: bytes, name: str) -> dict[str, Any]:
    """The value in the content of the file `name`, if its checksum is right."""
    digest, rest = content[len(OPENING) :][:DIGITS], content[len(OPENING) + DIGITS :]
    if not content.startswith(OPENING) or hashlib.sha256(rest).hexdigest().encode() != digest:
        raise DataError(f"{name} was changed or cut short: its content does not match its SHA-256.")
    value: dict[str, Any] = storage.parse_json(content, name)
    del value["sha256"]
    return value


def _time(text: str) -> str:
    if datetime.strptime(text, TIME).strftime(TIME) != text:
        raise ValueError("times are written as 2026-01-31T12:00:00Z")
    return text


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
        raise ValueError(f"the setting '{nested[0]}' is not a plain value")
    return settings


def _counted(details: dict[str, Any]) -> dict[str, Any]:
    """Check the counts in a record of the history: samples by class, or the numbers of classes and of samples."""
    for name in ("new", "more"):
        value = details.get(name, {})
        counts = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"'{name}' does not hold counts")
        if isinstance(value, list) and len(value) != 2:
            raise ValueError(f"'{name}' does not hold a number of classes and one of samples")
    if type(details.get("classes", 0)) is not int:
        raise ValueError("'classes' is not a number")
    return details


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a name is given twice")
    return names


def _numbered(versions: Any) -> Any:
    """JSON has text for keys; the numbers of versions are written without leading zeros."""
    if not isinstance(versions, dict) or not all(re.fullmatch("[1-9][0-9]{0,17}", key) for key in versions):
        raise ValueError("versions are listed by their numbers")
    return {int(number): digest for number, digest in versions.items()}


Text = Annotated[str, Field(strict=True)]
Number = Annotated[int, Field(strict=True, ge=1)]
Digest = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]
Time = Annotated[Text, AfterValidator(_time)]
Plain = dict[Text, JsonValue]


class Strict:
    """Base of dataclasses that are parsed from JSON: other fields, NaN and infinity are errors."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class File(Strict):
    """A file as it was saved."""

    sha256: Digest
    bytes: Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class Change(Strict):
    """An entry of the history: how a version was made."""

    version: Number
    created: Time
    action: Text
    details: Annotated[Plain, AfterValidator(_counted)]


_adapter = functools.cache(pydantic.TypeAdapter)


class _SealedFile(Strict):
    """Serialises a dataclass to the content of a sealed JSON file, and parses it."""

    def serialise(self) -> bytes:
        """The content of its file."""
        return seal(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def parse(cls, content: bytes, name: str) -> Self:
        """The object in the content of the file `name`; DataError if anything is wrong. Nothing is converted."""
        value = unseal(content, name)
        schema = value.get("schema")
        if type(schema) is int and schema > SCHEMA:
            raise NewerError(
                f"{name} has schema {schema}, written by engram {value.get('engram', 'of an unknown version')}; "
                f"engram {ENGRAM_VERSION} reads schema {SCHEMA}. Update engram to that version or a later one."
            )
        missing = [field.name for field in dataclasses.fields(cls) if field.name not in value]  # type: ignore[arg-type]
        if missing:
            raise DataError(f"{name} is invalid: '{missing[0]}' is missing.")
        try:
            return _adapter(cls).validate_python(value)  # type: ignore[no-any-return, arg-type]
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = f"'{'.'.join(map(str, first['loc']))}': " if first["loc"] else ""
            raise DataError(f"{name} is invalid: {where}{first['msg'].removeprefix('Value error, ')}.") from error


@dataclass(frozen=True, kw_only=True)
class Manifest(_SealedFile):
    """One version of a model."""

    schema: Annotated[Number, Field(le=SCHEMA)] = SCHEMA
    version: Number
    parent: Number | None  # the version that was in use before; None: no earlier version may be restored
    created: Time
    engram: Text = ENGRAM_VERSION  # the version that wrote it
    action: Text  # learn, forget, rename, merge, …
    method: Text
    settings: Annotated[Plain, AfterValidator(_flat)]
    classes: Annotated[tuple[Text, ...], AfterValidator(_distinct)]  # by class index
    history: tuple[Change, ...]  # every version that was ever made, this one last
    details: Plain  # the model's metadata
    learner: File  # all tensors except those of the extractor
    network: File | None  # the tensors of the extractor, in `networks`

    def __post_init__(self) -> None:
        numbers = [change.version for change in self.history]
        last = [(change.version, change.created, change.action) for change in self.history[-1:]]
        if last != [(self.version, self.created, self.action)]:
            raise ValueError("its history does not end with its own version")
        if numbers != sorted(set(numbers)):
            raise ValueError("its history is not in order")
        if self.parent is not None and self.parent >= self.version:
            raise ValueError(f"its parent {self.parent} is not older than itself")


@dataclass(frozen=True, kw_only=True)
class Pointer(_SealedFile):
    """The versions there are, with the SHA-256 of their manifests, and the one in use (None before the first)."""

    schema: Annotated[Number, Field(le=SCHEMA)] = SCHEMA
    engram: Text = ENGRAM_VERSION
    current: Number | None
    versions: Annotated[dict[int, Digest], BeforeValidator(_numbered)]

    @classmethod
    def parse(cls, content: bytes, name: str) -> Self:
        """As for every sealed file; the version in use must be listed."""
        pointer = super().parse(content, name)
        if pointer.current not in (pointer.versions or (None,)):
            raise DataError(f"{name} is invalid: it does not list version {pointer.current}, the one in use.")
        return pointer


# Raises DataError unless a model can have tensors of these types and shapes.
CheckShapes = Callable[[Manifest, Mapping[str, TensorShape]], None]


def accept(*checked: Any) -> None:
    """A check that finds nothing wrong."""


class Contents(NamedTuple):
    """A version as it was read. It may be used if there are no problems."""

    manifest: Manifest | None
    tensors: dict[str, Tensor]
    problems: list[DataError]


def version_path(number: int) -> str:
    """The folder of a version, relative to the model's."""
    return f"{VERSIONS}/{number:06d}"


def network_path(file: File) -> str:
    """A network file, relative to the model's folder."""
    return f"{NETWORKS}/{file.sha256}.safetensors"


def find_strays(model: Path, folder: str, belongs: Callable[[os.DirEntry[str]], bool]) -> list[DataError]:
    """An error for each entry of a folder of the model that does not belong there."""
    try:
        with os.scandir(model / folder) as entries:
            names = sorted(entry.name for entry in entries if not belongs(entry) and os.path.lexists(entry.path))
    except OSError as error:
        return [DataError(f"{folder or 'The folder'} cannot be listed: {error.strerror}.")]
    return [DataError(f"{Path(folder, name)} does not belong to the model. Remove it.") for name in names]


def read_manifest(model: Path, number: int, digest: str | None = None) -> tuple[Manifest, str]:
    """The manifest of a version and its SHA-256, which must be `digest` if that is given."""
    name = f"{version_path(number)}/{MANIFEST}"
    content = storage.read_inside(model, name, MAX_BYTES)
    manifest, found = Manifest.parse(content, name), hashlib.sha256(content).hexdigest()
    if manifest.version != number:
        raise DataError(f"{name} is the manifest of version {manifest.version}.")
    if digest not in (None, found):
        raise DataError(f"{name} was changed: it is not the manifest that was saved.")
    return manifest, found


class VersionReader:
    """Reads and checks versions of a model; network files, which they share, once each.

    Sizes and checksums of all files are compared, and the types and shapes of their tensors given to `check`, which may
    raise DataError, before any file is read into memory.
    """

    def __init__(self, model: Path, check: CheckShapes = accept) -> None:
        self.model, self.check = model, check
        self.shapes = functools.cache(functools.partial(_verified_shapes, model))
        self.networks = functools.cache(functools.partial(_verified_tensors, model))

    def read(self, number: int, digest: str) -> Contents:
        """A version, with every file checked."""
        folder = version_path(number)
        manifest: Manifest | None = None
        tensors: dict[str, Tensor] = {}
        found: list[DataError] = []
        try:
            manifest, _ = read_manifest(self.model, number, digest)
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
            found += find_strays(self.model, folder, lambda entry: entry.name in (MANIFEST, LEARNER))
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
