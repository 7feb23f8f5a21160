"""Settings are set by flat names, read from text as their types say, and refused in words."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from pydantic import PositiveInt
from torch import nn

from engram.errors import UsageError
from engram.methods import METHODS, OBJECTIVES, make, setting_names
from engram.settings import build, differences, fields, flatten


@dataclass(frozen=True, kw_only=True)
class Oven:
    degrees: float = 180.0
    minutes: PositiveInt = 30
    fan: bool = False
    steps: tuple[float, ...] = (0.5, 0.75)


@dataclass(kw_only=True)
class Cake:
    name: str = "plain"
    note: str | None = "sweet"
    filling: str | nn.Module = "jam"
    shape: Literal["round", "square"] = "round"
    oven: Oven = field(default_factory=Oven)
    slices_: int = field(default=0, init=False)  # not a setting


def test_flat_names_reach_the_group_they_belong_to() -> None:
    cake = build(Cake, {"minutes": 45, "name": "carrot"}, "cake")
    assert cake == Cake(name="carrot", oven=Oven(minutes=45))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("minutes", "45", 45),
        ("degrees", "1.5e2", 150.0),
        ("degrees", "200", 200.0),
        ("fan", "true", True),
        ("fan", "False", False),
        ("fan", "0", False),
        ("note", "none", None),
        ("note", "None", None),
        ("note", "a,b", "a,b"),
        ("shape", "square", "square"),
        ("steps", "0.1,0.2,0.3", (0.1, 0.2, 0.3)),
        ("steps", "0.1, 0.2", (0.1, 0.2)),
        ("steps", "0.5", (0.5,)),
        ("steps", "", ()),
    ],
)
def test_text_from_a_command_line_becomes_the_type_of_its_field(name: str, text: str, value: object) -> None:
    found = flatten_as_is(build(Cake, {name: text}, "cake"))[name]
    assert found == value
    assert type(found) is type(value)


def flatten_as_is(cake: Cake) -> dict[str, Any]:
    return {**vars(cake), **vars(cake.oven)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("minutes", "many"),
        ("minutes", "0"),
        ("minutes", 2.5),
        ("minutes", None),
        ("degrees", "nan"),
        ("degrees", float("inf")),
        ("fan", "perhaps"),
        ("shape", "oval"),
        ("steps", "0.1,x"),
        ("filling", 3),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_setting(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^The setting '{name}' cannot be ") as caught:
        build(Cake, {name: value}, "cake")
    assert str(value).split(",")[0] in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        build(Cake, {"minuets": 3}, "cake")
    assert str(caught.value) == "The cake has no setting 'minuets'. Did you mean 'minutes'?"


def test_an_unknown_setting_like_no_other_is_refused_with_all_names() -> None:
    with pytest.raises(UsageError, match=r"There are: degrees, fan, filling, minutes, name, note, shape, steps\.$"):
        build(Cake, {"zzz": 3}, "cake")


@pytest.mark.parametrize("name", ["oven", "slices_"])
def test_neither_a_group_nor_what_is_learned_is_a_setting(name: str) -> None:
    with pytest.raises(UsageError, match=f"no setting '{name}'"):
        build(Cake, {name: 1}, "cake")


def test_flattening_gives_plain_values_that_survive_json() -> None:
    module = nn.Linear(2, 2)
    cake = build(Cake, {"filling": module, "fan": True, "note": None}, "cake")
    assert cake.filling is module
    flat = flatten(cake)
    assert flat == {
        "name": "plain",
        "note": None,
        "filling": "Linear",
        "shape": "round",
        "degrees": 180.0,
        "minutes": 30,
        "fan": True,
        "steps": [0.5, 0.75],
    }
    assert json.loads(json.dumps(flat)) == flat


def test_what_was_flattened_builds_the_same_again() -> None:
    cake = Cake(name="carrot", note=None, oven=Oven(fan=True, steps=(0.25,)))
    assert build(Cake, flatten(cake), "cake") == cake


def test_differences_name_each_setting_with_both_values() -> None:
    before = {"minutes": 30, "fan": True, "old": None}
    after = {"minutes": 45, "fan": True, "new": 1}
    assert differences(before, after) == ["minutes: 30, now 45", "new: absent, now 1", "old: None, now absent"]
    assert differences(before, dict(before)) == []


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_of_a_method_has_a_name_of_its_own(method: str) -> None:
    chosen = {"objective": OBJECTIVES[METHODS[method].objective]}
    counts = Counter(name for name, _, _ in fields(METHODS[method].learner, chosen))
    assert {name: count for name, count in counts.items() if count > 1} == {}
    assert set(METHODS[method].settings) <= set(counts)
    assert set(flatten(make(method))) == set(counts) == setting_names(method)


def test_a_method_is_named_when_a_setting_of_it_is_mistyped() -> None:
    with pytest.raises(UsageError, match=r"The method 'features' has no setting 'epoch'\. Did you mean 'epochs'\?"):
        make("features", epoch=3)
