"""Classifiers, adapters and codecs are chosen by name; adding one takes a class and an entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from engram.errors import UsageError
from engram.features import ADAPTERS, CLASSIFIERS, CODECS, LDA, Auto, MLPAdapter, NearestMean
from engram.methods import Features, make
from engram.settings import Choice, fields, flatten

FAMILIES: dict[str, dict[str, Any]] = {"classifier": CLASSIFIERS, "adapter": ADAPTERS, "codec": CODECS}
ENTRIES = [(family, name) for family, registry in FAMILIES.items() for name in registry]
every_entry = pytest.mark.parametrize(("family", "name"), ENTRIES)


def learner(**settings: Any) -> Features:
    made = make("features", **settings)
    assert isinstance(made, Features)
    return made


@every_entry
def test_every_entry_is_chosen_by_its_name(family: str, name: str) -> None:
    made = learner(**{family: name})
    assert made.settings()[family] == name
    entry = getattr(made, family).make()
    assert type(entry) is FAMILIES[family][name]
    assert (type(entry).__doc__ or "").strip()
    assert getattr(entry, "description", None) or entry.name in FAMILIES[family]


@every_entry
def test_a_setting_that_several_entries_have_is_the_same_in_all_of_them(family: str, name: str) -> None:
    settings = Choice(FAMILIES[family], name).settings()
    for setting, own, _ in fields(FAMILIES[family][name]):
        assert settings[setting] == own.default
    assert {family, *settings} <= set(flatten(learner()))


@pytest.mark.parametrize(("family", "typo", "nearest"), [("classifier", "ldaa", "lda"), ("adapter", "rigde", "ridge")])
def test_the_error_for_an_unknown_name_suggests_the_nearest(family: str, typo: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"{family} '{typo}'.*'{nearest}'"):
        learner(**{family: typo})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", ["zzzz", None, 3, [7]])
def test_the_error_for_an_unknown_name_lists_all_if_none_is_near(family: str, bad: object) -> None:
    with pytest.raises(UsageError) as caught:
        learner(**{family: bad})
    assert all(name in str(caught.value) for name in FAMILIES[family])


def test_the_settings_of_an_entry_are_the_fields_of_its_class() -> None:
    made = learner(classifier="lda", shrinkage="0.3", adapter_width="32", codec="pq", codec_bytes="16")
    assert made.make_classifier() == LDA(shrinkage=0.3)
    adapter = made.adapter.make()
    assert isinstance(adapter, MLPAdapter) and adapter.adapter_width == 32
    assert made.codec.make() == CODECS["pq"](codec_bytes=16)  # type: ignore[call-arg]
    for setting, value in (("shrinkage", 1.5), ("C", 0), ("adapter_depth", 0), ("codec_bytes", -1)):
        with pytest.raises(UsageError, match=setting):
            learner(**{setting: value})


def test_settings_of_entries_that_are_not_chosen_apply_once_they_are() -> None:
    made = learner(classifier="auto", shrinkage=0.2)
    assert type(made.make_classifier()) is Auto and made.settings()["shrinkage"] == 0.2
    assert made.classifier.named("lda").make() == LDA(shrinkage=0.2)


def test_codec_bytes_are_refused_for_another_codec() -> None:
    with pytest.raises(UsageError, match=r"int8.*codec_bytes"):
        learner(codec="int8", codec_bytes=8)
    assert learner(codec="int8", codec_bytes=None).settings()["codec_bytes"] is None


def test_internal_parameters_are_no_settings() -> None:
    with pytest.raises(UsageError, match="tolerance"):
        learner(tolerance=1e-3)


@dataclass
class Blurred(NearestMean):
    """A new classifier, with a setting and a parameter for Python code."""

    blur: float = 0.5
    detail: int = field(default=3, metadata={"setting": False})


def test_a_new_classifier_needs_a_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLASSIFIERS, "blurred", Blurred)
    made = learner(classifier="blurred", blur="0.25")
    assert made.make_classifier() == Blurred(blur=0.25)
    assert learner().settings()["blur"] == 0.5 and "detail" not in made.settings()
