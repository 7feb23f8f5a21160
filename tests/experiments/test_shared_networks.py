"""Which runs share their networks: those whose training is the same, up to the task where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs_made import comparable

from engram.data import Stream
from engram.experiments import Result, run
from engram.methods import make, override, setting_names
from engram.network import Cache, CorrectedHead

QUICK = {
    **{"epochs": 1, "batch_size": 24, "learning_rate": 0.1, "expected_classes": 6},
    **{"features_per_class": 6, "adapter_steps": 5, "adapter_width": 32, "images_per_class": 5},
}


@pytest.fixture(scope="module")
def stream(vectors: Stream) -> Stream:
    """Two tasks of two classes."""
    return vectors.first(2)


def shared(folder: Path, stream: Stream, method: str, **settings: Any) -> tuple[Result, int]:
    """A run that shares through `folder`, and how many networks it had to train."""
    known = setting_names(method, settings.get("objective"))
    defaults = {name: value for name, value in QUICK.items() if name in known}
    before = len(list(folder.glob("network-*")))
    result = run(make(method, **override(defaults, settings)), stream, cache=Cache(folder))
    return result, len(list(folder.glob("network-*"))) - before


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("hybrid", {"features_per_class": 6}), ("hybrid", {"features_per_class": 9, "adapter": "identity"})),
        (("hybrid", {"features_per_class": 9}), ("gamma-icarl", {})),
        (("gamma-icarl", {}), ("hybrid", {"classifier": "ridge"})),
        (("gamma-icarl", {}), ("gamma-icarl", {"predict_with": "head"})),
        (("gamma-icarl", {"images_total": 20}), ("hybrid", {"images_total": 20})),
        (("lucir", {}), ("lucir", {"predict_with": "nearest-mean"})),
        (("lucir", {}), ("hybrid", {"objective": "lucir"})),
        (("features", {"objective": "bic"}), ("lwf", {"objective": "bic", "head": "corrected"})),
    ],
    ids=lambda run: "-".join([run[0], *map(str, run[1].values())]),
)
def test_runs_with_the_same_training_share_their_networks(
    first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]], stream: Stream, tmp_path: Path
) -> None:
    trained, count = shared(tmp_path / "shared", stream, first[0], **first[1])
    assert count == len(stream)
    assert "train" in trained.seconds
    taken, count = shared(tmp_path / "shared", stream, second[0], **second[1])
    assert count == 0
    assert "train" not in taken.seconds
    assert list((tmp_path / "shared").glob("features-*"))
    alone, count = shared(tmp_path / "alone", stream, second[0], **second[1])
    assert count == len(stream)
    assert comparable(taken) == comparable(alone)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("gamma-icarl", {}), ("gamma-icarl", {"images_per_class": 7})),
        (("hybrid", {}), ("gamma-icarl", {"images_per_class": 7})),
        (("gamma-icarl", {}), ("gamma-icarl", {"images_total": 20})),
        (("features", {}), ("gamma-icarl", {})),
        (("gamma-icarl", {}), ("gamma-lwf", {})),
        (("gamma-lwf", {}), ("hybrid", {})),
        (("lucir", {}), ("features", {"objective": "lucir"})),
        (("gamma-icarl", {}), ("gamma-icarl", {"distillation": 3.0})),
        (("features", {}), ("gamma-lwf", {"feature_distillation": 1.0})),
        (("features", {}), ("features", {"weight_averaging": 0.5})),
        (("features", {"objective": "lucir"}), ("features", {"objective": "lucir", "less_forget": 1.0})),
        (("bic", {}), ("bic", {"temperature": 1.0})),
        (("eeil", {}), ("eeil", {"fine_tuning": 0.0})),
    ],
    ids=lambda run: "-".join([run[0], *map(str, run[1].values())]),
)
def test_runs_with_other_exemplars_or_distillation_share_only_the_first_task(
    first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]], stream: Stream, tmp_path: Path
) -> None:
    shared(tmp_path / "shared", stream, first[0], **first[1])
    taken, count = shared(tmp_path / "shared", stream, second[0], **second[1])
    assert count == len(stream) - 1
    assert "train" in taken.seconds
    alone, count = shared(tmp_path / "alone", stream, second[0], **second[1])
    assert count == len(stream)
    assert comparable(taken) == comparable(alone)
    _, count = shared(tmp_path / "shared", stream.first(1), second[0], **second[1])
    assert count == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("bic", {}), ("bic-uncorrected", {})),
        (
            ("bic", {}),
            ("bic", {"images_per_class": 7}),
        ),  # determines what is held out, in the first task too
        (("gamma-icarl", {}), ("icarl", {})),
        (("gamma-icarl", {}), ("lucir", {})),
        (("features", {}), ("features", {"objective": "lucir"})),
        (("lucir", {}), ("lucir", {"last_relu": True})),
        (("features", {}), ("features", {"loss_function": "softmax"})),
        (("features", {}), ("features", {"gradient_noise": 0.1})),
        (("features", {}), ("features", {"seed": 1})),
    ],
    ids=lambda run: "-".join([run[0], *map(str, run[1].values())]),
)
def test_runs_with_other_training_share_nothing(
    first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]], vectors: Stream, tmp_path: Path
) -> None:
    shared(tmp_path, vectors.first(1), first[0], **first[1])
    result, count = shared(tmp_path, vectors.first(1), second[0], **second[1])
    assert count == 1
    assert "train" in result.seconds


def test_joint_training_shares_nothing(vectors: Stream, tmp_path: Path) -> None:
    shared(tmp_path, vectors.first(1), "finetune")
    before = sorted(tmp_path.iterdir())
    for _ in range(2):
        result, count = shared(tmp_path, vectors.first(2), "joint")
        assert count == 0
        assert "train" in result.seconds
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("method", ["bic", "lucir"])
def test_a_cached_network_has_its_correction_and_features_of_both_signs(
    method: str, images: Stream, tmp_path: Path
) -> None:
    learner = make(method, epochs=1, learning_rate=0.01, batch_size=8, images_per_class=12)
    learner.learn(images.tasks[0])
    network, names = learner.train(images.tasks[1]), images.fingerprints()
    cache = Cache(tmp_path)
    path = cache.path("network", names)
    assert cache.load(path) is None
    cache.save(path, network.state_dict())
    tensors = cache.load(path)
    assert tensors is not None
    found = learner.restored_network(tensors, images.tasks[1].train.shape)
    inputs = images.tasks[1].test.batch(torch.arange(5))
    for one, other in zip(found(inputs), network(inputs), strict=True):
        assert torch.equal(one, other)
    if method == "bic":
        assert isinstance(found.head, CorrectedHead)
        assert found.head.newest.tolist() == [False, False, True, True]
        assert float(found.head.alpha) != 1 and float(found.head.beta) != 0
    else:
        assert bool((found.features(inputs) < 0).any())


def test_runs_that_differ_after_extraction_share_the_features(stream: Stream, tmp_path: Path) -> None:
    first, _ = shared(tmp_path / "shared", stream, "features")
    second, _ = shared(tmp_path / "shared", stream, "features", adapter="ridge", C=3.0)
    assert "extract" in first.seconds and "extract" not in second.seconds and "measure" not in second.seconds
    alone, _ = shared(tmp_path / "alone", stream, "features", adapter="ridge", C=3.0)
    assert comparable(second) == comparable(alone)


def test_runs_that_differ_after_adaptation_share_the_adapters(stream: Stream, tmp_path: Path) -> None:
    first, _ = shared(tmp_path / "shared", stream, "features")
    second, _ = shared(tmp_path / "shared", stream, "features", features_per_class=3, codec="int8", C=3.0)
    assert "adapt" in first.seconds and "adapt" not in second.seconds
    alone, _ = shared(tmp_path / "alone", stream, "features", features_per_class=3, codec="int8", C=3.0)
    assert comparable(second) == comparable(alone)
