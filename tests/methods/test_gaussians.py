"""Methods that store statistics: what they store, what they compute from it, and what it costs."""

import math
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


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_adc_descends_the_normalised_gradient_of_all_images_together(kind: str, request: pytest.FixtureRequest) -> None:
    stream: Stream = request.getfixturevalue(kind)
    learner = quick("adc")
    learner.learn(stream.tasks[0])
    task, before = stream.tasks[1], learner.trained
    after = learner.train(task)
    mean, positions = learner.memory.statistics.means[0], torch.arange(6)
    perturb = learner._perturb(task.train, after)  # type: ignore[attr-defined]
    old, new = perturb(mean, positions, 2, 0.05)
    scale = before.std if kind == "vectors" else 255 * before.std
    inputs = task.train.batch(positions).float()
    for _ in range(2):
        gradients = []
        for image in inputs:
            standardised = (image / scale).requires_grad_()
            distance = (normalize(before.features((standardised * scale)[None])) - mean).square().sum()
            gradients.append(torch.autograd.grad(distance, standardised)[0])
        gradient = torch.stack(gradients)
        inputs = inputs - scale * 0.05 * gradient.numel() ** 0.5 * gradient / gradient.square().sum().sqrt()
    for network, found in ((before, old), (after, new)):
        with torch.no_grad():
            torch.testing.assert_close(found, normalize(network.features(inputs)), atol=1e-4, rtol=1e-3)
    unmoved = perturb(mean, positions, 0, 0.05)[0]
    assert float((old - mean).square().sum()) < 0.98 * float((unmoved - mean).square().sum())


def test_fetril_translates_the_nearest_new_class_to_each_old_mean(vectors: Stream) -> None:
    learner = learned("fetril", vectors)
    statistics, task = learner.memory.statistics, vectors.tasks[-1]
    features, class_indices = normalize(learner.extract(task.train)), learner.class_indices(task, task.train.labels)
    rows, classes = learner._translated(statistics, features, class_indices)  # type: ignore[attr-defined]
    means = statistics.means.tolist()
    for old in range(4):
        nearest = min((4, 5), key=lambda new: math.dist(means[new], means[old]))
        moved = [
            [x - source + target for x, source, target in zip(row, means[nearest], means[old], strict=True)]
            for row in features[class_indices == nearest].tolist()
        ]
        torch.testing.assert_close(rows[classes == old], normalize(torch.tensor(moved)), atol=1e-5, rtol=1e-4)
    for new in (4, 5):
        torch.testing.assert_close(rows[classes == new], features[class_indices == new])


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
