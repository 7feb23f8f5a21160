"""The memory of a run is predicted before anything is learned, and refused where the machine cannot hold it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import blobs, patterns

from engram.data import Stream, split
from engram.errors import UsageError
from engram.experiments import run
from engram.experiments.running import class_counts
from engram.methods import Learner, make

QUICK = {"epochs": 1, "batch_size": 16, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("features", {"features_per_class": 5, "adapter_steps": 5}),
        ("features", {"features_per_class": 5, "adapter_steps": 5, "codec": "int8"}),
        ("features", {"features_per_class": 50, "adapter_steps": 5, "codec": "pq", "codec_bytes": 16}),
        ("hybrid", {"features_per_class": 5, "adapter_steps": 5, "images_per_class": 3}),
        ("hybrid", {"features_per_class": 5, "adapter_steps": 5, "images_per_class": 3, "codec": "float16"}),
        ("icarl", {"images_total": 11}),
        ("gamma-icarl", {"images_per_class": 50}),  # more than there are
        ("finetune", {}),
        ("joint", {}),
    ],
)
def test_the_predicted_bytes_are_those_stored_in_the_end(method: str, settings: dict[str, Any]) -> None:
    for dataset in (patterns(), blobs()):
        stream = split(dataset, classes_per_task=2, seed=0)
        new, learner = make(method, **QUICK, **settings), make(method, **QUICK, **settings)
        for task in stream:
            counts = class_counts(stream.tasks[: task.index + 1])
            learner.learn(task)
            assert new.stored_images(counts) == len(learner.memory.images)
            assert new.stored_features(counts) == len(learner.memory.features)
            assert new.memory_bytes(counts, task.train) == learner.memory.nbytes


def test_a_memory_larger_than_the_machines_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = split(patterns(), classes_per_task=2, seed=0)  # 48 images of 192 bytes
    monkeypatch.setattr("engram.experiments.running.machine_memory", lambda: 3 * 48 * 192 - 1)
    with pytest.raises(UsageError, match=r"'joint' .* 48 images of 192 bytes, and 3 .*--image-size"):
        run(make("joint", **QUICK), stream, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(make("joint", **QUICK), stream.first(1)).memory_bytes == 24 * 192
    monkeypatch.setattr("engram.experiments.running.machine_memory", lambda: 3 * 48 * 192)
    assert run(make("joint", **QUICK), stream).memory_bytes == 48 * 192


def test_a_codec_that_does_not_suit_the_network_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    stream = split(blobs(), classes_per_task=2, seed=0)
    with pytest.raises(UsageError, match=r"64 numbers .* 24 .*codec_bytes"):
        run(make("features", **QUICK, codec="pq", codec_bytes=24), stream, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def memory_bytes(learner: Learner, stream: Stream) -> int:
    return learner.memory_bytes(class_counts(stream.tasks), stream.tasks[0].train)


def test_a_class_that_comes_again_is_counted_once() -> None:
    first, second = split(blobs(classes=4), classes_per_task=2).tasks
    again = Stream("again", (first, second, replace(first, index=2)), tuple("abcd"))
    learner = make("icarl", images_total=4, epochs=1)
    assert memory_bytes(learner, again) == 4 * first.train.sample_bytes
    assert run(learner, again).memory_bytes == 4 * first.train.sample_bytes
