"""The package as others import it."""

from pathlib import Path

import pytest

import engram
from engram.features import NearestMean
from engram.methods import METHODS, OBJECTIVES
from engram.methods.editing import forget

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", engram.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(engram, name) is not None
    assert name in dir(engram)


def test_the_documented_method_can_be_added_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.methods.METHODS", dict(METHODS))  # other tests share the real ones
    monkeypatch.setattr("engram.methods.OBJECTIVES", dict(OBJECTIVES))
    for name in ("means", "hold"):
        exec((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8"), {})
    stream = engram.split(engram.load("digits"), classes_per_task=5, seed=0)
    for method, settings in (
        ("means", {"learning_rate": 0.2}),
        ("means", {"objective": "lucir"}),
        ("hold", {"hold": 1.0}),
    ):
        made = engram.make(method, epochs=1, **settings)
        assert made.name == method
        assert len(engram.run(made, stream).curve) == 2
        forget(made, stream.classes[0])
        again = engram.make(method, epochs=1, **settings)
        again.restore(made.state())
        assert type(again.classifier_) is type(made.classifier_) is (NearestMean if method == "means" else type(None))
