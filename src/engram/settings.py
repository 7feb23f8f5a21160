"""Settings as fields of dataclasses, set by flat names: validated, and unknown ones refused with the nearest name."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import pydantic

from engram.errors import UsageError, nearest, unknown

T = TypeVar("T")

INTERNAL: Mapping[str, Any] = MappingProxyType({"setting": False})  # metadata of a field that only Python code sets


@dataclasses.dataclass(frozen=True)
class Choice(Generic[T]):
    """One entry of a registry, chosen by name, and the settings that were given for any of its entries.

    The settings of an entry are the fields of its class. Those of entries that are not chosen are kept: they apply
    once their entry is chosen.
    """

    registry: Mapping[str, type[T]] = dataclasses.field(repr=False)
    name: str
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> T:
        """The chosen entry with its settings; those that were not given have their defaults."""
        own = self.own_settings()
        return self.registry[self.name](**{name: value for name, value in self.given.items() if name in own})

    def own_settings(self) -> set[str]:
        """The names of the chosen entry's settings."""
        return {name for name, _, _ in fields(self.registry[self.name])}

    def named(self, name: str) -> Choice[T]:
        """Another entry of the registry, with the same settings given."""
        return dataclasses.replace(self, name=name)

    def settings(self) -> dict[str, Any]:
        """The settings of all entries."""
        return {name: self.given.get(name, field.default) for name, field, _ in _entry_fields(self.registry)}


def choice(registry: Mapping[str, type[T]], default: str, *, exclusive: bool = False) -> Any:
    """A dataclass field of type `Choice`: the flat setting of its name chooses an entry of the registry.

    With `exclusive`, a setting that the chosen entry does not have is refused unless it has its default.
    """
    return dataclasses.field(
        default_factory=lambda: Choice(registry, default),
        metadata={"registry": registry, "default": default, "exclusive": exclusive},
    )


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _group(cls: type, field: dataclasses.Field[Any], chosen: Mapping[str, type]) -> type | None:
    """The dataclass that a field holds, where it is a group of settings and not one setting."""
    kind = _types(cls)[field.name]
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return None
    if field.name in chosen:
        return chosen[field.name]
    return field.default_factory if isinstance(field.default_factory, type) else kind


def fields(
    cls: type, chosen: Mapping[str, type] = MappingProxyType({})
) -> Iterator[tuple[str, dataclasses.Field[Any], type]]:
    """Every setting of a dataclass and of the groups within it: name, field, and the class that declares it.

    `chosen` says, by a field's name, which class of a group to take where it is not the default's.
    """
    for field in _settable(cls):
        group = _group(cls, field, chosen)
        if group is not None:
            yield from fields(group)
        else:
            yield field.name, field, cls
            yield from _entry_fields(field.metadata.get("registry", {}))


def _settable(settings: Any) -> Iterator[dataclasses.Field[Any]]:
    return (each for each in dataclasses.fields(settings) if each.init and each.metadata.get("setting", True))


def _entry_fields(registry: Mapping[str, type]) -> Iterator[tuple[str, dataclasses.Field[Any], type]]:
    """The settings of all entries; one that several have is the same in all of them."""
    yield from {each[0]: each for entry in registry.values() for each in fields(entry)}.values()


def build(cls: type[T], values: Mapping[str, Any], owner: str, chosen: Mapping[str, type] = MappingProxyType({})) -> T:
    """Make `cls` from flat `values`, each checked against its field's type; `owner` names it in errors."""
    known = {name for name, _, _ in fields(cls, chosen)}
    for name in values:
        if name not in known:
            raise UsageError(f"The {owner} has no setting '{name}'. {nearest(name, known)}")
    return _build(cls, with_none(values), chosen)


def _build(cls: type[T], values: Mapping[str, Any], chosen: Mapping[str, type]) -> T:
    arguments: dict[str, Any] = {}
    for field in _settable(cls):
        group = _group(cls, field, chosen)
        if group is not None:
            arguments[field.name] = _build(group, values, {})
        elif "registry" in field.metadata:
            arguments[field.name] = _choice(field, values)
        elif field.name in values:
            arguments[field.name] = _checked(field.name, _types(cls)[field.name], values[field.name])  # type: ignore[arg-type]
    return cls(**arguments)


def _choice(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> Choice[Any]:
    registry, name = field.metadata["registry"], values.get(field.name, field.metadata["default"])
    if not isinstance(name, str) or name not in registry:
        raise unknown(field.name, str(name), registry)
    own, given = Choice(registry, name).own_settings(), {}
    for setting, entry_field, owner in _entry_fields(registry):
        if setting in values:
            given[setting] = _checked(setting, _types(owner)[setting], values[setting])
            if field.metadata["exclusive"] and setting not in own and given[setting] != entry_field.default:
                raise UsageError(f"The {field.name} '{name}' has no setting '{setting}'. Leave it out.")
    return Choice(registry, name, given)


def _checked(name: str, kind: Any, value: Any) -> Any:
    # Infinity is refused with NaN: no setting means it, and a result file cannot hold it.
    config = pydantic.ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    adapter = pydantic.TypeAdapter(kind, config=config)
    if value is None and "none" in typing.get_args(kind):  # where the word is one of the choices, it means itself
        value = "none"
    if isinstance(value, str) and any(typing.get_origin(each) is tuple for each in (kind, *typing.get_args(kind))):
        value = [part for part in value.split(",") if part.strip()]
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        # pydantic reports one error for each member of a union; that of None explains nothing.
        wrong = [each for each in error.errors() if each["type"] != "none_required"]
        reasons = dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in wrong)
        raise UsageError(f"The setting '{name}' cannot be {value!r}: {'; or '.join(reasons)}.") from error


def check(settings: Any) -> None:
    """Raise a UsageError unless every field of a dataclass has a value of its type."""
    cls: type = type(settings)
    for field in dataclasses.fields(cls):
        if field.init:
            _checked(field.name, _types(cls)[field.name], getattr(settings, field.name))


def with_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a command line gives them, with None in place of the word none."""
    return {
        name: None if isinstance(value, str) and value.lower() == "none" else value for name, value in values.items()
    }


def _values(settings: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of the settings of a dataclass and its groups."""
    for field in _settable(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Choice):
            yield from _values(value)
        else:
            yield field.name, value


def flatten(settings: Any) -> dict[str, Any]:
    """The settings of a dataclass and its groups as one flat mapping of plain values."""
    flat: dict[str, Any] = {}
    for name, value in _values(settings):
        flat |= {name: value.name, **value.settings()} if isinstance(value, Choice) else {name: _plain(value)}
    return flat


def unused(settings: Any) -> set[str]:
    """The flat settings without effect: those of registry entries that are not chosen."""
    choices = [value for _, value in _values(settings) if isinstance(value, Choice)]
    return {name for each in choices for name in each.settings().keys() - each.own_settings()}


def _plain(value: Any) -> Any:
    """The value as JSON has it; any other object, such as a custom network, as the name of its class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return type(value).__name__


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """`name: old, now new` for each setting on which two flat mappings differ."""
    missing = object()
    return [
        f"{name}: {before.get(name, 'absent')}, now {after.get(name, 'absent')}"
        for name in sorted({*before, *after})
        if before.get(name, missing) != after.get(name, missing)
    ]
