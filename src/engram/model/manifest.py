"""What the two JSON files of a model say: `Manifest`, of one generation, and `Pointer`, to the one in use.

Reading is strict. Within a schema no field is missing, added or of another type; a new field is a new schema.
Schema 1 had no `network`: all tensors were in the generation's own file. Its files can still be read.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import AfterValidator, Field, JsonValue

from engram.errors import DataError
from engram.model.sealed import seal, unseal

SCHEMA = 2  # that is written; older ones are read
VERSION = importlib.metadata.version("engram")  # not from the package itself, which knows the rooms above this one
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC

T = TypeVar("T")


class NewerError(DataError):
    """Written by a later engram than this one."""


def _moment(text: str) -> str:
    if datetime.strptime(text, TIME).strftime(TIME) != text:
        raise ValueError("a time is written as 2026-01-31T12:00:00Z")
    return text


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
        raise ValueError(f"the setting '{nested[0]}' is not a plain value")
    return settings


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a name stands there twice")
    return names


Text = Annotated[str, Field(strict=True)]
Number = Annotated[int, Field(strict=True, ge=1)]
Bytes = Annotated[int, Field(strict=True, ge=0)]
Digest = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Decimal = Annotated[str, Field(strict=True, pattern=r"^[1-9][0-9]*$", max_length=18)]
Moment = Annotated[Text, AfterValidator(_moment)]
Plain = dict[Text, JsonValue]
NOTHING_ELSE = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True)
class File:
    """A file as it was saved."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = NOTHING_ELSE
    sha256: Digest
    bytes: Bytes


@dataclass(frozen=True)
class Change:
    """An entry of the history: how a generation came about."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = NOTHING_ELSE
    generation: Number
    created: Moment
    action: Text
    details: Plain


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one generation of a model is."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = NOTHING_ELSE
    schema: Number
    generation: Number
    parent: Number | None  # the one that was in use when this was made; None: nothing before this may come back
    created: Moment
    engram: Text  # the version that wrote it
    action: Text  # learn, forget, rename, merge, …
    method: Text
    settings: Annotated[Plain, AfterValidator(_flat)]
    classes: Annotated[tuple[Text, ...], AfterValidator(_distinct)]  # in the order of the learner's columns
    history: tuple[Change, ...]  # every generation that was ever made, this one last
    details: Plain  # whatever else the publisher wants to know of it
    files: dict[FileName, File]
    network: File | None = None  # the file in `networks` with the tensors of the extractor; not in schema 1

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        values = dataclasses.asdict(self)
        if self.schema == 1:
            del values["network"]
        return values | {"classes": list(self.classes), "history": list(values["history"])}

    @classmethod
    def from_json(cls, value: Any, name: str) -> Manifest:
        """The manifest that the file `name` holds, or a sentence about what is wrong with it."""
        manifest = _checked(_MANIFEST, value, name)
        if ("network" in value) != (manifest.schema >= 2):
            raise DataError(f"{name} is not as engram writes it, in 'network': it is a field of schema 2.")
        numbers = [change.generation for change in manifest.history]
        own = (manifest.generation, manifest.created, manifest.action)
        last = manifest.history[-1:]
        if [(change.generation, change.created, change.action) for change in last] != [own]:
            raise DataError(f"{name} is inconsistent: its history does not end with its own generation.")
        if numbers != sorted(set(numbers)):
            raise DataError(f"{name} is inconsistent: its history is not in order.")
        if manifest.parent is not None and manifest.parent >= manifest.generation:
            raise DataError(f"{name} is inconsistent: its parent {manifest.parent} is not older than itself.")
        return manifest

    def sealed(self) -> bytes:
        """The content of its file."""
        return seal(self.to_json())

    @classmethod
    def unsealed(cls, content: bytes, name: str) -> Manifest:
        """The manifest in the content of the file `name`."""
        return cls.from_json(unseal(content, name), name)


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """Which generations there are, each by the SHA-256 of its manifest, and the one in use: None before the first."""

    current: int | None
    generations: Mapping[int, str]

    def sealed(self) -> bytes:
        """The content of its file."""
        generations = {str(number): self.generations[number] for number in sorted(self.generations)}
        return seal({"schema": SCHEMA, "engram": VERSION, "current": self.current, "generations": generations})

    @classmethod
    def unsealed(cls, content: bytes, name: str) -> Pointer:
        """The pointer in the content of the file `name`."""
        found = _checked(_POINTER, unseal(content, name), name)
        generations = {int(number): digest for number, digest in found.generations.items()}
        if found.current not in (generations or (None,)):
            raise DataError(f"{name} is inconsistent: it does not list generation {found.current}, the one in use.")
        return cls(current=found.current, generations=generations)


@dataclass(frozen=True, kw_only=True)
class _PointerFile:
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = NOTHING_ELSE
    schema: Number
    engram: Text
    current: Number | None
    generations: dict[Decimal, Digest]


_MANIFEST, _POINTER = pydantic.TypeAdapter(Manifest), pydantic.TypeAdapter(_PointerFile)


def _checked(kind: pydantic.TypeAdapter[T], value: Any, name: str) -> T:
    """`value` as a dataclass of this kind, nothing converted."""
    if not isinstance(value, dict):
        raise DataError(f"{name} is not of engram: it holds no named values.")
    schema = value.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise NewerError(
            f"{name} has schema {schema}, written by engram {value.get('engram', 'of an unknown version')}; "
            f"engram {VERSION} reads schemas up to {SCHEMA}. Update engram to that version or a later one."
        )
    try:
        return kind.validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        raise DataError(f"{name} is not as engram writes it, in '{field}': {reason}.") from error
