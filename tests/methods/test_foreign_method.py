"""A method in a module outside the package works as those inside do, within the predicted bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, SECONDS, engram
from conftest import blobs
from models_made import draw

ROOT = Path(__file__).parents[2]
FEATURE = 64 * 4  # bytes, of the network "small" and of digits
SUITE = """
from engram.experiments.suites import SUITES, Suite, Variant

SUITES["foreign"] = Suite(
    summary="means and features",
    variants=lambda facts: [Variant(label=name, method=name, series=name) for name in ("means", "features")],
)
"""


def documented() -> dict[str, str]:
    """The modules that docs/adding-a-method.md shows."""
    return {name: (ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("means.py", "hold.py")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the documented modules."""
    folder = tmp_path_factory.mktemp("own")
    files = documented()
    for name, text in files.items():
        (folder / name).write_text(text + (SUITE if name == "means.py" else ""), encoding="utf-8")
    return folder


def variables(place: Path) -> dict[str, str]:
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "ENGRAM_PLUGINS": "means,hold"}


def done(place: Path, cwd: Path, *arguments: str, fresh: bool = False) -> Any:
    """The JSON that a command printed; it must succeed."""
    ended = engram(*arguments, "--json", cwd=cwd, fresh=fresh, **variables(place))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


QUICK = ("--dataset", "digits", "--epochs", "1", "--tasks", "2", "--quiet")


def test_a_run_resumes_keeps_to_its_budget_and_is_reported(place: Path, tmp_path: Path) -> None:
    budget = 4 * 7 * FEATURE + 100  # seven features of each of four classes
    command = ("run", "means", *QUICK, "--budget", str(budget), "--out", "run")
    result = done(place, tmp_path, *command, fresh=True)
    assert result["settings"]["features_per_class"] == 7
    assert result["memory_bytes"] == 4 * 7 * FEATURE
    assert len(result["omega"]) == len(result["drift_gap"]) == 2
    assert done(place, tmp_path, *command, "--resume")["curve"] == result["curve"]
    refused = engram("run", "means", *QUICK, "--budget", str(4 * FEATURE - 1), cwd=tmp_path, **variables(place))
    assert refused.returncode == 2 and f"{4 * FEATURE:,}" in refused.stderr
    ended = engram("report", "run", "-o", "report.html", cwd=tmp_path, **variables(place))
    assert ended.returncode == 0, ended.stderr
    assert "means" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_objective_of_ones_own_trains_any_learner(place: Path, tmp_path: Path) -> None:
    result = done(place, tmp_path, "run", "means", *QUICK, "--set", "objective=hold", "--set", "hold=2")
    assert (result["settings"]["objective"], result["settings"]["hold"]) == ("hold", 2.0)
    assert done(place, tmp_path, "run", "hold", *QUICK)["memory_bytes"] == 0
    assert {"means", "hold"} <= {row["name"] for row in done(place, tmp_path, "methods")["methods"]}


def test_two_processes_of_torchrun_know_the_method(place: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "engram"]
    ended = subprocess.run(
        [*launcher, "run", "means", *QUICK, "--out", "run"],
        cwd=tmp_path,
        env={**ENVIRONMENT, **variables(place)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    # Not by its exit code: a process of torch sometimes aborts at exit, after everything is written.
    assert (tmp_path / "run" / "result.json").exists(), ended.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["method"], result["environment"]["processes"]) == ("means", "2")


def test_a_suite_predicts_and_runs_the_method_in_other_processes(place: Path, tmp_path: Path) -> None:
    command = ("suite", "foreign", "--dataset", "digits", "--tasks", "2", "--set", "epochs=1", "--out", "suites")
    planned = {each["method"]: each["memory_bytes"] for each in done(place, tmp_path, *command, "--plan")["runs"]}
    ended = engram(*command, "--jobs", "2", cwd=tmp_path, fresh=True, **variables(place))
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(path.read_text()) for path in (tmp_path / "suites").rglob("result.json")]
    assert {result["method"]: result["memory_bytes"] for result in found} == planned
    assert planned.keys() == {"means", "features"}
    ended = engram("report", "suites", "-o", "report.html", cwd=tmp_path, **variables(place))
    assert ended.returncode == 0, ended.stderr
    assert "foreign on digits" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_model_is_taught_within_its_budget_and_used(place: Path, tmp_path: Path) -> None:
    draw(tmp_path / "photos", ("rose", "lily"), 6)
    options = ("--method", "means", "--network", "small", "--image-size", "16", "--epochs", "1")
    learn = ("learn", "model", "photos", *options)
    plan = done(place, tmp_path, *learn, "--dry-run", "--budget", str(2 * 4 * FEATURE))
    assert plan["memory_bytes"] == 2 * 4 * FEATURE
    refused = engram(*learn, "--budget", "10", cwd=tmp_path, **variables(place))
    assert refused.returncode == 2 and f"{2 * FEATURE:,}" in refused.stderr
    assert not (tmp_path / "model").exists()
    done(place, tmp_path, *learn, "--budget", str(2 * 4 * FEATURE))
    classes = done(place, tmp_path, "inspect", "model")["classes"]
    assert [(each["name"], each["features"], each["bytes"]) for each in classes] == [
        ("lily", 4, 4 * FEATURE),
        ("rose", 4, 4 * FEATURE),
    ]
    assert len(done(place, tmp_path, "predict", "model", "photos/rose")["predictions"]) == 6


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    ended = engram("methods", cwd=tmp_path, fresh=True, ENGRAM_PLUGINS="no_such_module")
    assert ended.returncode == 2
    assert "no_such_module" in ended.stderr and "Traceback" not in ended.stderr


def test_predictions_follow_a_method_that_stores_a_fixed_number_of_float16_features() -> None:
    from dataclasses import dataclass

    from engram.data import split
    from engram.experiments.running import class_counts
    from engram.methods import BudgetError, fit_update
    from engram.methods.baselines import Memoryless

    @dataclass(kw_only=True)
    class Fixed(Memoryless):
        def features_limit(self, classes: int) -> int:
            return 3

        def features_bytes(self, count: int, dimension: int) -> int:
            return 2 * count * dimension

    stream = split(blobs(), classes_per_task=2)
    counts, samples = class_counts(stream.tasks), stream.tasks[0].train
    assert Fixed().memory_bytes(counts, samples) == 6 * 3 * 64 * 2
    assert fit_update(Fixed(), counts, 6 * 3 * 64 * 2, samples) == {}
    with pytest.raises(BudgetError, match=f"{6 * 3 * 64 * 2:,}"):
        fit_update(Fixed(), counts, 6 * 3 * 64 * 2 - 1, samples)


def test_an_update_that_stores_more_than_predicted_and_than_its_budget_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram.errors import EngramError
    from engram.methods import Features
    from engram.model import LearnOptions, ModelFolder, learn

    monkeypatch.setattr(Features, "features_limit", lambda *_: 0)
    options = LearnOptions(method="features", network="small", image_size=16, epochs=1, budget=10)
    with pytest.raises(EngramError, match=f"{2 * 6 * FEATURE:,} .* 10"):
        learn(ModelFolder(tmp_path / "model"), draw(tmp_path / "photos", ("rose", "lily"), 6), options)
    assert not (tmp_path / "model" / "current.json").exists()
