"""The extractors are the published architectures: by names, shapes and counts, and by what they compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import DataError, UsageError
from engram.network.registry import (
    NETWORKS,
    choose_extractor,
    feature_dimension,
    load_weights,
    make_extractor,
    resnet18,
    resnet32,
)
from engram.storage import save_tensors


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def batch_norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        (f"{name}.{part}" for part in ("weight", "bias", "running_mean", "running_var")), (channels,)
    )
    return shapes | {f"{name}.num_batches_tracked": ()}


def torchvision_resnet18() -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's resnet18, without fc."""
    shapes = {"conv1.weight": (64, 3, 7, 7)} | batch_norm("bn1", 64)
    channels = 64
    for layer, width in enumerate((64, 128, 256, 512), 1):
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1.weight"] = (width, channels, 3, 3)
            shapes[f"{name}.conv2.weight"] = (width, width, 3, 3)
            shapes |= batch_norm(f"{name}.bn1", width) | batch_norm(f"{name}.bn2", width)
            if width != channels:
                shapes[f"{name}.downsample.0.weight"] = (width, channels, 1, 1)
                shapes |= batch_norm(f"{name}.downsample.1", width)
            channels = width
    return shapes


def published_file(path: Path) -> dict[str, Tensor]:
    """A file like published weights: torchvision's names with fc, without batch counters."""
    generator = torch.Generator().manual_seed(0)
    shapes = torchvision_resnet18() | {"fc.weight": (1000, 512), "fc.bias": (1000,)}
    names = (name for name in shapes if not name.endswith("num_batches_tracked"))
    found = {name: torch.rand(shapes[name], generator=generator) for name in names}
    save_tensors(path, found)
    return found


# What they compute


def normalised(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias, mean, variance = (
        state[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
    )
    class_indices = [v[None, :, None, None] for v in (weight, bias, mean, variance)]
    return (x - class_indices[2]) / (class_indices[3] + 1e-5).sqrt() * class_indices[0] + class_indices[1]


def block(state: dict[str, Tensor], name: str, x: Tensor, stride: int) -> Tensor:
    """A basic block from its parameters; without a downsampling layer, option A: every other pixel, and zeros."""
    out = F.conv2d(x, state[f"{name}.conv1.weight"], stride=stride, padding=1)
    out = normalised(state, f"{name}.bn1", out).relu()
    out = normalised(state, f"{name}.bn2", F.conv2d(out, state[f"{name}.conv2.weight"], padding=1))
    shortcut = x
    if f"{name}.downsample.0.weight" in state:
        shortcut = F.conv2d(x, state[f"{name}.downsample.0.weight"], stride=stride)
        shortcut = normalised(state, f"{name}.downsample.1", shortcut)
    elif stride == 2:
        side = torch.zeros(len(x), x.shape[1] // 2, *out.shape[2:], dtype=x.dtype)
        shortcut = torch.cat([side, x[:, :, ::2, ::2], side], 1)
    return (out + shortcut).relu()


def resnet(state: dict[str, Tensor], x: Tensor, blocks: list[int], *, large_stem: bool) -> Tensor:
    if large_stem:
        x = normalised(state, "bn1", F.conv2d(x, state["conv1.weight"], stride=2, padding=3)).relu()
        x = F.max_pool2d(x, 3, 2, 1)
    else:
        x = normalised(state, "bn1", F.conv2d(x, state["conv1.weight"], padding=1)).relu()
    for layer, count in enumerate(blocks, 1):
        for i in range(count):
            x = block(state, f"layer{layer}.{i}", x, 2 if layer > 1 and i == 0 else 1)
    return x.flatten(2).mean(2)


@pytest.mark.parametrize(
    ("name", "blocks", "large_stem", "side"),
    [
        ("resnet32", [5, 5, 5], False, 16),
        ("resnet18", [2, 2, 2, 2], True, 64),
        ("resnet18-small", [2, 2, 2, 2], False, 16),
    ],
)
def test_a_resnet_computes_what_its_paper_says(name: str, blocks: list[int], large_stem: bool, side: int) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name].make(3).double().eval()
    for tensor in network.state_dict().values():
        if tensor.ndim == 1:  # of batch norms: statistics that are not those of a new network
            tensor.uniform_(0.5, 1.5)
    images = torch.rand(2, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        features = network(images)
        expected = resnet(network.state_dict(), images, blocks, large_stem=large_stem)
    torch.testing.assert_close(features, expected, rtol=1e-9, atol=1e-9)
    assert features.shape[1] == (64 if name == "resnet32" else 512)


# Their size


def test_resnet32_has_64_features_and_463504_parameters() -> None:
    def stage(inputs: int, outputs: int) -> int:
        convolutions = 9 * (inputs * outputs + 9 * outputs * outputs)  # ten of 3 × 3; shortcuts have none
        return convolutions + 10 * 2 * outputs  # and a batch norm after each

    expected = 9 * 3 * 16 + 2 * 16 + stage(16, 16) + stage(16, 32) + stage(32, 64)
    assert expected == 463_504
    network = resnet32()
    assert parameters(network) == expected
    assert not any("downsample" in name for name in network.state_dict())
    assert network.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 64)


def test_resnet32_has_31_convolutions_of_three_by_three() -> None:
    convolutions = [module for module in resnet32().modules() if isinstance(module, nn.Conv2d)]
    assert [module.kernel_size for module in convolutions] == [(3, 3)] * 31  # the 32nd layer is the head


def test_resnet18_has_torchvisions_names_and_shapes_and_11176512_parameters() -> None:
    network = resnet18()
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == torchvision_resnet18()
    assert parameters(network) == 11_176_512  # 11,689,512 with torchvision's fc of 513,000


def test_the_small_stem_differs_in_its_first_convolution_alone_and_keeps_small_images_large() -> None:
    small, large = resnet18(small=True), resnet18()
    shapes = {name: tuple(tensor.shape) for name, tensor in small.state_dict().items()}
    assert shapes == torchvision_resnet18() | {"conv1.weight": (64, 3, 3, 3)}
    sides: list[int] = []
    for network in (small.eval(), large.eval()):
        handle = network.layer1.register_forward_hook(lambda _, inputs, out: sides.append(out.shape[-1]))
        assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 512)
        handle.remove()
    assert sides == [32, 8]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_small_network_takes_images_of_eight_pixels(channels: int) -> None:
    network = make_extractor("small", (8, 8, channels)).eval()
    assert network(torch.zeros(5, channels, 8, 8)).shape == (5, 64)
    convolutions = 9 * (channels * 32 + 32 * 64 + 64 * 64)
    assert parameters(network) == convolutions + 2 * (32 + 64 + 64)


def test_the_mlp_takes_vectors_and_trains_on_a_single_one() -> None:
    network = make_extractor("mlp", (10,)).train()
    assert network(torch.zeros(1, 10)).shape == (1, 64)
    assert parameters(network) == (10 + 1) * 128 + (128 + 1) * 128 + (128 + 1) * 64


def test_convolutions_start_with_the_deviation_of_he_et_al() -> None:
    torch.manual_seed(0)
    weight = resnet18().layer4[1].conv2.weight  # 512 × 512 × 3 × 3
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


# Without the last ReLU


LAST = {"resnet32": "layer3", "resnet18": "layer4", "resnet18-small": "layer4", "small": "layers", "mlp": "layers"}


def batch_for(name: str, count: int = 4) -> Tensor:
    side = 64 if name == "resnet18" else 16
    shape = (count, 3) if name == "mlp" else (count, 3, side, side)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def with_and_without(name: str) -> tuple[nn.Module, nn.Module]:
    """Twice the same weights: with the last ReLU, and without."""
    torch.manual_seed(0)
    with_it, without = (NETWORKS[name].make(3, last_relu=last_relu).eval() for last_relu in (True, False))
    without.load_state_dict(with_it.state_dict())
    return with_it, without


@pytest.mark.parametrize("name", LAST)
def test_without_the_last_relu_features_have_both_signs_and_with_it_one(name: str) -> None:
    with_it, without = with_and_without(name)
    with torch.no_grad():
        before, after = with_it(batch_for(name)), without(batch_for(name))
    assert before.shape == after.shape
    assert bool((before >= 0).all()) and bool((before > 0).any())
    assert bool((after < 0).any()) and bool((after > 0).any())


@pytest.mark.parametrize("name", LAST)
def test_the_last_relu_changes_neither_names_nor_shapes_of_weights(name: str) -> None:
    shapes = [
        {key: tuple(tensor.shape) for key, tensor in NETWORKS[name].make(3, last_relu=last_relu).state_dict().items()}
        for last_relu in (True, False)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", LAST)
def test_the_last_relu_is_all_that_is_left_out(name: str) -> None:
    with_it, without = with_and_without(name)
    outputs: list[Tensor] = []
    without.get_submodule(LAST[name]).register_forward_hook(lambda _, inputs, out: outputs.append(out))
    with torch.no_grad():
        features, unbent = with_it(batch_for(name)), without(batch_for(name))
    (last,) = outputs
    pooled = (2, 3) if last.ndim == 4 else ()
    assert torch.equal(features, F.relu(last).mean(pooled) if pooled else F.relu(last))
    assert torch.equal(unbent, last.mean(pooled) if pooled else last)


def test_the_last_relu_is_left_out_of_an_extractor_made_by_name() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(50, 10, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        signs = [bool((make_extractor(name, (10,), last_relu=False)(inputs) < 0).any()) for name in ("mlp", "auto")]
    assert signs == [True, True]
    own = nn.Sequential(nn.Linear(10, 5), nn.ReLU())
    with torch.no_grad():
        assert torch.equal(make_extractor(own, (10,), last_relu=False)(inputs), own(inputs))  # it ends as it ends


# Choosing


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((30,), "mlp"),
        ((8, 8, 1), "small"),
        ((23, 200, 3), "small"),
        ((32, 32, 3), "resnet32"),
        ((63, 63, 3), "resnet32"),
        ((64, 64, 3), "resnet18"),
        ((224, 224, 3), "resnet18"),
    ],
)
def test_auto_goes_by_the_shape_of_the_inputs(shape: tuple[int, ...], name: str) -> None:
    assert choose_extractor(shape) == name
    assert type(make_extractor("auto", shape)) is type(NETWORKS[name].make(shape[-1]))


def test_a_name_that_does_not_fit_the_inputs_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"'resnet23'.* 'resnet32'"):
        make_extractor("resnet23", (32, 32, 3))
    with pytest.raises(UsageError, match=r"'mlp' .*images .*\(32, 32, 3\)"):
        make_extractor("mlp", (32, 32, 3))
    with pytest.raises(UsageError, match=r"'resnet32' .*vectors .*\(5,\)"):
        make_extractor("resnet32", (5,))


class Pooled(nn.Module):
    """A user's own extractor: d = 3 · 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.norm(images).mean((2, 3)), images.amax((2, 3))], 1)


def test_a_users_module_is_copied_and_not_changed() -> None:
    own = Pooled()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    extractor = make_extractor(own, (8, 8, 3))
    assert extractor is not own
    assert feature_dimension(extractor, torch.rand(1, 3, 8, 8)) == 6
    assert extractor.training
    extractor(torch.rand(4, 3, 8, 8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


@pytest.mark.parametrize(
    ("module", "found"),
    [(nn.Identity(), r"Identity gave \(2, 3, 8, 8\)"), (nn.Flatten(0, 2), r"Flatten gave \(48, 8\)")],
)
def test_a_module_without_one_vector_per_sample_is_a_usage_error(module: nn.Module, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        feature_dimension(module, torch.rand(2, 3, 8, 8))


def test_a_module_without_a_tensor_output_is_a_usage_error() -> None:
    class Both(nn.Module):
        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            return images, images

    with pytest.raises(UsageError, match=r"Both .*tuple"):
        feature_dimension(Both(), torch.rand(2, 3, 8, 8))


# Published weights


def test_published_weights_are_loaded_without_their_fc(tmp_path: Path) -> None:
    published = published_file(tmp_path / "resnet18.safetensors")
    network = resnet18()
    load_weights(network, tmp_path / "resnet18.safetensors")
    for name, tensor in network.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, published[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer3.0.bn2.bias": None}, r"layer3\.0\.bn2\.bias"),
        ({"layer5.weight": torch.ones(2)}, r"layer5\.weight"),
        ({"conv1.weight": torch.ones(16, 1, 3, 3)}, r"conv1\.weight.*16, 1, 3, 3.*16, 3, 3, 3"),
    ],
)
def test_weights_that_do_not_fit_name_the_tensor_and_load_nothing(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    path, network = tmp_path / "other.safetensors", resnet32()
    weights = {name: torch.full_like(tensor, 2) for name, tensor in network.state_dict().items()} | changes
    save_tensors(path, {name: tensor for name, tensor in weights.items() if tensor is not None})
    before = network.bn1.weight.clone()
    with pytest.raises(DataError, match=rf"other\.safetensors.*{message}"):
        load_weights(network, path)
    assert torch.equal(network.bn1.weight, before)
