"""The files of a network in the Hugging Face hub's layout: downloading, finding in the cache, and reading them.

`HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN` have the effect that the hub's own client gives them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from engram.errors import DataError, EngramError, UsageError
from engram.progress import SILENT, Phase, Progress
from engram.storage import load_tensors, parse_json

NAME = re.compile(r"hf:(?P<repository>\w+([.-]\w+)*/\w+([.-]\w+)*)(@(?P<revision>[\w-]+([./][\w-]+)*))?", re.ASCII)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# A pickle is never downloaded, whatever the repository holds.
FILES = [
    *("config.json", "preprocessor_config.json", "processor_config.json", "README.md"),
    *(WEIGHTS, INDEX, "model-*-of-*.safetensors"),
]

# Mean and standard deviation of the inputs, used if a checkpoint does not state them. Only for families that are always
# trained with the same ones: published ViT and Swin checkpoints, for example, differ.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5,) * 3, (0.5,) * 3)
STATISTICS = {
    **dict.fromkeys(("convnext", "convnextv2", "dinov2", "dinov2_with_registers", "regnet", "resnet"), IMAGENET),
    **dict.fromkeys(("mobilenet_v1", "mobilenet_v2", "siglip_vision_model"), HALF),
    "clip_vision_model": OPENAI,
}


def download(network: str, progress: Progress) -> Path:
    """The folder of `hf:OWNER/NAME[@REVISION]` in the hub's cache, after downloading what it lacks.

    If the hub cannot be reached, what the cache holds is used.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    wanted = _wanted(network)
    try:
        try:
            plan = snapshot_download(**wanted, tqdm_class=_bars(None), dry_run=True)
        except DryRunError as error:
            cached = find_cached(network)
            if cached is None:
                raise _failure(network, error.__cause__ or error) from error
            return cached
        size = sum(file.file_size or 0 for file in plan if file.will_download)
        with (progress if size else SILENT).phase("download", size) as phase:
            return Path(snapshot_download(**wanted, tqdm_class=_bars(phase)))
    except EngramError:
        raise
    except Exception as error:  # the client raises its own errors, those of two transports, and those of the disk
        raise _failure(network, error) from error


def find_cached(network: str) -> Path | None:
    """The folder of `hf:OWNER/NAME[@REVISION]` in the hub's cache; None if its weights are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(**_wanted(network), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return folder if any((folder / name).is_file() for name in (WEIGHTS, INDEX)) else None


def _wanted(network: str) -> dict[str, Any]:
    """The arguments of `snapshot_download`."""
    found = NAME.fullmatch(network)
    if found is None:
        raise UsageError(
            f"'{network}' does not name a network of the hub: write hf:OWNER/NAME or hf:OWNER/NAME@REVISION."
        )
    return {"repo_id": found["repository"], "revision": found["revision"], "allow_patterns": FILES}


def _failure(network: str, error: BaseException) -> EngramError:
    from huggingface_hub import errors

    login = "log in with 'hf auth login' or HF_TOKEN"
    repository = _wanted(network)["repo_id"]
    if isinstance(error, errors.GatedRepoError):
        return DataError(f"{network} is gated. Accept its conditions on its page of the hub, and {login}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{network}: the repository {repository} of the hub has no such revision.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(f"The hub has no repository {repository}, or it is private. Check the name, or {login}.")
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return DataError(f"The hub refuses access to {repository}: {reason}. Check the token, or {login}.")
    return DataError(
        f"{network} is not in the hub's cache (in the folder HF_HOME) and could not be downloaded: {reason}. "
        f"On a machine that reaches the hub, run: hf download {repository} --local-dir FOLDER. "
        "Copy that folder here and give its path as the network."
    )


def _bars(phase: Phase | None) -> Any:
    """What makes progress bars for one download of the hub's client. They show nothing and report to the phase."""
    received = _Received(phase)
    return lambda *_, unit="", **__: _Bar(received if unit == "B" else _Received(None))


class _Received:
    """The bytes that a download has received. The client counts them on two bars; the one that is ahead is reported."""

    def __init__(self, phase: Phase | None) -> None:
        self.phase, self.count, self.lock = phase, 0, threading.Lock()

    def reach(self, count: int) -> None:
        if self.phase is not None and count > self.count:
            self.phase.advance(count - self.count)
            self.count = count


class _Bar:
    """What the hub's client uses of a tqdm bar."""

    format_dict: ClassVar[dict[str, Any]] = {}

    def __init__(self, received: _Received) -> None:
        self.received, self.n, self.total = received, 0, 0

    def update(self, n: float | None = 1) -> None:
        with self.received.lock:  # the client downloads several files at a time
            self.n += int(n or 0)
            self.received.reach(self.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _ignore(self, *_: object, **__: object) -> None:
        pass

    close = refresh = set_description = set_description_str = set_postfix_str = _ignore


def read_json_file(folder: Path, name: str) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        found = parse_json((folder / name).read_bytes(), str(folder / name))
    except OSError as error:
        raise DataError(f"{folder / name} cannot be read: {error.strerror}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{folder / name} does not hold a JSON object.")
    return found


def _read_preprocessor(folder: Path) -> dict[str, Any]:
    """How images are prepared, from preprocessor_config.json or processor_config.json; empty if there is neither."""
    if (folder / "preprocessor_config.json").is_file():
        return read_json_file(folder, "preprocessor_config.json")
    if (folder / "processor_config.json").is_file():
        inner = read_json_file(folder, "processor_config.json").get("image_processor")
        return inner if isinstance(inner, dict) else {}
    return {}


def read_licence(folder: Path) -> str | None:
    """The licence that the head of README.md states."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license:\s*[\"']?([\w.+-]+)", head[1], re.MULTILINE) if head else None
    return found[1] if found else None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the several files that its index lists."""
    if (folder / WEIGHTS).is_file():
        return load_tensors(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise DataError(f"{folder} holds no {WEIGHTS}. Weights in other formats, such as pickles, are not read.")
    places = read_json_file(folder, INDEX).get("weight_map")
    names = {str(name) for name in places.values()} if isinstance(places, dict) else {""}
    if any(re.fullmatch(r"[\w-][\w.-]*\.safetensors", name) is None for name in names):
        raise DataError(f"{folder / INDEX} does not list safetensors files of its own folder.")
    return {name: tensor for file in sorted(names) for name, tensor in load_tensors(folder / file).items()}


def read_inputs(
    network: str, folder: Path, settings: Mapping[str, Any]
) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Size, mean and standard deviation of the inputs, from preprocessor_config.json or the architecture."""
    processor = _read_preprocessor(folder)
    return _size(network, processor, settings), *_statistics(network, processor, settings["model_type"])


def _size(network: str, processor: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Pixels a side: those left by the centre crop, else those that images are resized to, else config.json's."""
    crops = processor.get("do_center_crop", "crop_size" in processor)
    found = (processor.get("crop_size") if crops else None) or processor.get("size") or settings.get("image_size")
    if isinstance(found, dict):
        found = [found[name] for name in ("height", "width", "shortest_edge") if found.get(name)]
    sides = set(found) if isinstance(found, list | tuple) else {found}
    size = sides.pop() if len(sides) == 1 else None
    if not isinstance(size, int):
        raise DataError(f"{network} does not state one square size of its inputs in preprocessor_config.json: {found}.")
    return size


def _statistics(
    network: str, processor: Mapping[str, Any], model_type: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels / 255, whatever factor the pixels are to be multiplied by."""
    for unusual in ("do_flip_channel_order", "rescale_offset"):
        if processor.get(unusual):
            raise DataError(f"{network} cannot be used: its preprocessor_config.json asks for {unusual}.")
    mean, std = processor.get("image_mean"), processor.get("image_std")
    if not processor.get("do_normalize", True):
        mean, std = 0, 1
    elif mean is None or std is None:
        if model_type not in STATISTICS:
            raise DataError(
                f"{network} does not state image_mean and image_std in preprocessor_config.json. "
                f"They differ between networks of type {model_type}."
            )
        mean, std = STATISTICS[model_type]
    means, stds = _channels(network, "image_mean", mean), _channels(network, "image_std", std)
    if processor.get("include_top"):  # EfficientNet divides by it twice
        again = _channels(network, "image_std", processor.get("image_std"))
        stds = [first * second for first, second in zip(stds, again, strict=True)]
    factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    scale = 255 * _channels(network, "rescale_factor", factor)[0]
    if min(scale, *stds) <= 0:
        raise DataError(f"{network} cannot be used: rescale_factor and image_std must be more than zero.")
    return tuple(value / scale for value in means), tuple(value / scale for value in stds)


def _channels(network: str, name: str, value: Any) -> list[float]:
    """A number for each of three channels; a single one is for all."""
    values = value if isinstance(value, list | tuple) else [value] * 3
    if len(values) != 3 or not all(isinstance(number, int | float) for number in values):
        raise DataError(f"{network} cannot be used: {name} must be three numbers, and is {value!r}.")
    return [float(number) for number in values]
