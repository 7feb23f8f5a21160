"""Runs on data sets of image files: the paper's presets, truncated; resuming; with and without a cache."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from folders_made import imagenet, settle
from learners_made import OF_EACH_KIND
from runs_made import AfterTask, comparable

from engram.data import Dataset, DecodeOptions, load
from engram.errors import DataError, UsageError
from engram.experiments import Plan
from engram.experiments.results import Result
from engram.methods import METHODS, setting_names
from engram.network import NETWORKS

TRUNCATED: dict[str, Any] = {"epochs": 1, "batch_size": 8, "adapter_width": 32, "adapter_steps": 5}
READING = DecodeOptions(size=32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return settle(imagenet(tmp_path_factory.mktemp("data") / "imagenet", classes=4, train=8, test=3))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_DATA", str(tmp_path / "cache"))


def truncated(method: str, **settings: Any) -> dict[str, Any]:
    known = setting_names(method)
    return {name: value for name, value in {**TRUNCATED, **settings}.items() if name in known}


def plan(method: str = "features", **settings: Any) -> Plan:
    return Plan(method=method, preset="paper", classes_per_task=2, settings=truncated(method, **settings))


def plain(result: Result) -> dict[str, Any]:
    values = comparable(result, "environment")
    source = {name: value for name, value in values["split"]["source"].items() if name != "data"}  # the folder's name
    return {**values, "split": {**values["split"], "source": source}}


@pytest.mark.filterwarnings("ignore:.*all are kept")
@pytest.mark.parametrize("method", OF_EACH_KIND)
def test_the_papers_preset_for_imagenet_runs_truncated(method: str, root: Path) -> None:
    dataset = load("imagenet1000", root, options=READING)
    deep = method in ("hybrid", "eeil", "lucir", "bic")
    result = plan(method, **({} if deep else {"network": "small"})).run(dataset)
    assert len(result.curve) == len(result.curve_top5) == 2 and result.curve_top5 == [1.0, 1.0]
    assert result.settings["network"] == ("resnet18" if deep else "small") and result.settings["crop"] == 28
    storing = "icarl eeil bic bic-uncorrected joint lucir gamma-icarl hybrid gem a-gem il2m threshold-moving"
    per_class = 8 if method in storing.split() else 0  # all of them: no total or number per class is reached
    numbers = 512 if deep else 64
    vectors = 4 * 8 * numbers * 4 if "features" in METHODS[method].keeps else 0
    vectors = 4 * 8 * numbers + 2 * numbers * 4 if method == "engram" else vectors  # a byte a number, and their ranges
    if "means" in METHODS[method].keeps:  # four of them, and the triangles of four covariances
        vectors = 4 * 4 * numbers + (
            4 * 4 * numbers * (numbers + 1) // 2 if "covariances" in METHODS[method].keeps else 0
        )
    if METHODS[method].keeps == "importance of weights":
        vectors = 4 * sum(weight.numel() for weight in NETWORKS["small"].make(3).parameters())
    assert result.memory_bytes == 4 * per_class * 32 * 32 * 3 + vectors  # stored uncropped: 32 × 32, not 28 × 28


def test_a_cache_of_decoded_images_does_not_change_the_result(root: Path) -> None:
    results = [
        plan("hybrid", network="small", images_per_class=2).run(load("imagenet1000", root, options=reading))
        for reading in (READING, replace(READING, workers=3), replace(READING, cache=10**6))
    ]
    assert plain(results[0]) == plain(results[1]) == plain(results[2])


def test_a_stopped_run_resumes_with_cached_images_and_from_a_copy_of_the_folder(root: Path, tmp_path: Path) -> None:
    whole = plan(network="small").run(load("imagenet1000", root, options=READING))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(network="small").run(
            load("imagenet1000", root, options=READING), tmp_path / "run", listeners=[AfterTask(stop)]
        )
    copied = shutil.copytree(root, tmp_path / "copy")
    packed = load("imagenet1000", copied, options=replace(READING, cache=10**6))
    assert plain(plan(network="small").run(packed, tmp_path / "run", resume=True)) == plain(whole)


def test_a_run_does_not_resume_with_other_files(root: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(root, tmp_path / "copy")
    (copied / "train" / "n00000000" / "n00000000_0.JPEG").rename(copied / "train" / "n00000000" / "other.JPEG")
    one = plan(network="small")
    one.run(load("imagenet1000", root, options=READING), tmp_path / "run")
    for other in (
        load("imagenet1000", copied, options=READING),
        load("imagenet1000", root, options=DecodeOptions(size=33)),
    ):
        with pytest.raises(UsageError, match=r"tasks|data"):
            one.run(other, tmp_path / "run", resume=True)


def test_a_run_survives_a_damaged_file_but_not_a_missing_folder(root: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(root, tmp_path / "copy")
    bad = copied / "train" / "n00000000" / "n00000000_3.JPEG"
    bad.write_bytes(bad.read_bytes()[:20])
    with pytest.warns(UserWarning, match=r"n00000000_3\.JPEG"):
        plan("finetune", network="small").run(load("imagenet1000", copied, options=READING))
    dataset: Dataset = load("imagenet1000", copied, options=READING)
    shutil.rmtree(copied)
    with pytest.raises(DataError, match="16 files, 16"):
        plan("finetune", network="small", batch_size=32).run(dataset)


def test_omega_and_accuracies_are_measured_on_image_files(root: Path) -> None:
    dataset = load("imagenet1000", root, options=READING)
    result = plan(network="small", features_per_class=3).run(dataset)
    assert result.omega is not None and result.omega[0] == pytest.approx(1.0, abs=1e-5)
    assert torch.tensor(result.accuracy_matrix[1]).shape == (2,)
