"""The JSON files of a model are parsed strictly."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import asdict
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.errors import DataError
from engram.model.manifest import Manifest, NewerError, Pointer, seal, unseal

DIGEST = "0123456789abcdef" * 4
WHOLE: dict[str, Any] = {
    "schema": 1,
    "version": 3,
    "parent": 1,
    "created": "2026-01-31T12:00:00Z",
    "engram": "0.1.0",
    "action": "learn",
    "method": "features",
    "settings": {"learning_rate": 0.1, "weights": None, "milestones": [1, 2], "cosine": True},
    "classes": ["façade", "Σ"],
    "history": [
        {"version": 1, "created": "2025-12-31T23:59:59Z", "action": "learn", "details": {"images": 40}},
        {"version": 3, "created": "2026-01-31T12:00:00Z", "action": "learn", "details": {}},
    ],
    "details": {"size": [32, 32], "nested": {"threshold": 0.5}},
    "learner": {"sha256": DIGEST, "bytes": 120},
    "network": {"sha256": DIGEST, "bytes": 4000},
}


def changed(*path: str | int, to: Any = ..., without: bool = False) -> dict[str, Any]:
    """The manifest with one value changed or removed."""
    value = copy.deepcopy(WHOLE)
    place: Any = value
    for step in path[:-1]:
        place = place[step]
    if without:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return value


def parsed(value: dict[str, Any]) -> Manifest:
    return Manifest.parse(seal(value), "manifest.json")


def test_manifest_survives_serialisation() -> None:
    manifest = parsed(WHOLE)
    assert manifest.classes == ("façade", "Σ")
    assert [change.version for change in manifest.history] == [1, 3]
    assert manifest.learner.bytes == 120
    assert json.loads(manifest.serialise()) == {"sha256": ANY, **WHOLE}
    assert manifest.network is not None and manifest.network.bytes == 4000
    assert Manifest.parse(manifest.serialise(), "manifest.json") == manifest


@pytest.mark.parametrize("field", WHOLE)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(DataError, match=rf"^manifest\.json .*'{field}'"):
        parsed(changed(field, without=True))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), "3"),
        (("version",), True),
        (("version",), 3.0),
        (("version",), 0),
        (("parent",), "1"),
        (("created",), "yesterday"),
        (("created",), "2026-01-31T12:00:00+02:00"),
        (("action",), 7),
        (("settings",), []),
        (("settings", "group"), {"learning_rate": 1}),
        (("classes",), "ab"),
        (("classes",), ["a", 1]),
        (("classes",), ["a", "b", "a"]),
        (("history",), {}),
        (("history", 0, "version"), "1"),
        (("history", 0, "details"), None),
        (("history", 0, "details", "new"), ["x"]),
        (("history", 0, "details", "new"), [1]),
        (("history", 0, "details", "more"), {"tulip": "many"}),
        (("history", 0, "details", "classes"), "all"),
        (("details",), [1]),
        (("learner",), None),
        (("learner", "bytes"), -1),
        (("learner", "sha256"), "0" * 63),
        (("learner", "sha256"), "0" * 64 + "\n"),
        (("network",), "resnet18"),
        (("network", "sha256"), "../" + DIGEST[3:]),
        (("network", "bytes"), "4000"),
        (("network", "unheard of"), 1),
        (("unheard of",), 1),
        (("history", 1, "unheard of"), 1),
    ],
)
def test_a_field_of_another_type_is_named(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(DataError, match=rf"^manifest\.json .*'{path[0]}"):
        parsed(changed(*path, to=value))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (changed("parent", to=3), "its parent 3 is not older than itself"),
        (changed("history", to=[]), "its history does not end with its own version"),
        (changed("history", 1, "version", to=2), "its history does not end with its own version"),
        (changed("history", 1, "action", to="forget"), "its history does not end with its own version"),
        (changed("history", 0, "version", to=4), "its history is not in order"),
        (changed("history", 0, "version", to=3), "its history is not in order"),
    ],
)
def test_inconsistent_manifest_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"^manifest.json .*{reason}"):
        parsed(value)


def test_newer_schema_is_distinguished_from_damage_and_names_its_version() -> None:
    newer = {"schema": 2, "engram": "3.1.4", "whatever": []}
    for read in (Manifest.parse, Pointer.parse):
        with pytest.raises(NewerError, match=r"schema 2.* 3\.1\.4.* schema 1"):
            read(seal(newer), "file.json")


@pytest.mark.parametrize("schema", [0, -1, "1", None, 1.0, True, []])
def test_invalid_schema_number_is_refused(schema: Any) -> None:
    with pytest.raises(DataError, match=r"^manifest\.json .*'schema"):
        parsed(changed("schema", to=schema))


# Sealed files

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of all values in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in places(each, (*path, key)))]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(places(WHOLE)[1:]), JSON, st.booleans())
def test_changed_manifest_parses_to_its_content_or_is_refused(
    path: tuple[str | int, ...], value: Any, without: bool
) -> None:
    mutated = changed(*path, to=value, without=without)
    try:
        manifest = parsed(mutated)
    except DataError as error:
        assert str(error).startswith("manifest.json ")
    else:
        assert json.dumps(asdict(manifest)) == json.dumps(mutated)  # nothing was converted, dropped or filled in


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=6), JSON, max_size=3))
def test_arbitrary_json_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^manifest\.json "):
        parsed(value)


def test_the_checksum_of_a_sealed_file_is_of_every_byte_after_its_digits() -> None:
    content = seal({"name": "Σ"})
    assert json.loads(content) == {"sha256": content[15:79].decode(), "name": "Σ"}
    assert content[15:79].decode() == hashlib.sha256(content[79:]).hexdigest()
    assert unseal(content, "file.json") == {"name": "Σ"}


def test_every_changed_byte_of_a_sealed_file_is_found() -> None:
    content = seal({"name": "Σ", "list": [1, {"a": None}]})
    for position, byte in enumerate(content):
        for other in {byte ^ 1, byte ^ 0x20, 0x20, 0x0A, 0x09} - {byte}:  # JSON allows any white space
            with pytest.raises(DataError, match=r"file\.json"):
                unseal(content[:position] + bytes([other]) + content[position + 1 :], "file.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", seal({"a": 1})[:-1], seal({"a": 1}) + b"\n"])
def test_unsealed_content_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match=r"file\.json"):
        unseal(content, "file.json")


# The pointer


def test_pointer_survives_serialisation() -> None:
    for pointer in (Pointer(current=None, versions={}), Pointer(current=2, versions={2: DIGEST, 10: DIGEST})):
        assert Pointer.parse(pointer.serialise(), "current.json") == pointer
        assert json.loads(pointer.serialise())["schema"] == 1


@pytest.mark.parametrize(
    ("current", "versions"),
    [
        (None, {"1": DIGEST}),
        (1, {}),
        (2, {"1": DIGEST}),
        (1, {"1": DIGEST, "01": DIGEST}),
        (1, {"1": "short"}),
        (1, {"1": DIGEST, "-2": DIGEST}),
        (1, {"1": DIGEST, "9" * 5000: DIGEST}),
        (True, {"1": DIGEST}),
        ("1", {"1": DIGEST}),
        (1, [DIGEST]),
    ],
)
def test_pointer_to_an_unlisted_version_is_refused(current: Any, versions: Any) -> None:
    content = seal({"schema": 1, "engram": "0.1.0", "current": current, "versions": versions})
    with pytest.raises(DataError, match=r"^current\.json"):
        Pointer.parse(content, "current.json")
