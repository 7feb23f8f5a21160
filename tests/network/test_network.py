"""A network takes raw inputs, is copied as teacher and student, and is restored from its tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lazy_made import FromMemory, as_lazy
from torch import Tensor, nn

from engram.data import Samples
from engram.data.augment import center_crop
from engram.errors import DataError, UsageError
from engram.network import HEADS, Network, make_network, restore_network
from engram.network.network import normalise
from engram.network.pretrained import IMAGENET_MEAN, IMAGENET_STD
from engram.storage import load_tensors, save_tensors

RANDOM = np.random.default_rng(2)
IMAGES = RANDOM.integers(0, 256, (12, 8, 10, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3
SAMPLES = Samples.of(IMAGES, LABELS)


def all_of(samples: Samples) -> Tensor:
    return samples.batch(torch.arange(len(samples)))


# Normalisation


def test_images_become_channels_first_and_stay_channels_last_in_memory() -> None:
    mean, std = torch.tensor([0.5, 0.25, 0.1]), torch.tensor([0.25, 0.5, 1.0])
    found = normalise(all_of(SAMPLES), mean, std)
    expected = (IMAGES.astype(np.float64) / 255 - mean.double().numpy()) / std.double().numpy()
    np.testing.assert_allclose(found, expected.transpose(0, 3, 1, 2), atol=1e-5)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_vectors_are_normalised_by_dimension() -> None:
    vectors = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    found = normalise(vectors, torch.tensor([1.0, 20.0]), torch.tensor([2.0, 5.0]))
    assert found.tolist() == [[0.0, -2.0], [1.0, 2.0]]


def test_statistics_are_those_of_the_samples_per_channel() -> None:
    network = make_network("auto", "cosine", SAMPLES, seed=0)
    np.testing.assert_allclose(network.mean, (IMAGES / 255).mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(network.std, (IMAGES / 255).std((0, 1, 2)), rtol=1e-6)


def test_statistics_ignore_rows_that_are_not_in_the_samples() -> None:
    network = make_network("auto", "cosine", SAMPLES.of_classes((1,)), seed=0)
    np.testing.assert_allclose(network.mean, (IMAGES[LABELS == 1] / 255).mean((0, 1, 2)), rtol=1e-6)


def test_a_constant_dimension_does_not_become_nan() -> None:
    vectors = RANDOM.normal(3, 2, (50, 4))
    vectors[:, 2] = 7
    network = make_network("mlp", "cosine", Samples.of(vectors, np.zeros(50, np.int64)), seed=0)
    np.testing.assert_allclose(network.mean, vectors.mean(0), rtol=1e-5)
    np.testing.assert_allclose(network.std, [*vectors.std(0)[:2], 1, vectors.std(0)[3]], rtol=1e-5)
    assert bool(torch.isfinite(network.features(torch.from_numpy(vectors).float())).all())


# Making


def test_a_new_network_is_a_function_of_the_seed() -> None:
    networks = []
    for seed in (0, 0, 1):
        torch.rand(3)  # what ran before does not matter
        networks.append(make_network("small", "cosine", SAMPLES, seed=seed).state_dict())
    assert all(torch.equal(networks[0][name], networks[1][name]) for name in networks[0])
    weight = "extractor.layers.0.weight"
    assert not torch.equal(networks[0][weight], networks[2][weight])


def test_making_a_network_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    make_network("small", "cosine", SAMPLES, seed=0).grown(2, 0, "head", 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_features_and_scores_are_those_of_extractor_and_head() -> None:
    network = make_network("small", "linear", SAMPLES, seed=0).grown(4, 0, "head").eval()
    assert (network.classes, network.dimension) == (4, 64)
    features, scores = network(all_of(SAMPLES))
    assert torch.equal(features, network.extractor(normalise(all_of(SAMPLES), network.mean, network.std)))
    assert torch.equal(scores, network.head(features))
    assert scores.shape == (12, 4)


def test_a_users_module_is_copied_and_left_unchanged() -> None:
    own = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    network = make_network(own, "cosine", SAMPLES, seed=0).grown(2, 0)
    assert network.dimension == 5
    network.train()(all_of(SAMPLES))[1].sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())
    assert all(parameter.grad is None for parameter in own.parameters())


def test_a_users_module_that_gives_feature_maps_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"Conv2d .*\(1, 5, 6, 8\)"):
        make_network(nn.Conv2d(3, 5, 3), "cosine", SAMPLES, seed=0)


def test_published_weights_come_with_the_statistics_they_were_trained_with(tmp_path: Path) -> None:
    extractor = make_network("resnet32", "cosine", SAMPLES, seed=5).extractor
    save_tensors(tmp_path / "weights", {**extractor.state_dict(), "fc.weight": torch.zeros(10, 64)})
    network = make_network("resnet32", "cosine", SAMPLES, seed=0, weights=str(tmp_path / "weights"))
    assert network.mean.tolist() == pytest.approx(IMAGENET_MEAN)
    assert network.std.tolist() == pytest.approx(IMAGENET_STD)
    assert torch.equal(network.extractor.state_dict()["conv1.weight"], extractor.state_dict()["conv1.weight"])


@pytest.mark.parametrize("shape", [(8, 8, 3), (8, 8, 1), (3,)], ids=["colour", "grey", "vectors"])
def test_statistics_in_a_weights_file_hold_for_any_inputs(shape: tuple[int, ...], tmp_path: Path) -> None:
    inputs = torch.arange(4 * torch.Size(shape).numel()).reshape(4, *shape)
    samples = Samples.of(inputs.to(torch.uint8 if len(shape) == 3 else torch.float32), torch.zeros(4, dtype=torch.long))
    own = make_network("auto", "cosine", samples, seed=5)
    statistics = {"input.mean": own.mean + 1, "input.std": own.std * 2}
    save_tensors(tmp_path / "with", {**own.extractor.state_dict(), **statistics})
    save_tensors(tmp_path / "without", own.extractor.state_dict())
    network = make_network("auto", "cosine", samples, seed=0, weights=str(tmp_path / "with"))
    assert torch.equal(network.mean, own.mean + 1) and torch.equal(network.std, own.std * 2)
    network = make_network("auto", "cosine", samples, seed=0, weights=str(tmp_path / "without"))
    expected = IMAGENET_MEAN if shape == (8, 8, 3) else own.mean.tolist()  # vectors of three numbers are no colours
    assert network.mean.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mean", [torch.zeros(5), torch.zeros(3, 3), torch.tensor(0.5), torch.zeros(3).long()])
def test_statistics_of_other_inputs_in_a_weights_file_are_refused(mean: Tensor, tmp_path: Path) -> None:
    extractor = make_network("resnet32", "cosine", SAMPLES, seed=5).extractor
    save_tensors(tmp_path / "weights", {**extractor.state_dict(), "input.mean": mean, "input.std": torch.ones(3)})
    with pytest.raises(DataError, match="weights"):
        make_network("resnet32", "cosine", SAMPLES, seed=0, weights=str(tmp_path / "weights"))


# Copies


def test_a_frozen_network_is_a_copy_without_trainable_weights() -> None:
    network = make_network("small", "cosine", SAMPLES, seed=0).grown(2, 0).train()
    teacher = network.frozen()
    assert network.training and not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in network.parameters())
    features, scores = teacher(all_of(SAMPLES))
    assert not features.requires_grad and not scores.requires_grad
    pointers = {tensor.data_ptr() for tensor in network.state_dict().values()}
    assert not pointers & {tensor.data_ptr() for tensor in teacher.state_dict().values()}


def test_a_student_of_a_frozen_network_can_be_trained_again() -> None:
    teacher = make_network("small", "cosine", SAMPLES, seed=0).grown(2, 0).frozen()
    student = teacher.grown(3, 0, "head", 1)
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert (teacher.classes, student.classes) == (2, 5)
    assert torch.equal(student.head.weight[:2], teacher.head.weight)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_weight_averaging_moves_the_extractor_and_keeps_the_head() -> None:
    ours, theirs = (make_network("resnet32", "cosine", SAMPLES, seed=seed).grown(2, seed) for seed in (0, 1))
    for network in (ours, theirs):
        network.train().features(all_of(SAMPLES))  # the batch norms have something to tell
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    others = theirs.state_dict()
    ours.average_with(theirs, 0.25)
    for name, tensor in ours.state_dict().items():
        if name.startswith("extractor.") and tensor.is_floating_point():
            torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * others[name])
        else:
            assert torch.equal(tensor, before[name])


# Restoring


@pytest.mark.parametrize(
    ("kind", "head"), [*(("small", head) for head in HEADS), *((kind, "cosine") for kind in ("resnet32", "own", "mlp"))]
)
def test_a_restored_network_gives_the_same_bits(kind: str, head: str, tmp_path: Path) -> None:
    own = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = own if kind == "own" else kind
    samples = SAMPLES if kind != "mlp" else Samples.of(RANDOM.normal(size=(12, 7)), LABELS)
    saved = make_network(network, head, samples, seed=0).grown(3, 0).grown(2, 1)
    saved.train()(all_of(samples))  # moves the statistics of batch norms
    save_tensors(tmp_path / "network", saved.state_dict())
    restored = restore_network(network, head, samples.shape, load_tensors(tmp_path / "network"))
    assert isinstance(restored, Network)
    assert not restored.training
    assert restored.classes == 5
    with torch.no_grad():
        for found, expected in zip(restored(all_of(samples)), saved.eval()(all_of(samples)), strict=True):
            assert torch.equal(found, expected)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(restored.state_dict()[name], tensor), name


# What it sees


def test_a_network_with_a_crop_sees_the_centre_of_larger_images_and_all_of_cropped_ones() -> None:
    network = make_network("small", "cosine", SAMPLES, seed=0, crop=6).grown(2, 0).eval()
    images = all_of(SAMPLES)
    assert torch.equal(network(images)[1], network(images[:, 1:7, 2:8])[1])
    torch.testing.assert_close(network.features(images), network.frozen().features(images), rtol=1e-4, atol=1e-5)
    assert not torch.equal(network.features(images), make_network("small", "cosine", SAMPLES, seed=0).features(images))
    assert torch.equal(network.features(images), network.features(center_crop(images, 6)))


def test_auto_goes_by_the_cropped_size_and_a_crop_changes_no_tensor() -> None:
    large = Samples.of(torch.zeros(2, 72, 72, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert make_network("auto", "cosine", large, seed=0).dimension == 512  # resnet18
    assert make_network("auto", "cosine", large, seed=0, crop=63).dimension == 64  # resnet32
    plain = make_network("small", "cosine", SAMPLES, seed=0).state_dict()
    cropping = make_network("small", "cosine", SAMPLES, seed=0, crop=5).state_dict()
    assert plain.keys() == cropping.keys() and all(torch.equal(plain[name], cropping[name]) for name in plain)


def test_a_restored_network_keeps_its_crop() -> None:
    network = make_network("small", "cosine", SAMPLES, seed=0, crop=6).grown(2, 0).eval()
    restored = restore_network("small", "cosine", SAMPLES.shape, network.state_dict(), crop=6)
    assert torch.equal(restored(all_of(SAMPLES))[1], network(all_of(SAMPLES))[1])


def test_a_crop_larger_than_the_images_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"8 x 10 .* 9"):
        make_network("small", "cosine", SAMPLES, seed=0, crop=9)


def test_the_statistics_of_lazy_images_are_the_same() -> None:
    here, there = (make_network("small", "cosine", samples, seed=0) for samples in (SAMPLES, as_lazy(SAMPLES)))
    torch.testing.assert_close(here.mean, there.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(here.std, there.std, rtol=1e-6, atol=0)
    grey = Samples.of(torch.full((9, 4, 4, 3), 7, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64))
    assert make_network("small", "cosine", as_lazy(grey), seed=0).std.tolist() == [1.0, 1.0, 1.0]


def test_statistics_decode_some_lazy_images_a_few_at_a_time() -> None:
    asked: list[int] = []

    class Watched(FromMemory):
        def __getitem__(self, rows: Tensor) -> Tensor:
            asked.append(len(rows))
            return super().__getitem__(rows)

    images = torch.zeros(5000, 2, 2, 3, dtype=torch.uint8)
    make_network("small", "cosine", Samples(Watched(images), torch.arange(5000), torch.zeros(5000).long()), seed=0)
    assert sum(asked) == 1000 and max(asked) <= 32
