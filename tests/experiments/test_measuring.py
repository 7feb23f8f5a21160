"""ω and the drift gap against their definitions, computed anew from the old images."""

import pytest
import torch
from learners_made import quick
from torch.nn import functional as F

from engram.data import Stream
from engram.experiments import run
from engram.experiments.measuring import originals
from engram.features import LinearSVM


def test_originals_come_back_in_the_order_of_the_memory(vectors: Stream) -> None:
    origins = torch.tensor([[1, 3], [0, 5], [2, 0], [0, 1], [1, 2]])
    expected = [vectors.tasks[task].train.batch(torch.tensor([place]))[0] for task, place in origins.tolist()]
    assert torch.equal(originals(vectors, origins).batch(torch.arange(5)), torch.stack(expected))


def test_omega_and_the_ceiling_match_a_replay_with_the_old_images(vectors: Stream) -> None:
    result = run(quick(features_per_class=9), vectors)
    replay, places = quick(features_per_class=9), []
    for task in vectors:
        sources = replay.learn(task).features
        places += [(task, int(source)) for source in sources if source >= 0]
    truth = torch.stack([F.normalize(replay.extract(t.train.select(torch.tensor([p]))))[0] for t, p in places])
    memory = replay.memory.features
    quality = (truth * memory.rows).sum(1)  # without trimming, rows stay in the order of their arrival
    assert result.omega is not None and result.omega_previous is not None and result.omega_first is not None
    assert result.omega[-1] == pytest.approx(float(quality.mean()), abs=1e-5)
    assert result.omega_previous[-1] == pytest.approx(float(quality[18:36].mean()), abs=1e-5)
    assert result.omega_first[-1] == pytest.approx(float(quality[:18].mean()), abs=1e-5)
    classifier = LinearSVM(C=1.0).fit(truth, memory.class_indices)
    correct = total = 0
    for task in vectors:
        best = classifier.scores(F.normalize(replay.extract(task.test))).argmax(1)
        correct += int((torch.tensor(replay.classes_)[best] == task.test.labels).sum())
        total += len(task.test)
    assert result.ceiling_curve is not None and result.drift_gap is not None
    assert result.ceiling_curve[-1] == pytest.approx(correct / total, abs=0.011)  # one sample of 144 at a tie
    assert result.drift_gap[-1] == pytest.approx(result.ceiling_curve[-1] - result.curve[-1])


@pytest.mark.parametrize("balanced", [True, False])
def test_nothing_has_drifted_after_the_first_task(balanced: bool, vectors: Stream) -> None:
    result = run(quick(features_per_class=2, balanced=balanced), vectors.first(1))
    assert result.omega == [pytest.approx(1.0, abs=1e-5)]
    assert result.drift_gap == [0.0]
    assert result.omega_previous == [None]


def test_the_curve_is_the_share_of_right_answers_over_all_classes_seen(vectors: Stream) -> None:
    result = run(quick("gamma-lwf"), vectors)
    replay = quick("gamma-lwf")
    for task in vectors:
        replay.learn(task)
    shares = []
    for task in vectors:
        best = replay.scores(task.test.batch(torch.arange(len(task.test)))).argmax(1)
        shares.append(float((torch.tensor(replay.classes_)[best] == task.test.labels).double().mean()))
    assert result.accuracy_matrix[-1] == pytest.approx(shares)
    assert result.curve[-1] == pytest.approx(sum(shares) / 3)
    assert (result.omega, result.drift_gap, result.head_curve) == (None, None, None)
    assert result.memory_bytes == 0


def test_memory_is_counted_to_the_byte(vectors: Stream) -> None:
    assert run(quick(features_per_class=9, epochs=1), vectors).memory_bytes == 6 * 9 * 64 * 4
    assert run(quick("joint", epochs=1), vectors).memory_bytes == 6 * 24 * 12 * 4
