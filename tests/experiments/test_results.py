"""Result files: those that were committed can be read, and damaged or foreign ones are refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from made_results import result

from engram.data import Samples
from engram.errors import DataError
from engram.experiments import Result
from engram.methods import make
from engram.settings import flatten

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").rglob("result.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.parent.name) + "-" + path.parent.parent.name)
def test_every_committed_result_is_readable_and_consistent(path: Path) -> None:
    result = Result.load(path)
    assert result.average_incremental_accuracy == pytest.approx(sum(result.curve) / len(result.curve))
    assert [len(row) for row in result.accuracy_matrix] == list(range(1, len(result.curve) + 1))
    assert result.memory_mb == pytest.approx(result.memory_bytes / 2**20)
    if result.drift_gap is not None and result.ceiling_curve is not None:
        gaps = [ceiling - reached for ceiling, reached in zip(result.ceiling_curve, result.curve, strict=True)]
        assert result.drift_gap == pytest.approx(gaps)


SHAPES = {"cifar100": (32, 32, 3), "digits": (8, 8, 1)}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.parent.name) + "-" + path.parent.parent.name)
def test_the_settings_of_every_committed_result_make_its_method_and_are_resolved(path: Path) -> None:
    """A setting that came later, such as one of another classifier, is not in the file and has its default."""
    result = Result.load(path)
    images = torch.zeros(2, *SHAPES[result.dataset], dtype=torch.uint8)
    learner = make(result.method, **result.settings)
    resolved = learner.resolved_settings(Samples.of(images, torch.arange(2)))
    assert {name: resolved[name] for name in result.settings} == result.settings
    assert {"objective", "network", "tune", "device", *flatten(learner.training)} <= result.settings.keys()


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda values: values.pop("schema"), "schema"),
        (lambda values: values.update(schema=99), "99.* 1"),
        (lambda values: values.pop("curve"), "curve"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(change: object, fact: str, tmp_path: Path) -> None:
    values = json.loads(COMMITTED[0].read_text())
    change(values)  # type: ignore[operator]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=fact) as caught:
        Result.load(path)
    assert str(path) in str(caught.value)
    path.write_text("{")
    with pytest.raises(DataError, match=re.escape(str(path))):
        Result.load(path)


def test_top_5_is_quoted_on_imagenet_and_top_1_elsewhere() -> None:
    values = {"curve": (0.6, 0.4), "curve_top5": [0.9, 0.7], "average_incremental_accuracy_top5": 0.8}
    assert result(dataset="imagenet100", **values).leading == ("top-5 ", 0.8, [0.9, 0.7])
    assert result(dataset="cifar100", **values).leading == ("", pytest.approx(0.5), [0.6, 0.4])
