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

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMITTED = sorted(RESULTS.rglob("result.json"))
FOLDERS = sorted({path.relative_to(RESULTS).parts[0] for path in COMMITTED})
SHAPES = {"cifar100": (32, 32, 3), "digits": (8, 8, 1)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_committed_result_is_consistent_and_its_settings_make_its_method(folder: str) -> None:
    for path in sorted((RESULTS / folder).rglob("result.json")):
        result = Result.load(path)
        assert result.is_consistent(), path
        assert result.average_incremental_accuracy == pytest.approx(sum(result.curve) / len(result.curve)), path
        assert result.memory_mb == pytest.approx(result.memory_bytes / 2**20), path
        if result.drift_gap is not None and result.ceiling_curve is not None:
            gaps = [ceiling - reached for ceiling, reached in zip(result.ceiling_curve, result.curve, strict=True)]
            assert result.drift_gap == pytest.approx(gaps), path
        # Settings that came later, such as those of another classifier, are not in the file and have their default.
        learner = make(result.method, **result.settings)
        images = torch.zeros(2, *SHAPES[result.dataset], dtype=torch.uint8)
        resolved = learner.resolved_settings(Samples.of(images, torch.arange(2)))
        assert {name: resolved[name] for name in result.settings} == result.settings, path
        assert {"objective", "network", "tune", "device", *flatten(learner.training)} <= result.settings.keys(), path


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
