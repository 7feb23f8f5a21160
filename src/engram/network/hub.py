"""Vision backbones from the Hugging Face hub, or from a local folder in its layout, as feature extractors.

A network is `hf:OWNER/NAME`, `hf:OWNER/NAME@REVISION`, or a folder with config.json and model.safetensors. Only JSON
and safetensors files are read: no pickle, and no code of a repository.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from engram.errors import DataError, EngramError, not_installed
from engram.network.backbones import Pretrained
from engram.network.hub_files import (
    download,
    find_cached,
    read_json_file,
    read_licence,
    read_preprocessor,
    read_weights,
)
from engram.progress import SILENT, Progress
from engram.storage import parse_json

PREFIX = "hf:"
MAX_DESCRIPTION_BYTES = 2**16
MAX_MODULES, MAX_PARAMETERS = 5_000, 10**10  # a forged configuration could ask for any number

# Model types of transformers that turn images (n, 3, s, s) into one feature vector each.
BACKBONES = {
    *("aimv2_vision_model", "chinese_clip_vision_model", "clip_vision_model", "siglip_vision_model"),
    *("beit", "bit", "convnext", "convnextv2", "data2vec-vision", "deit", "dinov2", "dinov2_with_registers"),
    *("dinov3_convnext", "dinov3_vit", "efficientnet", "focalnet", "hiera", "ijepa", "levit", "mobilenet_v1"),
    *("mobilenet_v2", "pixio", "poolformer", "pvt_v2", "regnet", "resnet", "swiftformer", "swin", "swinv2"),
    *("tipsv2_vision_model", "vit", "vit_msn"),
}
# Models for images and text, whose vision tower is used.
TOWERS = {name: f"{name}_vision_model" for name in ("aimv2", "chinese_clip", "clip", "siglip", "tipsv2")}
CLASS_TOKEN = {"deit", "vit", "vit_msn"}  # without a pooling layer, their first token is the feature

Positive = Annotated[float, Field(gt=0)]


class Description(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Everything that is needed to rebuild a backbone without the hub, except its weights."""

    config: dict[str, Any]  # `model_type` and the settings of this architecture, as transformers names them
    pooler: bool = True  # False: no pooling layer, because its weights were not published
    size: Annotated[int, Field(ge=1, le=4096)]  # pixels a side
    mean: tuple[float, float, float]
    std: tuple[Positive, Positive, Positive]
    source: str  # hf:OWNER/NAME, or the name of a local folder
    commit: str | None  # of the repository
    licence: str | None
    transformers: str  # the version that named the weights

    @classmethod
    def validated(cls, values: object) -> Description:
        """Check everything but the settings of the architecture."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise DataError(f"The description of a network is not valid: {error}") from error

    def to_tensor(self) -> Tensor:
        """JSON in UTF-8, uint8 (bytes,). Equal descriptions give equal bytes."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return torch.tensor(list(content.encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Description:
        """The inverse of `to_tensor`."""
        if tensor.dtype != torch.uint8 or tensor.ndim != 1 or len(tensor) > MAX_DESCRIPTION_BYTES:
            raise DataError(f"The description of a network must be at most {MAX_DESCRIPTION_BYTES} bytes.")
        return cls.validated(parse_json(bytes(tensor.tolist()), "The description of a network"))


class HubExtractor(Pretrained):
    """A vision backbone of the transformers library: pooled features (n, d)."""

    description: Tensor  # a buffer, so that a saved model can be rebuilt without the hub

    def __init__(self, backbone: nn.Module, details: Description) -> None:
        super().__init__()
        self.backbone, self.details = backbone, details
        self.input_size, self.input_mean, self.input_std = details.size, details.mean, details.std
        self.register_buffer("description", details.to_tensor())
        self.eval()

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor]) -> HubExtractor:
        """The extractor with this state dict, whichever version of transformers named its weights. Needs no hub."""
        details = Description.from_tensor(tensors["description"])
        measure(details)
        prefix = "backbone."
        weights = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        backbone, missing = _load(details, weights)
        if missing:
            raise DataError(
                f"The saved weights of {details.source} lack {min(missing)}. They were saved with transformers "
                f"{details.transformers}, which may have named them differently: install it."
            )
        return cls(backbone, details)

    def forward(self, images: Tensor) -> Tensor:
        out = self.backbone(pixel_values=images)
        pooled: Tensor | None = out.get("pooler_output")
        if pooled is not None:
            return pooled.flatten(1)
        hidden: Tensor = out.last_hidden_state  # (n, tokens, d) or (n, d, h, w)
        if hidden.ndim == 4:
            return hidden.mean((2, 3))
        return hidden[:, 0] if self.details.config["model_type"] in CLASS_TOKEN else hidden.mean(1)


def is_hub_name(network: str) -> bool:
    """Whether this is `hf:...`, or a local folder with a network in the hub's layout."""
    return network.startswith(PREFIX) or Path(network, "config.json").is_file()


def load_hub(network: str, progress: Progress = SILENT) -> HubExtractor:
    """The backbone with its weights, from the hub (or its cache) or from a local folder."""
    _require_transformers()
    folder = download(network, progress) if network.startswith(PREFIX) else Path(network)
    details = _read_description(network, folder)
    measure(details)
    weights = read_weights(folder)
    backbone, missing = _load(details, weights)
    if details.config["model_type"] in CLASS_TOKEN and any(name.startswith("pooler.") for name in missing):
        details = details.model_copy(update={"pooler": False})  # its weights would be random
        backbone, missing = _load(details, weights)
    if missing:
        raise DataError(f"The weights of {network} lack {min(missing)}.")
    return HubExtractor(backbone, details)


def describe(network: str) -> dict[str, Any]:
    """What `engram networks` prints about a network, without a download."""
    _require_transformers()
    folder = find_cached(network) if network.startswith(PREFIX) else Path(network)
    known = {"name": network, "summary": "vision backbone, not downloaded yet", "weights": network, "licence": ""}
    if folder is None:
        return {**known, "parameters": None, "dimension": None, "input_size": None, "offline": False}
    details = _read_description(network, folder)
    parameters, dimension = measure(details)
    return {
        **{"name": network, "summary": details.config["model_type"], "offline": True, "licence": details.licence or ""},
        **{"parameters": parameters, "dimension": dimension, "input_size": details.size},
        "weights": network + (f" at {details.commit}" if details.commit else ""),
    }


def measure(details: Description) -> tuple[int, int]:
    """The number of parameters and of features, found without allocating memory; an error if it cannot work."""
    _require_transformers()
    with _transformers(details.source), torch.device("meta"), _at_most(MAX_MODULES):
        model, config, options = _architecture(details)
        extractor = HubExtractor(model(config, **options), details)
        features = extractor(torch.zeros(1, 3, details.size, details.size))
    parameters = sum(parameter.numel() for parameter in extractor.parameters())
    if features.ndim != 2 or parameters > MAX_PARAMETERS:
        raise DataError(
            f"{details.source} cannot be used: {parameters:,} parameters, features {tuple(features.shape)}."
        )
    return parameters, features.shape[1]


def _read_description(network: str, folder: Path) -> Description:
    import transformers

    settings = read_json_file(folder, "config.json")
    with _transformers(network):
        if settings.get("model_type") in TOWERS:
            tower = {**settings["vision_config"], **(settings.get("vision_config_dict") or {})}
            settings = {**tower, "model_type": TOWERS[settings["model_type"]]}
        config = _config(settings)
        settings = {name: getattr(config, name) for name in {"model_type", *_own_settings(type(config))}}
        inputs = read_preprocessor(folder)
        size, (mean, std) = inputs.input_size(settings.get("image_size")), inputs.statistics(settings["model_type"])
    from_hub = network.startswith(PREFIX)
    return Description.validated(
        {
            **{"config": settings, "size": size, "mean": mean, "std": std, "licence": read_licence(folder)},
            **{"source": network if from_hub else folder.resolve().name, "commit": folder.name if from_hub else None},
            "transformers": transformers.__version__,
        }
    )


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise not_installed("transformers", "hub")


def _own_settings(config: type) -> set[str]:
    """The settings that belong to one architecture. The general ones can name code, kernels and other files to load."""
    from transformers import PreTrainedConfig

    return inspect.signature(config).parameters.keys() - inspect.signature(PreTrainedConfig).parameters.keys()


def _config(settings: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if settings.get("model_type") not in BACKBONES:
        raise DataError(
            f"It is no vision backbone that engram can use: its model_type is {settings.get('model_type')!r}. "
            f"There are: {', '.join(sorted(BACKBONES | TOWERS.keys()))}."
        )
    config = CONFIG_MAPPING[settings["model_type"]]
    return config(**{name: settings[name] for name in _own_settings(config) & settings.keys()})


def _load(details: Description, weights: Mapping[str, Tensor]) -> tuple[nn.Module, set[str]]:
    """The backbone with these weights, as any version of transformers names them, and the names of missing ones."""
    with _transformers(details.source):
        model, config, options = _architecture(details)
        options |= {"ignore_mismatched_sizes": True, "output_loading_info": True, "dtype": torch.float32}
        # Without a path, transformers looks for no other files, such as adapters.
        backbone, found = model.from_pretrained(None, config=config, state_dict=dict(weights), **options)
    for name, saved, expected in sorted(found["mismatched_keys"]):
        raise DataError(
            f"{details.source}: the weight {name} is {tuple(saved)}, its config asks for {tuple(expected)}."
        )
    return backbone, {name for name in found["missing_keys"] if not name.endswith("num_batches_tracked")}


def _architecture(details: Description) -> tuple[Any, Any, dict[str, Any]]:
    """The class of the model, its configuration and its options."""
    from transformers import MODEL_MAPPING

    config = _config(details.config)
    return MODEL_MAPPING[type(config)], config, {} if details.pooler else {"add_pooling_layer": False}


@contextmanager
def _transformers(source: str) -> Iterator[None]:
    """Turn errors of transformers into ours, silence its reports, and leave the random state as it was."""
    from transformers.utils import logging as reports

    verbosity, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity(logging.ERROR)
    reports.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except Exception as error:  # a configuration can violate any assumption of an architecture
        kind = type(error) if isinstance(error, EngramError) else DataError
        raise kind(f"{source} cannot be used as a vision backbone: {' '.join(str(error).split())}") from error
    finally:
        reports.set_verbosity(verbosity)
        if bars:
            reports.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _at_most(limit: int) -> Iterator[None]:
    """Stop the construction of a network with more modules than this."""
    count = 0

    def check(*_: object) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise DataError(f"It has more than {limit:,} modules.")

    hook = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()
