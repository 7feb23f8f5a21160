"""Vision backbones from the Hugging Face hub, or from a local folder in its layout, as feature extractors.

A network is `hf:OWNER/NAME`, `hf:OWNER/NAME@REVISION`, or a folder with config.json and model.safetensors. Only JSON
and safetensors files are read: no pickle, and no code of a repository. `HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and
`HF_TOKEN` work as in the hub's own client.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, Field, PositiveFloat, ValidationError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from engram.errors import DataError, EngramError, UsageError, not_installed
from engram.network.pretrained import IMAGENET_MEAN, IMAGENET_STD, Pretrained
from engram.progress import SILENT, Phase, Progress
from engram.storage import load_tensors, parse_json, tensors_of

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

NAME = re.compile(r"hf:(?P<repository>\w+([.-]\w+)*/\w+([.-]\w+)*)(@(?P<revision>[\w-]+([./][\w-]+)*))?", re.ASCII)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = ["config.json", "preprocessor_config.json", "processor_config.json"]
FILES = [*JSON_FILES, "README.md", WEIGHTS, INDEX, "model-*-of-*.safetensors"]  # pickled weights are never downloaded

# Mean and standard deviation for checkpoints that do not state them. Only for model types that always use the same
# ones; published ViT and Swin checkpoints, for example, differ.
IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5,) * 3, (0.5,) * 3)
STATISTICS = {
    **dict.fromkeys(("convnext", "convnextv2", "dinov2", "dinov2_with_registers", "regnet", "resnet"), IMAGENET),
    **dict.fromkeys(("mobilenet_v1", "mobilenet_v2", "siglip_vision_model"), HALF),
    "clip_vision_model": OPENAI,
}


class Description(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Everything that is needed to rebuild a backbone without the hub, except its weights."""

    config: dict[str, Any]  # `model_type` and the settings of this architecture, as transformers names them
    pooler: bool = True  # False: no pooling layer, because its weights were not published
    size: Annotated[int, Field(ge=1, le=4096)]  # pixels a side
    mean: tuple[float, float, float]
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
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
        backbone, missing = _load(details, tensors_of(tensors, "backbone"))
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
    with _transformers(details.source), torch.device("meta"), _limited_modules():
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
def _limited_modules() -> Iterator[None]:
    """Stop the construction of a network with more than `MAX_MODULES` modules."""
    numbers = itertools.count(1)

    def check(*_: object) -> None:
        if next(numbers) > MAX_MODULES:
            raise DataError(f"It has more than {MAX_MODULES:,} modules.")

    hook = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


# Files in the hub's layout


def download(network: str, progress: Progress) -> Path:
    """The folder of `hf:OWNER/NAME[@REVISION]` in the hub's cache, after downloading missing files if possible."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    arguments = _arguments(network)
    try:
        plan = snapshot_download(**arguments, tqdm_class=_bars(None), dry_run=True)
        size = sum(file.file_size or 0 for file in plan if file.will_download)
        with (progress if size else SILENT).phase("download", size) as phase:
            return Path(snapshot_download(**arguments, tqdm_class=_bars(phase)))
    except DryRunError as error:
        cached = find_cached(network)
        if cached is None:
            raise _download_error(network, error.__cause__ or error) from error
        return cached
    except Exception as error:  # of the client, of its HTTP libraries, or of the disk
        raise _download_error(network, error) from error


def find_cached(network: str) -> Path | None:
    """The folder of `hf:OWNER/NAME[@REVISION]` in the hub's cache; None if its weights are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(**_arguments(network), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return folder if any((folder / name).is_file() for name in (WEIGHTS, INDEX)) else None


def _arguments(network: str) -> dict[str, Any]:
    """The arguments of `snapshot_download`."""
    found = NAME.fullmatch(network)
    if found is None:
        raise UsageError(f"'{network}' is not a network of the hub. Write hf:OWNER/NAME or hf:OWNER/NAME@REVISION.")
    return {"repo_id": found["repository"], "revision": found["revision"], "allow_patterns": FILES}


def _download_error(network: str, error: BaseException) -> EngramError:
    from huggingface_hub import errors

    repository, login = _arguments(network)["repo_id"], "log in with 'hf auth login' or HF_TOKEN"
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return DataError(f"The hub refuses access to {repository}: {reason}. Accept its terms if it is gated; {login}.")
    if isinstance(error, errors.RevisionNotFoundError | errors.RepositoryNotFoundError):
        return UsageError(f"{network}: the hub has no such repository or revision, or it is private: {login}.")
    return DataError(
        f"{network} is not in the hub's cache (in the folder HF_HOME) and could not be downloaded: {reason}. "
        f"On a machine that reaches the hub, run: hf download {repository} --local-dir FOLDER. "
        "Copy that folder here and give its path as the network."
    )


def _bars(phase: Phase | None) -> Any:
    """A class of invisible progress bars for one download. The client counts bytes on two; the larger one is shown."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    reported, lock = 0, threading.Lock()  # the client downloads several files at once

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *_: Any, unit: str = "", **__: Any) -> None:
            super().__init__(disable=True)
            self.n, self.total, self.counts_bytes = 0, 0, unit == "B"

        def update(self, n: float | None = 1) -> None:
            nonlocal reported
            with lock:
                self.n += int(n or 0)
                if phase is not None and self.counts_bytes and self.n > reported:
                    phase.advance(self.n - reported)
                    reported = self.n

    return Bar


def read_json_file(folder: Path, name: str) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        found = parse_json((folder / name).read_bytes(), str(folder / name))
    except OSError as error:
        raise DataError(f"{folder / name} cannot be read: {error.strerror}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{folder / name} does not hold a JSON object.")
    return found


def read_licence(folder: Path) -> str | None:
    """The licence that the front matter of README.md states."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.match(r"---\s*\n(?:(?!---).*\n)*?license:\s*[\"']?([\w.+-]+)", text)
    return found[1] if found else None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the shards that its index lists."""
    if (folder / WEIGHTS).is_file():
        return load_tensors(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise DataError(f"{folder} holds no {WEIGHTS}. Weights in other formats, such as pickles, are not read.")
    shards = read_json_file(folder, INDEX).get("weight_map")
    names = {str(name) for name in shards.values()} if isinstance(shards, dict) else {""}
    if any(re.fullmatch(r"[\w-][\w.-]*\.safetensors", name) is None for name in names):
        raise DataError(f"{folder / INDEX} does not list safetensors files of its own folder.")
    return {name: tensor for file in sorted(names) for name, tensor in load_tensors(folder / file).items()}


def read_preprocessor(folder: Path) -> Preprocessor:
    """preprocessor_config.json, or the part of processor_config.json for images; the defaults if both are missing."""
    values: Any = {}
    if (folder / "preprocessor_config.json").is_file():
        values = read_json_file(folder, "preprocessor_config.json")
    elif (folder / "processor_config.json").is_file():
        values = read_json_file(folder, "processor_config.json").get("image_processor") or {}
    try:
        return Preprocessor.model_validate(values)
    except ValidationError as error:
        raise DataError(f"Its preprocessor_config.json cannot be used: {error}") from error


def _three(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value] * 3


class Preprocessor(BaseModel):
    """How images are prepared; other settings, such as the resampling filter, are ignored."""

    size: Any = None
    crop_size: Any = None
    do_center_crop: bool | None = None
    do_normalize: bool | None = True
    image_mean: Annotated[tuple[float, float, float], BeforeValidator(_three)] | None = None
    image_std: Annotated[tuple[PositiveFloat, PositiveFloat, PositiveFloat], BeforeValidator(_three)] | None = None
    do_rescale: bool | None = True
    rescale_factor: PositiveFloat = 1 / 255
    include_top: bool | None = False
    do_flip_channel_order: Literal[False] | None = False
    rescale_offset: Literal[False] | None = False

    def input_size(self, image_size: Any) -> int:
        """Pixels a side: after the centre crop, else after resizing, else `image_size`, the architecture's."""
        crops = self.do_center_crop if "do_center_crop" in self.model_fields_set else True
        found = (self.crop_size if crops else None) or self.size or image_size
        if isinstance(found, dict):
            found = [found[name] for name in ("height", "width", "shortest_edge") if found.get(name)]
        sides = set(found) if isinstance(found, list | tuple) else {found}
        size = sides.pop() if len(sides) == 1 else None
        if not isinstance(size, int):
            raise DataError(f"Its preprocessor_config.json does not state one square input size, but {found}.")
        return size

    def statistics(self, model_type: str) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of pixels / 255, whatever factor the preprocessor multiplies pixels by."""
        mean, std = self.image_mean, self.image_std
        if not self.do_normalize:
            mean, std = (0.0,) * 3, (1.0,) * 3
        elif mean is None or std is None:
            if model_type not in STATISTICS:
                raise DataError(f"image_mean and image_std are not stated, and differ among {model_type} networks.")
            mean, std = STATISTICS[model_type]
        twice = self.image_std if self.include_top else None  # EfficientNet divides by the deviation twice
        scale = 255 * (self.rescale_factor if self.do_rescale else 1)
        return [m / scale for m in mean], [s * t / scale for s, t in zip(std, twice or (1.0,) * 3, strict=True)]
