"""Settings are set by flat names, read from text as their types say, and refused with an explanation."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from learners_made import OF_EACH_LEARNER
from pydantic import PositiveInt
from torch import nn

from engram.errors import UsageError
from engram.methods import METHODS, OBJECTIVES, Replay, make, setting_names
from engram.methods.bic import BiasCorrection
from engram.methods.lucir import Rebalancing
from engram.methods.objectives import Distillation
from engram.settings import build, differences, fields, flatten, unused


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
    with pytest.raises(UsageError, match=f"'{name}'") as caught:
        build(Cake, {name: value}, "cake")
    assert str(value).split(",")[0] in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_error_lists_all_values_of_a_setting() -> None:
    with pytest.raises(UsageError, match=r"'cosine', 'linear', 'corrected' or 'shifted'"):
        make("engram", head="zip")


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        build(Cake, {"minuets": 3}, "cake")
    assert "'minuets'" in str(caught.value) and "'minutes'" in str(caught.value)


def test_an_unknown_setting_like_no_other_is_refused_with_all_names() -> None:
    with pytest.raises(UsageError, match="degrees, fan, filling, minutes, name, note, shape, steps"):
        build(Cake, {"zzz": 3}, "cake")


@pytest.mark.parametrize("name", ["oven", "slices_"])
def test_neither_a_group_nor_a_learned_attribute_is_a_setting(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'"):
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


def test_flat_settings_build_the_same_object_again() -> None:
    cake = Cake(name="carrot", note=None, oven=Oven(fan=True, steps=(0.25,)))
    assert build(Cake, flatten(cake), "cake") == cake


def test_settings_of_entries_that_are_not_chosen_are_unused() -> None:
    learner = make("features", classifier="svm", shrinkage=0.3)
    found = unused(learner)
    assert {"penalty", "shrinkage", "codec_bytes"} <= found <= learner.settings().keys()
    assert not {"C", "adapter_width", "classifier", "epochs"} & found


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
    with pytest.raises(UsageError, match=r"'features'.*'epoch'.*'epochs'"):
        make("features", epoch=3)


# A group chosen by name


@dataclass(frozen=True, kw_only=True)
class Heat:
    """What a group's classes have in common: nothing."""


@dataclass(frozen=True, kw_only=True)
class Baking(Heat):
    degrees: float = 180.0
    minutes: PositiveInt = 30


@dataclass(frozen=True, kw_only=True)
class Grilling(Heat):
    degrees: float = 250.0
    turns: PositiveInt = 2


@dataclass(kw_only=True)
class Meal:
    name: str = "plain"
    heat: Heat = field(default_factory=Baking)


GRILLED = {"heat": Grilling}


def test_the_settings_of_a_group_are_those_of_the_class_chosen_for_it_or_else_of_its_default() -> None:
    assert [(name, owner) for name, _, owner in fields(Meal)] == [
        ("name", Meal),
        ("degrees", Baking),
        ("minutes", Baking),
    ]
    assert [(name, owner) for name, _, owner in fields(Meal, GRILLED)] == [
        ("name", Meal),
        ("degrees", Grilling),
        ("turns", Grilling),
    ]


def test_a_group_is_built_of_the_class_chosen_for_it() -> None:
    assert build(Meal, {"minutes": "45"}, "meal") == Meal(heat=Baking(minutes=45))
    assert build(Meal, {"turns": "4", "name": "hot"}, "meal", GRILLED) == Meal(name="hot", heat=Grilling(turns=4))
    assert build(Meal, {}, "meal", GRILLED) == Meal(heat=Grilling())
    assert flatten(build(Meal, {"degrees": 200}, "meal", GRILLED)) == {"name": "plain", "degrees": 200.0, "turns": 2}


def test_a_setting_of_a_class_that_was_not_chosen_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'minutes'.*degrees, name, turns"):
        build(Meal, {"minutes": 45}, "meal", GRILLED)
    with pytest.raises(UsageError, match="'turns'"):
        build(Meal, {"turns": 4}, "meal")


def test_a_value_of_the_class_chosen_is_checked_by_its_types() -> None:
    with pytest.raises(UsageError, match=r"'turns'.*'0'"):
        build(Meal, {"turns": "0"}, "meal", GRILLED)


# An objective chosen by name


def test_another_objective_brings_the_settings_of_its_own_paper() -> None:
    learner = make("features", objective="lucir")
    assert type(learner.objective) is Rebalancing
    assert (learner.head, learner.last_relu) == ("cosine", False)
    training = learner.training
    assert (training.epochs, training.learning_rate, training.weight_decay) == (160, 0.1, 5e-4)
    assert (training.milestones, training.learning_rate_decay) == ((0.5, 0.75), 10.0)
    assert (learner.name, learner.settings()["objective"]) == ("features", "lucir")
    own = make("features")
    assert type(own.objective) is Distillation
    assert (own.last_relu, own.training.learning_rate, own.training.weight_decay) == (True, 2.0, 1e-5)
    assert make("features", objective=None).settings() == own.settings()


def test_given_settings_override_those_of_the_objectives_paper() -> None:
    learner = make("features", objective="lucir", learning_rate=0.3, last_relu="true", weight_decay=0.0, less_forget=2)
    assert (learner.training.learning_rate, learner.last_relu, learner.training.weight_decay) == (0.3, True, 0.0)
    assert learner.settings()["less_forget"] == 2.0
    assert (learner.training.epochs, learner.training.learning_rate_decay) == (160, 10.0)


def test_another_objective_leaves_the_memory_and_the_classifier_of_the_method() -> None:
    learner = make("gamma-icarl", objective="bic")
    assert isinstance(learner, Replay)
    assert type(learner.objective) is BiasCorrection
    assert (learner.head, learner.training.epochs, learner.training.weight_decay) == ("corrected", 250, 2e-4)
    exemplars = learner.exemplars
    assert (learner.predict_with, exemplars.images_per_class, exemplars.images_total) == ("nearest-mean", 20, None)
    assert make("gamma-icarl", objective="bic", temperature=3).settings()["temperature"] == 3.0


def test_settings_are_those_of_the_chosen_objective() -> None:
    with pytest.raises(UsageError, match=r"'gamma-icarl'.*'feature_distillation'"):
        make("gamma-icarl", objective="bic", feature_distillation=0.1)
    with pytest.raises(UsageError, match=r"'gamma-icarl'.*'beta_penalty'"):
        make("gamma-icarl", beta_penalty=0.1)
    assert {"less_forget", "margin"} <= setting_names("features", "lucir") - setting_names("features")
    assert {"distillation", "expected_classes"} <= setting_names("features") - setting_names("features", "lucir")


def test_an_unknown_objective_is_refused_with_the_nearest_name() -> None:
    for ask in (lambda: make("features", objective="lucri"), lambda: setting_names("features", "lucri")):
        with pytest.raises(UsageError, match=r"'lucri'.*'lucir'"):
            ask()


@pytest.mark.parametrize("method", OF_EACH_LEARNER)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_combines_with_every_learner_and_brings_its_papers_settings(
    method: str, objective: str
) -> None:
    learner = make(method, objective=objective)
    assert type(learner.objective) is OBJECTIVES[objective]
    assert set(flatten(learner)) == setting_names(method, objective)
    if objective != METHODS[method].objective:  # with its own, the method's settings go before: bic-uncorrected's head
        wanted, settings = OBJECTIVES[objective].defaults, learner.settings()
        assert {name: settings[name] for name in wanted} == json.loads(json.dumps(wanted))


@pytest.mark.parametrize(
    ("given", "numbers"),
    [({}, (None, 2000)), ({"images_total": 100}, (None, 100)), ({"images_per_class": 7}, (7, None))],
)
def test_giving_images_per_class_or_in_total_replaces_the_methods_number(
    given: dict[str, int], numbers: tuple[int | None, int | None]
) -> None:
    learner = make("icarl", **given)
    assert isinstance(learner, Replay)
    assert (learner.exemplars.images_per_class, learner.exemplars.images_total) == numbers


def test_images_per_class_and_in_total_are_refused_together() -> None:
    with pytest.raises(UsageError, match=r"images_per_class.*images_total"):
        make("icarl", images_per_class=7, images_total=100)
