"""The training loop: learning rates, batches, steps, resuming, and errors."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from contexts import context
from lazy_made import as_lazy
from progress_made import Recorder
from torch import Tensor, nn

from engram.data import Samples
from engram.data.augment import random_crop, random_resized_crop
from engram.errors import TrainingError, UsageError
from engram.experiments.folder import RunProgress
from engram.methods import make
from engram.methods.objectives import Classification, Distillation
from engram.network import Network, Training, make_network
from engram.network.losses import softmax_cross_entropy
from engram.progress import SILENT, Progress
from engram.randomness import generator


def tiny_images(count: int = 40, classes: int = 4) -> Samples:
    images = torch.randint(0, 256, (count, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Samples.of(images, torch.arange(count) % classes)


def numbered(count: int) -> Samples:
    return Samples.of(torch.arange(count, dtype=torch.float32)[:, None], torch.zeros(count, dtype=torch.int64))


def state_of(network: Network) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def cross_entropy(network: Network) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda inputs, class_indices: softmax_cross_entropy(network(inputs)[1], class_indices)


# Rates


def test_the_defaults_are_the_papers() -> None:
    training = Training()
    assert (training.epochs, training.batch_size, training.learning_rate) == (70, 128, 2.0)
    assert (training.momentum, training.weight_decay) == (0.9, 1e-5)


def test_the_papers_learning_rate_is_divided_by_five_at_epochs_50_and_64() -> None:
    training, per_epoch = Training(), 40
    rates = [
        {training.learning_rate_at(epoch * per_epoch + step, 70 * per_epoch) for step in range(per_epoch)}
        for epoch in range(70)
    ]
    assert all(len(found) == 1 for found in rates)
    expected = [2.0] * 50 + [0.4] * 14 + [0.08] * 6
    assert [found.pop() for found in rates] == pytest.approx(expected, rel=1e-12)


def test_the_papers_learning_rate_on_imagenet() -> None:
    training = Training(epochs=60, milestones=(20 / 60, 30 / 60, 40 / 60, 50 / 60))
    expected = [2.0] * 20 + [0.4] * 10 + [0.08] * 10 + [0.016] * 10 + [0.0032] * 10
    assert [training.learning_rate_at(epoch * 7, 60 * 7) for epoch in range(60)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_short_trainings_start_at_the_full_learning_rate(epochs: int) -> None:
    training = Training(epochs=epochs, learning_rate=0.1, milestones=(0.1, 0.4, 0.8))
    assert training.learning_rate_at(0, 10 * epochs) == 0.1


def test_one_cycle_rises_to_its_peak_and_falls_almost_to_zero() -> None:
    training = Training(schedule="one-cycle", learning_rate=0.5, warm_up=0.3)
    rates = [training.learning_rate_at(step, 100) for step in range(100)]
    assert rates.index(max(rates)) == 30
    assert rates[30] == 0.5
    assert rates[:31] == sorted(rates[:31]) and rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[0] == pytest.approx(0.5 / 31)
    assert rates[14] - rates[13] == pytest.approx(0.5 / 31)  # in a straight line
    assert rates[65] == pytest.approx(0.25)  # half way down the cosine
    assert 0 < rates[99] < 0.001


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warm_up", [0.01, 0.3, 1.0])
def test_one_cycle_stays_between_zero_and_its_peak_for_any_number_of_steps(steps: int, warm_up: float) -> None:
    training = Training(schedule="one-cycle", learning_rate=0.5, warm_up=warm_up)
    assert all(0 < training.learning_rate_at(step, steps) <= 0.5 for step in range(steps))


# Batches


@pytest.mark.parametrize(
    ("count", "size", "expected"), [(1000, 128, [125] * 8), (10, 4, [4, 3, 3]), (129, 128, [65, 64]), (3, 128, [3])]
)
def test_every_sample_is_seen_once_per_epoch_in_batches_of_near_equal_size(
    count: int, size: int, expected: list[int]
) -> None:
    training, samples = Training(batch_size=size), numbered(count)
    batches = list(training.batches(samples, seed=0, task=0, epoch=0))
    assert [len(positions) for _, positions in batches] == expected
    assert training.batches_per_epoch(samples) == len(expected)
    positions = torch.cat([positions for _, positions in batches])
    assert positions.sort().values.tolist() == list(range(count))
    assert torch.equal(torch.cat([inputs for inputs, _ in batches])[:, 0].long(), positions)


def test_batches_depend_on_seed_task_and_epoch_alone() -> None:
    training, samples = Training(batch_size=16, pad=1), tiny_images()

    def batches(seed: int, task: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
        return list(training.batches(samples, seed, task, epoch))

    first = batches(3, 1, 2)
    torch.manual_seed(9)
    list(training.batches(samples, 3, 1, 1))
    again = batches(3, 1, 2)
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    for other in (batches(4, 1, 2), batches(3, 2, 2), batches(3, 1, 3)):
        assert not torch.equal(first[0][1], other[0][1])


def test_augmentation_can_be_switched_off() -> None:
    samples = tiny_images(6)
    ((inputs, positions),) = Training(pad=0, flip=False).batches(samples, 0, 0, 0)
    assert torch.equal(inputs, samples.batch(positions))


def test_crops_and_flips_differ_between_tasks_epochs_and_batches() -> None:
    image = tiny_images(1).inputs  # all the same, so that their order does not matter
    samples = Samples.of(image.repeat(12, 1, 1, 1), torch.zeros(12, dtype=torch.int64))
    training = Training(batch_size=6, pad=2, flip=True)
    drawn = [
        inputs
        for seed, task, epoch in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
        for inputs, _ in training.batches(samples, seed, task, epoch)
    ]
    assert len(drawn) == 8
    assert all(inputs.dtype == torch.uint8 for inputs in drawn)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_brightness_and_contrast_change_only_if_set_and_after_crops_and_flips() -> None:
    samples = tiny_images(30)

    def drawn(**settings: float) -> Tensor:
        ((inputs, _),) = Training(pad=1, flip=True, **settings).batches(samples, 0, 0, 0)  # type: ignore[arg-type]
        return inputs

    plain = drawn()
    brighter, contrasted = drawn(brightness=63.0), drawn(contrast=0.8)
    for inputs in (brighter, contrasted):
        assert inputs.dtype == torch.uint8
        same = (inputs == plain).flatten(1).all(1)
        assert 10 < int(same.sum()) < 30  # crops and flips are the same, and two thirds are jittered
    shift = (brighter.int() - plain.int()).flatten(1)
    assert bool(((shift >= 0).all(1) | (shift <= 0).all(1)).all())  # the whole image, its borders of zeros too


def test_vectors_are_not_jittered() -> None:
    samples = numbered(9)
    ((inputs, positions),) = Training(brightness=63.0, contrast=0.8).batches(samples, 0, 0, 0)
    assert torch.equal(inputs, samples.batch(positions))


# Windows


def test_crops_are_drawn_for_every_batch() -> None:
    samples = tiny_images(12)
    for area in (None, (0.2, 0.9)):
        training = Training(batch_size=6, pad=0, flip=False, crop=5, crop_area=area)
        for number, (inputs, positions) in enumerate(training.batches(samples, 3, 1, 2)):
            draws, images = generator(3, "augment", 1, 2, number), samples.batch(positions)
            if area is None:
                expected = random_crop(images, (5, 5), draws)
            else:
                expected = random_resized_crop(images, 5, area, (3 / 4, 4 / 3), draws)
            assert inputs.shape == (6, 5, 5, 1) and torch.equal(inputs, expected)


def test_crops_are_flipped_too() -> None:
    image = tiny_images(1).inputs
    samples = Samples.of(image.repeat(64, 1, 1, 1), torch.zeros(64, dtype=torch.int64))
    ((inputs, _),) = Training(pad=0, flip=True, crop=7).batches(samples, 0, 0, 0)
    windows = [image[0, top : top + 7, left : left + 7] for top in (0, 1) for left in (0, 1)]
    kinds = [window.numpy().tobytes() for window in windows] + [window.flip(1).numpy().tobytes() for window in windows]
    assert {each.numpy().tobytes() for each in inputs} == set(kinds)


def test_vectors_are_not_cropped() -> None:
    ((inputs, positions),) = Training(crop=5).batches(numbered(4), 0, 0, 0)
    assert torch.equal(inputs[:, 0].long(), positions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_area": (0.1, 1.0)}, "crop_area"),
        ({"crop": 5, "crop_area": (0.5, 0.1)}, r"\(0\.5, 0\.1\)"),
        ({"crop": 5, "crop_area": (0.5, 1.1)}, r"\(0\.5, 1\.1\)"),
        ({"crop": 5, "crop_area": (0.5, 1.0), "crop_ratio": (0.0, 1.0)}, r"crop_ratio .*\(0\.0, 1\.0\)"),
    ],
)
def test_impossible_crops_are_a_usage_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Training(**settings)  # type: ignore[arg-type]


def test_crops_can_be_set_on_the_command_line() -> None:
    training = make("features", crop="56", crop_area="0.08,1", crop_ratio="0.5,2").training
    assert (training.crop, training.crop_area, training.crop_ratio) == (56, (0.08, 1.0), (0.5, 2.0))
    assert make("features", crop="none", crop_area="none").training.crop is None


# What is not in memory


@pytest.mark.parametrize("settings", [{}, {"crop": 6}, {"brightness": 20.0}])
def test_prefetched_batches_are_the_same_to_the_last_bit(settings: dict[str, object]) -> None:
    samples, training = tiny_images(50), Training(batch_size=16, pad=1, **settings)  # type: ignore[arg-type]
    pairs = zip(training.batches(samples, 1, 2, 3), training.batches(as_lazy(samples), 1, 2, 3), strict=True)
    for (inputs, positions), (others, places) in pairs:
        assert torch.equal(inputs, others) and torch.equal(positions, places)


def test_training_on_prefetched_batches_gives_the_same_network() -> None:
    samples, states = tiny_images(), []
    for each in (samples, as_lazy(samples)):
        network = make_network("small", "cosine", samples, seed=0).grown(4, 0, "head")
        Training(epochs=2, batch_size=16, learning_rate=0.1).fit(
            network, each, each.labels, cross_entropy(network), seed=0, task=0
        )
        states.append(state_of(network))
    assert_same(*states)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_thread_is_left_behind_when_training_is_interrupted(error: type[BaseException]) -> None:
    before, samples = threading.active_count(), as_lazy(tiny_images())
    network = make_network("small", "cosine", samples, seed=0).grown(4, 0, "head")
    seen: list[BaseException] = []

    def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
        assert threading.active_count() > before
        raise error

    try:
        Training(epochs=2, batch_size=4).fit(network, samples, samples.labels, loss, seed=0, task=0)
    except error as stopped:
        seen.append(stopped)  # with its traceback, which keeps all frames alive
    assert seen and threading.active_count() == before


# Steps


def by_hand(
    vectors: np.ndarray, labels: np.ndarray, weights: list[np.ndarray], batches: list[np.ndarray], rates: list[float]
) -> list[np.ndarray]:
    """SGD with momentum .9 and weight decay .01 on one hidden layer and a softmax, with gradients derived by hand."""
    w1, b1, w2, b2 = weights
    velocity = [np.zeros_like(weight) for weight in weights]
    for batch, learning_rate in zip(batches, rates, strict=True):
        x = vectors[batch]
        hidden = x @ w1.T + b1
        active = np.maximum(hidden, 0)
        scores = active @ w2.T + b2
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        error = (p - np.eye(len(b2))[labels[batch]]) / len(batch)  # (n, K)
        back = (error @ w2) * (hidden > 0)
        gradients = [back.T @ x, back.sum(0), error.T @ active, error.sum(0)]
        for weight, gradient, v in zip((w1, b1, w2, b2), gradients, velocity, strict=True):
            v *= 0.9
            v += gradient + 0.01 * weight
            weight -= learning_rate * v
    return [w1, b1, w2, b2]


def test_the_steps_are_those_of_sgd_with_momentum_and_weight_decay_written_by_hand() -> None:
    random = np.random.default_rng(0)
    vectors, labels = random.normal(1, 3, (20, 3)), np.arange(20) % 3
    samples = Samples.of(vectors, labels)
    own = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    network = make_network(own, "linear", samples, seed=0).grown(3, 0, "head")
    training = Training(
        epochs=4,
        batch_size=8,
        learning_rate=0.2,
        momentum=0.9,
        weight_decay=0.01,
        milestones=(0.5, 0.75),
        learning_rate_decay=10,
    )
    batches = [
        positions.numpy()
        for epoch in range(4)
        for _, positions in training.batches(samples, seed=7, task=2, epoch=epoch)
    ]
    rates = [0.2] * 6 + [0.02] * 3 + [0.002] * 3  # three batches an epoch
    names = ("extractor.0.weight", "extractor.0.bias", "head.weight", "head.bias")
    weights = [network.state_dict()[name].double().numpy().copy() for name in names]
    normalised = (vectors - vectors.mean(0)) / vectors.std(0)
    expected = by_hand(normalised, labels, weights, batches, rates)
    training.fit(network, samples, samples.labels, cross_entropy(network), seed=7, task=2)
    for name, weight in zip(names, expected, strict=True):
        np.testing.assert_allclose(network.state_dict()[name], weight, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_gradient_hook_changes_the_gradients_before_every_step() -> None:
    samples, draws = numbered(12), []
    own = nn.Sequential(nn.Linear(1, 2))

    def trained(rate: float, factor: float | None) -> Tensor:
        network = make_network(own, "linear", samples, seed=0).grown(1, 0, "head")

        def scale(random: torch.Generator) -> None:
            draws.append(float(torch.rand((), generator=random)))
            for parameter in network.parameters():
                parameter.grad = None if parameter.grad is None else factor * parameter.grad

        training = Training(epochs=2, batch_size=4, learning_rate=rate, momentum=0.0, weight_decay=0.0)
        hook = None if factor is None else scale
        training.fit(
            network,
            samples,
            samples.labels,
            lambda inputs, _: network(inputs)[1].square().mean(),
            seed=0,
            task=0,
            gradient_hook=hook,
        )
        return network.head.weight.detach()

    torch.testing.assert_close(trained(0.01, 2.0), trained(0.02, None))
    assert len(set(draws)) == len(draws) == 6  # two epochs of three batches, each with its own generator


def test_the_loss_gets_the_class_indices_of_its_inputs() -> None:
    samples = numbered(30)
    class_indices = torch.arange(30) * 10
    network = make_network(nn.Linear(1, 2), "linear", samples, seed=0).grown(1, 0)
    seen: list[float] = []

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        assert torch.equal(inputs[:, 0] * 10, targets.float())
        seen.extend(inputs[:, 0].tolist())
        return network(inputs)[1].sum() * 0

    Training(epochs=2, batch_size=7).fit(network, samples, class_indices, loss, seed=0, task=0)
    assert sorted(seen) == sorted([*map(float, range(30))] * 2)


@pytest.mark.parametrize("decay", [0.55, 0.0])
def test_gradient_noise_is_that_of_a_sum_over_the_batch_and_decays_with_the_epochs(decay: float) -> None:
    samples = numbered(16)
    network = make_network(nn.Linear(1, 20_000), "linear", samples, seed=0).grown(1, 0)
    training = Training(
        **{"epochs": 3, "batch_size": 8, "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0, "milestones": ()},
        **{"gradient_noise": 0.3, "gradient_noise_decay": decay},
    )
    weights: list[Tensor] = []

    def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
        weights.append(network.extractor.weight.detach().clone())
        return network.features(inputs).sum() * 0  # so that every step is noise alone

    training.fit(network, samples, samples.labels, loss, seed=0, task=0)
    weights.append(network.extractor.weight.detach().clone())
    steps = [after - before for before, after in itertools.pairwise(weights)]
    expected = [0.3 / (1 + epoch) ** decay / 8 for epoch in (0, 0, 1, 1, 2, 2)]
    assert [step.std().item() for step in steps] == pytest.approx(expected, rel=0.03)  # six deviations
    assert [step.mean().item() for step in steps] == pytest.approx([0] * 6, abs=0.0013)
    for one, other in itertools.combinations(steps, 2):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.04


def test_training_on_tiny_images_learns_them_and_ends_in_evaluation_mode() -> None:
    samples, recorder = tiny_images(), Recorder()
    network = make_network("small", "cosine", samples, seed=0).grown(4, 0, "head")
    loss = Classification(expected_classes=4).loss(context(network, None, torch.ones(4, dtype=torch.bool)))
    training = Training(epochs=12, batch_size=10, learning_rate=0.2, schedule="one-cycle", pad=0, flip=False)
    training.fit(network, samples, samples.labels, loss, seed=0, task=0, progress=recorder)
    assert recorder.phases == [["train", 48, 48]]
    assert not network.training
    with torch.no_grad():
        found = network(samples.inputs)[1].argmax(1)
    assert (found == samples.labels).float().mean() == 1


def test_progress_is_reported_under_the_name_of_the_phase() -> None:
    samples = numbered(4)
    for given, named in (({}, "train"), ({"phase": "fine-tune"}, "fine-tune")):
        network = make_network("mlp", "linear", samples, seed=0).grown(2, 0)
        watch = RunProgress(SILENT, [])
        loss = cross_entropy(network)
        Training(epochs=1, learning_rate=0.01).fit(
            network, samples, samples.labels, loss, seed=0, task=0, progress=watch, **given
        )
        assert set(watch.seconds) == {named}


# Going on


class InMemory:
    """Stores the last checkpoint as a file would, row by row; raises after a save to interrupt the training."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.saved: dict[str, Tensor] | None = None
        self.stop_after = stop_after

    def load(self) -> dict[str, Tensor] | None:
        return None if self.saved is None else dict(self.saved)

    def save(self, collect: Callable[[], dict[str, Tensor]]) -> None:
        rows = torch.contiguous_format
        self.saved = {name: tensor.detach().clone(memory_format=rows) for name, tensor in collect().items()}
        if int(self.saved["epoch"]) == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(epochs=4, batch_size=16, learning_rate=0.3, weight_decay=1e-3, schedule="one-cycle", pad=1)


def fitted(training: Training, checkpoints: InMemory | None, progress: Progress = SILENT) -> Network:
    """A new small network, trained until it ends or is interrupted."""
    samples = tiny_images()
    network = make_network("small", "cosine", samples, seed=0).grown(4, 0, "head")
    loss = Distillation(expected_classes=4).loss(context(network, None, torch.ones(4, dtype=torch.bool)))
    training.fit(
        network,
        samples,
        samples.labels,
        loss,
        seed=5,
        task=1,
        progress=progress,
        checkpoints=checkpoints,
    )
    return network


@pytest.fixture(scope="module")
def uninterrupted(training: Training) -> dict[str, Tensor]:
    return state_of(fitted(training, None))


def test_dropout_in_a_users_module_is_a_function_of_the_seed() -> None:
    samples = tiny_images()

    def trained(checkpoints: InMemory | None = None) -> dict[str, Tensor]:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5))
        torch.seed()
        network = make_network(module, "cosine", samples, seed=0).grown(4, 0, "head")
        loss = Distillation(expected_classes=4).loss(context(network, None, torch.ones(4, dtype=torch.bool)))
        Training(epochs=3, batch_size=16, learning_rate=0.3).fit(
            network, samples, samples.labels, loss, seed=5, task=0, checkpoints=checkpoints
        )
        return state_of(network)

    expected = trained()
    assert_same(trained(), expected)
    checkpoints = InMemory(stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        trained(checkpoints)
    checkpoints.stop_after = None
    assert_same(trained(checkpoints), expected)


def test_frozen_weights_of_a_users_module_stay_as_they_are() -> None:
    samples = tiny_images()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8))
    module[1].requires_grad_(False)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    network = make_network(module, "cosine", samples, seed=0).requires_grad_(False).grown(4, 0, "head")
    loss = Distillation(expected_classes=4).loss(context(network, None, torch.ones(4, dtype=torch.bool)))
    Training(epochs=1, batch_size=16, learning_rate=0.3).fit(network, samples, samples.labels, loss, seed=5, task=0)
    after = list(network.extractor.parameters())
    moved = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert moved == [False, False, True, True]


DISTURBANCES = {"brightness": 63.0, "contrast": 0.8, "gradient_noise": 0.3}


def test_training_is_a_function_of_its_seed(training: Training, uninterrupted: dict[str, Tensor]) -> None:
    torch.manual_seed(99)
    assert_same(state_of(fitted(training, None)), uninterrupted)


@pytest.mark.parametrize(
    ("settings", "epochs_done"), [({}, 1), ({}, 3), (DISTURBANCES, 2)], ids=["1", "3", "jitter and noise"]
)
def test_training_resumes_after_an_epoch_to_the_same_bits(
    settings: dict[str, float], epochs_done: int, training: Training
) -> None:
    training, checkpoints, recorder = replace(training, **settings), InMemory(stop_after=epochs_done), Recorder()
    with pytest.raises(KeyboardInterrupt):
        fitted(training, checkpoints)
    checkpoints.stop_after = None
    torch.manual_seed(99)
    resumed = fitted(training, checkpoints, recorder)
    assert_same(state_of(resumed), state_of(fitted(training, None)))
    assert recorder.phases == [["train", 12, 12]]


def test_training_resumes_after_every_epoch_to_the_same_bits(
    training: Training, uninterrupted: dict[str, Tensor]
) -> None:
    checkpoints = InMemory()
    for epoch in (1, 2, 3):
        checkpoints.stop_after = epoch
        with pytest.raises(KeyboardInterrupt):
            fitted(training, checkpoints)
    assert_same(state_of(fitted(training, checkpoints)), uninterrupted)


@pytest.mark.parametrize("name", DISTURBANCES)
def test_jitter_and_noise_change_the_result_and_are_functions_of_the_seed(
    name: str, training: Training, uninterrupted: dict[str, Tensor]
) -> None:
    alone = replace(training, **{name: DISTURBANCES[name]})
    found = state_of(fitted(alone, None))
    assert not torch.equal(found["head.weight"], uninterrupted["head.weight"])
    torch.manual_seed(99)
    assert_same(state_of(fitted(alone, None)), found)


def test_a_checkpoint_holds_the_network_its_momentum_and_the_epoch(training: Training) -> None:
    checkpoints = InMemory(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        fitted(training, checkpoints)
    assert checkpoints.saved is not None
    network = make_network("small", "cosine", tiny_images(), seed=0).grown(4, 0, "head")
    parameters = len(list(network.parameters()))
    expected = {f"network.{name}" for name in network.state_dict()} | {f"momentum.{i}" for i in range(parameters)}
    assert set(checkpoints.saved) == expected | {"epoch"}


# Refusals


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda scores: scores.sum() * math.nan, "loss"),
        (lambda scores: scores.sum() * math.inf, "loss"),
        (lambda scores: (scores * 0).sum().sqrt(), "gradient"),  # √0 is 0, and rises infinitely fast
    ],
    ids=["nan", "infinity", "gradient"],
)
def test_training_stops_at_a_value_that_is_not_finite_and_names_the_batch(
    spoil: Callable[[Tensor], Tensor], what: str
) -> None:
    samples = numbered(20)
    network = make_network("mlp", "linear", samples, seed=0).grown(2, 0)
    calls = 0
    before: dict[str, Tensor] = {}

    def loss(inputs: Tensor, class_indices: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        scores = network(inputs)[1]
        if calls == 4 + 3:  # the third batch of the second epoch
            before.update(state_of(network))
            return spoil(scores)
        return scores.square().mean()

    with pytest.raises(TrainingError, match=f"{what} .*task 3, epoch 2, batch 3.*learning_rate"):
        Training(epochs=3, batch_size=5, learning_rate=0.01).fit(network, samples, samples.labels, loss, seed=0, task=2)
    assert_same(state_of(network), before)  # no step was taken


# The teacher


@pytest.mark.parametrize("loss_function", ["sigmoid", "softmax"])
def test_training_a_student_leaves_its_teacher_unchanged(loss_function: str) -> None:
    samples = tiny_images()
    start = make_network("small", "cosine", samples, seed=0).grown(2, 0)
    start.train()(samples.inputs)  # statistics of its own
    teacher, student = start.frozen(), start.grown(2, 0, "head", 1)
    before, began = state_of(teacher), state_of(student)
    objective = Distillation(loss_function=loss_function, expected_classes=4, feature_distillation=0.5)  # type: ignore[arg-type]
    in_task = torch.tensor([False, False, True, True])
    loss = objective.loss(context(student, teacher, in_task, class_indices=samples.labels))
    Training(epochs=2, batch_size=16, learning_rate=0.1, pad=1).fit(
        student, samples, samples.labels, loss, seed=0, task=1
    )
    assert_same(state_of(teacher), before)
    assert any("running_mean" in name for name in began)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not teacher.training
    after = state_of(student)
    assert not any(torch.equal(after[name], began[name]) for name in after if name not in ("mean", "std"))


def test_distillation_preserves_the_old_scores_and_without_it_they_drift() -> None:
    samples = tiny_images()
    start = make_network("small", "cosine", samples, seed=0).grown(2, 0)
    teacher = start.frozen()
    drifts = []
    for weight in (0.0, 5.0):
        student = start.grown(2, 0, "head", 1)
        objective = Distillation(expected_classes=4, distillation=weight, feature_distillation=0.0)
        loss = objective.loss(context(student, teacher, torch.tensor([False, False, True, True])))
        training = Training(epochs=10, batch_size=20, learning_rate=0.02, schedule="one-cycle", pad=0, flip=False)
        training.fit(student, samples, 2 + samples.labels % 2, loss, seed=0, task=1)
        with torch.no_grad():
            old, now = teacher(samples.inputs)[1], student(samples.inputs)[1][:, :2]
        drifts.append((old.sigmoid() - now.sigmoid()).abs().mean().item())
    assert drifts[1] < drifts[0] / 2
