"""Methods that store statistics: what they store, what they compute from it, and what it costs."""

from typing import Any

import pytest
import torch
from learners_made import learned, quick
from torch.nn.functional import normalize

from engram.data import Stream, concatenate
from engram.errors import UsageError
from engram.experiments import run
from engram.features import NearestMean, Statistics
from engram.methods import make
from engram.methods.gaussians import METHOD_SETTINGS
from engram.network import extract

every_method = pytest.mark.parametrize("method", METHOD_SETTINGS)


@every_method
def test_memory_is_predicted_to_the_byte(method: str, vectors: Stream) -> None:
    learner = quick(method)
    for task in vectors:
        arriving = torch.zeros(len(learner.classes_with(task)), dtype=torch.int64)
        arriving[-2:] = 24
        predicted = learner.memory_bytes(arriving, task.train)
        learner.learn(task)
        assert learner.memory.nbytes == predicted > 0
    assert len(learner.memory.features) == len(learner.memory.images) == 0


def test_means_of_a_frozen_network_are_those_of_all_images(vectors: Stream) -> None:
    learner = learned("fetril", vectors)
    everything = concatenate(*(task.train for task in vectors))
    labels = torch.tensor([learner.classes_.index(label) for label in everything.labels.tolist()])
    rows = normalize(extract(learner.trained, everything))
    assert torch.allclose(learner.memory.statistics.means, Statistics.of(rows, labels, 6, "none").means, atol=1e-5)


def test_without_compensation_old_means_stay_and_with_it_they_move(vectors: Stream) -> None:
    still, moved = quick("sdc", compensation="identity"), quick("sdc")
    for task in vectors.tasks[:2]:
        before = still.memory.statistics.means
        still.learn(task)
        moved.learn(task)
    assert torch.equal(still.memory.statistics.means[:2], before)
    assert not torch.allclose(moved.memory.statistics.means[:2], before, atol=1e-3)
    assert torch.equal(still.memory.statistics.means[2:], moved.memory.statistics.means[2:])


def test_sdc_predicts_the_nearest_mean(vectors: Stream) -> None:
    learner = learned("sdc", vectors)
    features = learner.extract(vectors.tasks[0].test)
    expected = NearestMean().fit_statistics(learner.memory.statistics).scores(normalize(features))
    assert torch.equal(learner.classify(features), expected)


def test_adc_perturbs_images_towards_a_mean(images: Stream) -> None:
    learner = quick("adc")
    learner.learn(images.tasks[0])
    task = images.tasks[1]
    network = learner.train(task)
    mean = learner.memory.statistics.means[0]
    perturb = learner._perturb(task.train, network)  # type: ignore[attr-defined]
    distances = [
        float((perturb(mean, torch.arange(8), steps, 0.1)[0] - mean).square().sum(1).mean()) for steps in (0, 3)
    ]
    assert distances[1] < 0.9 * distances[0]


@every_method
def test_the_drift_gap_is_measured_and_nothing_drifts_in_a_frozen_network(method: str, vectors: Stream) -> None:
    result = run(quick(method), vectors)
    assert result.drift_gap is not None and result.omega is None
    if METHOD_SETTINGS[method].get("tune") == "first":
        assert result.drift_gap == pytest.approx([0.0] * 3, abs=0.03)


def test_methods_that_differ_after_training_share_their_networks() -> None:
    trainings = {str(make(method, network="mlp").training_settings(1)) for method in ("features", "sdc", "ldc", "dpcr")}
    assert len(trainings) == 1
    assert make("fecam").training_settings(0) == make("features").training_settings(0)
    assert make("fecam", tune="every").training_settings(1) == make("features").training_settings(1)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"replay": "gaussian"}, "covariance"),
        ({"classifier": "ridge"}, "covariance"),
        ({"classifier": "svm"}, "svm"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_training(settings: dict[str, Any], fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        make("sdc", **settings).check(10)
