"""Files of a network in the Hugging Face hub's layout: download, look up in the hub's cache, read.

`HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN` work as in the hub's own client.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, PositiveFloat, ValidationError
from torch import Tensor

from engram.errors import DataError, EngramError, UsageError
from engram.progress import SILENT, Phase, Progress
from engram.storage import load_tensors, parse_json

NAME = re.compile(r"hf:(?P<repository>\w+([.-]\w+)*/\w+([.-]\w+)*)(@(?P<revision>[\w-]+([./][\w-]+)*))?", re.ASCII)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = ["config.json", "preprocessor_config.json", "processor_config.json"]
FILES = [*JSON_FILES, "README.md", WEIGHTS, INDEX, "model-*-of-*.safetensors"]  # pickled weights are never downloaded

# Mean and standard deviation for checkpoints that do not state them. Only for model types that always use the same
# ones; published ViT and Swin checkpoints, for example, differ.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5,) * 3, (0.5,) * 3)
STATISTICS = {
    **dict.fromkeys(("convnext", "convnextv2", "dinov2", "dinov2_with_registers", "regnet", "resnet"), IMAGENET),
    **dict.fromkeys(("mobilenet_v1", "mobilenet_v2", "siglip_vision_model"), HALF),
    "clip_vision_model": OPENAI,
}


def download(network: str, progress: Progress) -> Path:
    """The folder of `hf:OWNER/NAME[@REVISION]` in the hub's cache, after downloading missing files.

    If the hub cannot be reached, the cached files are used.
    """
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
    """A class of invisible progress bars for one download. The client counts bytes on two; the larger is reported."""
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
