"""Networks in the hub's layout: the features that transformers gives, rebuilt from a description, or an error."""

from __future__ import annotations

import copy
import functools
import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hub_made import COMMIT, PATCHES, PROCESSOR, SIDE, TEXT, TINY, randomised, save, serving, tiny
from PIL import Image
from progress_made import Recorder
from torch import Tensor

from engram.errors import DataError, EngramError, UsageError
from engram.network.hub import (
    BACKBONES,
    STATISTICS,
    TOWERS,
    Description,
    HubExtractor,
    _bars,
    describe,
    is_hub_name,
    load_hub,
    measure,
)
from engram.storage import load_tensors, save_tensors

transformers = pytest.importorskip("transformers", reason="needs the extra 'hub'")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach the real hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT in the hub's layout."""
    folder = tmp_path_factory.mktemp("hub") / "tiny-vit"
    tiny("vit", folder)
    (folder / "README.md").write_text("---\ntags:\n- vision\nlicense: apache-2.0\n---\n# A card\n")
    return folder


def images() -> Tensor:
    return torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def features(extractor: HubExtractor) -> Tensor:
    with torch.no_grad():
        return extractor(images())


def same(found: Tensor, expected: Tensor) -> None:
    """Equal up to the order of sums, which depends on where tensors are in memory."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@functools.cache
def loaded(vit: Path) -> HubExtractor:
    """The tiny ViT, loaded once."""
    return load_hub(str(vit))


def with_description(vit: Path, **changes: Any) -> Tensor:
    """The description of the tiny ViT with other values."""
    values = json.loads(bytes(loaded(vit).description.tolist()))
    return torch.tensor(list(json.dumps({**values, **changes}).encode()), dtype=torch.uint8)


def edited(folder: Path, target: Path, **changes: Any) -> str:
    """A copy of a network with other values in config.json."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return str(target)


# Features


@pytest.mark.parametrize("model_type", TINY)
def test_features_are_those_of_transformers_and_a_state_dict_rebuilds_the_network(
    model_type: str, tmp_path: Path
) -> None:
    model = tiny(model_type, tmp_path / "network")
    with torch.no_grad():
        out = model(pixel_values=images())
    if model_type == "vit_msn":
        expected = out.last_hidden_state[:, 0]  # as its image classifier takes them
    elif model_type in ("ijepa", "poolformer"):
        expected = out.last_hidden_state.flatten(2).mean(1 if model_type == "ijepa" else 2)
    else:
        expected = out.pooler_output.flatten(1)
    extractor = load_hub(str(tmp_path / "network"))
    found = features(extractor)
    assert found.shape == (3, expected.shape[1]) and found.std() > 1e-3
    same(found, expected)
    save_tensors(tmp_path / "saved.safetensors", extractor.state_dict())
    rebuilt = HubExtractor.from_state_dict(load_tensors(tmp_path / "saved.safetensors"))
    same(features(rebuilt), expected)
    assert torch.equal(rebuilt.description, extractor.description)
    assert (rebuilt.input_size, rebuilt.input_mean, rebuilt.input_std) == (SIDE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.mark.parametrize("model_type", sorted(BACKBONES - TINY.keys()))
def test_every_other_model_type_gives_one_vector_per_image(model_type: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    fewer = {"num_hidden_layers": 2} if isinstance(getattr(config, "num_hidden_layers", None), int) else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **fewer}))  # the rest is the default
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**PROCESSOR, "size": getattr(config, "image_size", 224)})
    )
    found = describe(str(tmp_path))
    assert found["dimension"] > 100 and found["parameters"] > 10**6


def test_resnet50_has_its_published_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"crop_size": 224}))
    found = describe(str(tmp_path))
    assert found["parameters"] == 25_557_032 - 2048 * 1000 - 1000  # He et al.'s ResNet-50 without its classifier
    assert (found["dimension"], found["input_size"]) == (2048, 224)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_of_a_model_for_images_and_text_the_vision_tower_is_used(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(vision_config=PATCHES, text_config=TEXT)
    model = randomised(getattr(transformers, f"{kind}Model")(config))
    extractor = load_hub(str(save(model, tmp_path)))
    with torch.no_grad():
        expected = model.vision_model(pixel_values=images()).pooler_output
    same(features(extractor), expected)
    assert not any("text" in name for name in extractor.state_dict())
    assert b"text" not in bytes(extractor.description.tolist())


@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
def test_a_classifier_without_pooling_weights_gives_its_class_token(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**PATCHES)
    model = randomised(getattr(transformers, f"{kind}ForImageClassification")(config))
    extractor = load_hub(str(save(model, tmp_path)))
    with torch.no_grad():
        expected = model.base_model(images()).last_hidden_state[:, 0]
    same(features(extractor), expected)
    rebuilt = HubExtractor.from_state_dict(extractor.state_dict())
    same(features(rebuilt), expected)


def test_published_names_of_weights_are_still_read(vit: Path) -> None:
    # save_pretrained writes the names of the first ViT checkpoints. Those of the module are others today.
    extractor = loaded(vit)
    published = {f"backbone.{name}": tensor for name, tensor in load_tensors(vit / "model.safetensors").items()}
    assert "backbone.encoder.layer.0.attention.attention.query.weight" in published
    rebuilt = HubExtractor.from_state_dict({"description": extractor.description, **published})
    same(features(rebuilt), features(extractor))


def test_saved_weights_that_are_incomplete_name_one_that_is_missing(vit: Path) -> None:
    extractor = load_hub(str(vit))
    state = extractor.state_dict()
    del state["backbone.layernorm.weight"]
    with pytest.raises(DataError, match=r"layernorm\.weight.*transformers"):
        HubExtractor.from_state_dict(state)


def test_half_precision_and_sharded_weights_are_read(tmp_path: Path, vit: Path) -> None:
    model = transformers.ViTModel.from_pretrained(vit)
    save(model.half(), tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1 and not (tmp_path / "model.safetensors").exists()
    extractor = load_hub(str(tmp_path))
    assert {parameter.dtype for parameter in extractor.parameters()} == {torch.float32}
    torch.testing.assert_close(features(extractor), features(loaded(vit)), rtol=0, atol=0.01)


def test_it_is_in_evaluation_mode_and_can_be_copied(tmp_path: Path) -> None:
    tiny("resnet", tmp_path)
    extractor = load_hub(str(tmp_path))
    assert not any(module.training for module in extractor.modules())
    same(features(copy.deepcopy(extractor)), features(extractor))
    with torch.no_grad():
        same(extractor(images()[:1]), features(extractor)[:1])  # batch norms do not look at the batch


def test_the_random_state_and_the_terminal_are_left_alone(vit: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.random.get_rng_state()
    extractor = load_hub(str(vit))
    HubExtractor.from_state_dict(extractor.state_dict())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


# Descriptions


def test_a_description_has_the_same_bytes_wherever_the_folder_is(vit: Path, tmp_path: Path) -> None:
    copied = edited(vit, tmp_path / vit.name)
    description = loaded(vit).description
    assert torch.equal(load_hub(copied).description, description)
    content = bytes(description.tolist())
    assert str(vit.parent).encode() not in content
    values = json.loads(content)
    assert list(values) == sorted(values) and list(values["config"]) == sorted(values["config"])
    assert (values["source"], values["licence"], values["commit"]) == ("tiny-vit", "apache-2.0", None)


def test_settings_that_name_code_or_files_are_dropped(vit: Path, tmp_path: Path) -> None:
    harmful = {
        "auto_map": {"AutoModel": "evil.Model"},
        "_attn_implementation": "someone/kernels",
        "attn_implementation": "someone/kernels",
        "quantization_config": {"quant_method": "gptq"},
        "transformers_weights": "../weights.bin",
        "fusion_config": {"x": True},
    }
    extractor = load_hub(edited(vit, tmp_path / vit.name, **harmful))
    assert torch.equal(extractor.description, loaded(vit).description)
    config = json.loads(bytes(extractor.description.tolist()))["config"]
    forged = with_description(vit, config={**config, **harmful})
    rebuilt = HubExtractor.from_state_dict({**extractor.state_dict(), "description": forged})
    assert rebuilt.backbone.config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(rebuilt.backbone.config, "auto_map")


@pytest.mark.parametrize(
    "description",
    [
        torch.tensor([], dtype=torch.uint8),
        torch.tensor(list(b"not JSON"), dtype=torch.uint8),
        torch.tensor(list(b"[]"), dtype=torch.uint8),
        torch.tensor(list(b"{}"), dtype=torch.uint8),
        torch.tensor([255, 254], dtype=torch.uint8),
        torch.full((70_000,), 32, dtype=torch.uint8),
        torch.zeros(4),
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.tensor(list(b"[" * 50_000), dtype=torch.uint8),
    ],
    ids=["empty", "no JSON", "a list", "an object", "no UTF-8", "long", "floats", "two dimensions", "deep"],
)
def test_an_invalid_description_is_a_data_error(description: Tensor) -> None:
    with pytest.raises(DataError):
        measure(Description.from_tensor(description))


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"model_type": "bert"}},
        {"config": {}},
        {"config": {"model_type": ["vit"]}},
        {"config": {"model_type": "vit", "hidden_size": "many"}},
        {"config": {"model_type": "vit", "hidden_size": 13, "num_attention_heads": 2}},
        {"config": {"model_type": "vit", "hidden_act": "os.system"}},
        {"config": {"model_type": "vit", "image_size": 10**9}},
        {"config": {"model_type": "resnet", "depths": [10**8] * 4}},
        {"config": {"model_type": "vit", "image_size": 64}},  # other than `size`
        {"size": 0},
        {"size": 10**6},
        {"std": [0, 1, 1]},
        {"mean": [0.5]},
        {"pooler": "perhaps"},
        {"more": 1},
    ],
    ids=str,
)
def test_an_impossible_description_is_a_data_error(changes: dict[str, Any], vit: Path) -> None:
    with pytest.raises(DataError):
        measure(Description.from_tensor(with_description(vit, **changes)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"num_hidden_layers": 10**9, "hidden_size": 12}, "modules"), ({"hidden_size": 120_000}, "parameters")],
)
def test_a_forged_description_cannot_ask_for_any_amount_of_memory(
    settings: dict[str, int], named: str, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.network.hub.MAX_MODULES", 500)  # as soon as there are too many, whatever their number
    config = {"model_type": "vit", "image_size": SIDE, **settings}
    state = loaded(vit).state_dict()
    with pytest.raises(DataError, match=named):
        HubExtractor.from_state_dict({**state, "description": with_description(vit, config=config)})


# Inputs

STATED = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        ({"size": 32}, 32),
        ({"size": {"height": 32, "width": 32}}, 32),
        ({"size": {"shortest_edge": 32}}, 32),
        ({"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}}, 32),
        ({"size": 40, "crop_size": 32}, 32),
        ({"size": 32, "do_center_crop": False, "crop_size": 28}, 32),
        ({}, 32),
    ],
    ids=str,
)
def test_the_input_size_is_what_the_preprocessor_leaves(processor: dict[str, Any], size: int, tmp_path: Path) -> None:
    tiny("vit", tmp_path, {**processor, **STATED})
    assert load_hub(str(tmp_path)).input_size == size


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ViT", STATED),
        ("ViT", {**STATED, "rescale_factor": 1 / 127.5}),
        ("ViT", {**STATED, "do_rescale": False}),
        ("ViT", {"do_normalize": False}),
        ("ViT", {"image_mean": 0.3, "image_std": 0.2}),
        ("CLIP", {}),
        ("Siglip", {}),
        ("ConvNext", STATED),
        ("EfficientNet", {**STATED, "include_top": True}),
        ("EfficientNet", {**STATED, "include_top": False}),
    ],
    ids=str,
)
def test_normalisation_is_that_of_the_image_processor(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    # An image of one colour, so that only the normalisation matters.
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(
        **options,
        size={"shortest_edge": SIDE} if kind in ("CLIP", "ConvNext") else {"height": SIDE, "width": SIDE},
        **({"crop_size": SIDE} if kind == "CLIP" else {}),
    )
    tiny("vit", tmp_path, processor=None)
    processor.save_pretrained(tmp_path)
    colour = np.array([10, 100, 200], dtype=np.uint8)
    image = Image.fromarray(np.tile(colour, (SIDE, SIDE, 1)))
    expected = processor(image, return_tensors="np")["pixel_values"][0]
    extractor = load_hub(str(tmp_path))
    assert expected.shape == (3, extractor.input_size, extractor.input_size)
    found = (colour / 255 - np.array(extractor.input_mean)) / np.array(extractor.input_std)
    np.testing.assert_allclose(found, expected[:, 5, 5], rtol=1e-5)


def test_a_processor_config_is_read_too(tmp_path: Path) -> None:
    tiny("vit", tmp_path, processor=None)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    assert load_hub(str(tmp_path)).input_mean == (0.5, 0.4, 0.3)


@pytest.mark.parametrize(
    ("model_type", "mean"), [("dinov2", 0.485), ("clip_vision_model", 0.48145466), ("mobilenet_v2", 0.5)]
)
def test_families_with_one_convention_need_no_preprocessor(model_type: str, mean: float, tmp_path: Path) -> None:
    tiny(model_type, tmp_path, processor=None)
    extractor = load_hub(str(tmp_path))
    assert extractor.input_mean[0] == mean and extractor.input_size == SIDE
    assert model_type in STATISTICS


@pytest.mark.parametrize(
    ("model_type", "processor", "named"),
    [
        ("vit", None, "image_mean"),
        ("swin", None, "image_mean"),
        ("resnet", None, "size"),
        ("vit", {**STATED, "size": {"height": 32, "width": 48}}, "48"),
        ("vit", {**STATED, "size": {"longest_edge": 32}}, "size"),
        ("vit", {**STATED, "size": "large"}, "large"),
        ("vit", {**STATED, "do_flip_channel_order": True}, "do_flip_channel_order"),
        ("vit", {**STATED, "rescale_offset": True}, "rescale_offset"),
        ("vit", {**STATED, "rescale_factor": 0}, "rescale_factor"),
        ("vit", {**STATED, "image_std": [0.5, 0.5]}, "image_std"),
        ("vit", {**STATED, "image_mean": ["a", 0, 0]}, "image_mean"),
        ("vit", {**STATED, "size": 48}, "48"),  # its position embeddings are for 32
    ],
    ids=str,
)
def test_preprocessors_without_a_usable_input_are_refused(
    model_type: str, processor: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    tiny(model_type, tmp_path, processor)
    with pytest.raises(DataError, match=named):
        load_hub(str(tmp_path))


# Folders


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(),
        transformers.Wav2Vec2Config(),
        transformers.YolosConfig(),
        transformers.VideoMAEConfig(),
        transformers.CLIPTextConfig(),
        transformers.ViTMAEConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_other_models_than_vision_backbones_are_refused(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=f"vision backbone.*{config.model_type}"):
        load_hub(str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"model_type": "clip"}', '{"model_type": 3}'])
def test_a_damaged_config_is_a_data_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError):
        load_hub(str(tmp_path))


def test_damaged_weights_are_a_data_error(vit: Path, tmp_path: Path) -> None:
    intact = (vit / "model.safetensors").read_bytes()
    for number, content in enumerate((intact[:-100], intact[:50], b"", b"\xff" * 200)):
        folder = edited(vit, tmp_path / str(number))
        Path(folder, "model.safetensors").write_bytes(content)
        with pytest.raises(DataError, match="safetensors"):
            load_hub(folder)


def test_weights_that_do_not_fit_are_named(vit: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"layers\.2\."):
        load_hub(edited(vit, tmp_path / "deeper", num_hidden_layers=3))
    with pytest.raises(DataError, match=r"fc1.*32.*48"):
        load_hub(edited(vit, tmp_path / "wider", intermediate_size=48))


def test_pickled_weights_are_never_read(vit: Path, tmp_path: Path) -> None:
    folder = Path(edited(vit, tmp_path / "network"))
    torch.save(load_tensors(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model\.safetensors"):
        load_hub(str(folder))


@pytest.mark.parametrize("name", ["../vit/model.safetensors", "/etc/model.safetensors", "pytorch_model.bin", ""])
def test_an_index_names_safetensors_files_of_its_folder_only(name: str, vit: Path, tmp_path: Path) -> None:
    folder = Path(edited(vit, tmp_path / "network"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DataError, match=r"index\.json"):
        load_hub(str(folder))


def test_names_of_the_hub_and_folders_are_recognised(vit: Path, tmp_path: Path) -> None:
    assert is_hub_name("hf:owner/name") and is_hub_name(str(vit))
    assert not any(is_hub_name(name) for name in ("resnet18", str(tmp_path), str(tmp_path / "none"), "auto"))


@pytest.mark.parametrize(
    "name", ["hf:", "hf:name", "hf:a/b/c", "hf:../..", "hf:a/b@../../c", "hf:a/b@", "hf:a b/c", "hf:a--b/c"]
)
def test_a_name_that_the_hub_cannot_have_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="OWNER/NAME"):
        load_hub(name)
    with pytest.raises(UsageError, match="OWNER/NAME"):
        describe(name)


def test_a_folder_is_described_without_reading_weights(vit: Path, tmp_path: Path) -> None:
    folder = Path(edited(vit, tmp_path / "network"))
    parameters = sum(parameter.numel() for parameter in loaded(vit).parameters())
    (folder / "model.safetensors").write_bytes(b"")
    found = describe(str(folder))
    assert (found["parameters"], found["dimension"], found["input_size"]) == (parameters, 16, SIDE)
    assert (found["summary"], found["licence"], found["offline"]) == ("vit", "apache-2.0", True)


def test_without_transformers_the_extra_is_named(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = load_hub(str(vit)).state_dict()
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (
        lambda: load_hub(str(vit)),
        lambda: describe("hf:a/b"),
        lambda: HubExtractor.from_state_dict(state),
    ):
        with pytest.raises(UsageError, match="hub"):
            call()


# The hub


def load_all(networks: list[str], cache: Path, url: str, *, offline: bool = False) -> tuple[dict[str, Any], str]:
    """The outcome of loading each of these networks, and what was written to the terminal.

    The hub's client reads HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE when it is imported, so its constants are replaced.
    """
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    constants = {"HF_HUB_CACHE": str(cache), "ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    found: dict[str, Any] = {}
    with (
        mock.patch.multiple("huggingface_hub.constants", **constants, HF_HUB_OFFLINE=offline),
        redirect_stderr(io.StringIO()) as terminal,
    ):
        for network in networks:
            progress, before = Recorder(), describe(network)
            try:
                extractor = load_hub(network, progress)
            except EngramError as error:
                found[network] = {"error": error, "before": before}
            else:
                values = features(extractor)
                details = extractor.details
                found[network] = {"phases": progress.phases, "features": values, "details": details, "before": before}
    return found, terminal.getvalue()


@pytest.fixture(scope="module")
def downloaded(vit: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of loading networks from a hub on loopback, then without it."""
    folder = tmp_path_factory.mktemp("served")
    complete = Path(edited(vit, folder / "complete"))
    (complete / "pytorch_model.bin").write_bytes(b"a pickle")
    (complete / "model.onnx").write_bytes(b"of no use")
    pickled = Path(edited(vit, folder / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    names = [
        "hf:me/vit",
        f"hf:me/vit@{COMMIT}",
        "hf:me/vit@v2",
        "hf:me/none",
        "hf:me/gated",
        "hf:me/private",
        "hf:me/pickled",
    ]
    with serving({"me/vit": complete, "me/pickled": pickled}) as hub:
        hub.refusals = {"me/gated": (403, "GatedRepo"), "me/private": (401, "")}
        hub.cut = {"config.json"}
        online, terminal = load_all(names, folder / "cache", hub.url)
        requests, url = list(hub.requests), hub.url
    unreachable, _ = load_all(["hf:me/vit", "hf:me/other"], folder / "cache", url)
    offline, _ = load_all(["hf:me/vit", "hf:me/other"], folder / "cache", url, offline=True)
    unwanted = {"pytorch_model.bin", "model.onnx"}
    size = sum(file.stat().st_size for file in complete.iterdir() if file.name not in unwanted)
    return {
        "online": online,
        "terminal": terminal,
        "requests": requests,
        "size": size,
        "unreachable": unreachable,
        "offline": offline,
    }


def test_a_network_is_downloaded_from_the_hub(downloaded: dict[str, Any], vit: Path) -> None:
    found = downloaded["online"]["hf:me/vit"]
    same(found["features"], features(loaded(vit)))
    details = found["details"]
    assert (details.source, details.commit, details.licence) == ("hf:me/vit", COMMIT, "apache-2.0")
    assert (found["before"]["offline"], found["before"]["parameters"]) == (False, None)


def test_no_other_file_is_downloaded(downloaded: dict[str, Any]) -> None:
    fetched = {Path(path).name for path in downloaded["requests"] if "/resolve/" in path}
    assert fetched == {"config.json", "preprocessor_config.json", "model.safetensors", "README.md"}


def test_progress_counts_the_bytes_once(downloaded: dict[str, Any]) -> None:
    # The connection broke off once in config.json; the client began it again.
    assert downloaded["online"]["hf:me/vit"]["phases"] == [["download", downloaded["size"], downloaded["size"]]]
    assert downloaded["online"][f"hf:me/vit@{COMMIT}"]["phases"] == []  # the same files are cached
    assert "%|" not in downloaded["terminal"]  # no bars


def test_a_cached_network_is_described(downloaded: dict[str, Any]) -> None:
    before = downloaded["offline"]["hf:me/vit"]["before"]
    assert before["offline"] and COMMIT in before["weights"]
    assert (before["dimension"], before["input_size"], before["licence"]) == (16, SIDE, "apache-2.0")


@pytest.mark.parametrize("state", ["unreachable", "offline"])
def test_without_the_hub_the_cache_is_used(state: str, downloaded: dict[str, Any]) -> None:
    found = downloaded[state]
    same(*(each["hf:me/vit"]["features"] for each in (found, downloaded["online"])))
    missing = found["hf:me/other"]["error"]
    assert type(missing) is DataError
    assert "HF_HOME" in str(missing) and "hf download me/other" in str(missing)
    assert ("HF_HUB_OFFLINE" in str(missing)) == (state == "offline")


@pytest.mark.parametrize(
    ("network", "kind", "facts"),
    [
        ("hf:me/none", UsageError, ["me/none"]),
        ("hf:me/vit@v2", UsageError, ["me/vit", "v2"]),
        ("hf:me/gated", DataError, ["me/gated", "HF_TOKEN"]),
        ("hf:me/private", DataError, ["me/private", "HF_TOKEN"]),
        ("hf:me/pickled", DataError, ["model.safetensors"]),
    ],
)
def test_what_the_hub_refuses_is_explained(
    network: str, kind: type[EngramError], facts: list[str], downloaded: dict[str, Any]
) -> None:
    error = downloaded["online"][network]["error"]
    assert type(error) is kind
    assert all(fact in str(error) for fact in facts)


def test_two_bars_for_the_same_bytes_count_once() -> None:
    steps: list[int] = []

    class Phase:
        def advance(self, steps_: int = 1, note: str = "") -> None:
            steps.append(steps_)

    make = _bars(Phase())  # type: ignore[arg-type]
    transferred, written, files = make(unit="B", total=0), make(unit="B", total=0), make(desc="files", total=3)
    transferred.update(60)
    written.update(50)
    files.update(1)
    written.update(50)
    transferred.update(20)
    written.update(-30)  # the client starts a file again
    written.update(30)
    assert steps == [60, 40]


def test_vision_towers_are_backbones() -> None:
    assert set(TOWERS.values()) <= BACKBONES and set(STATISTICS) <= BACKBONES
