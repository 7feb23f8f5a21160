"""Tiny networks in the Hugging Face hub's layout, and a hub on loopback that serves them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIDE = 32  # pixels
TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PATCHES = {**TRANSFORMER, "image_size": SIDE, "patch_size": 8}
TEXT = {**TRANSFORMER, "vocab_size": 20, "max_position_embeddings": 8}
STAGES = {"hidden_sizes": [8, 12], "depths": [1, 1]}

# The settings of a tiny network of each model type.
TINY: dict[str, dict[str, Any]] = {
    "beit": PATCHES,
    "clip_vision_model": PATCHES,
    "convnext": {**STAGES, "num_stages": 2, "image_size": SIDE},
    "convnextv2": {**STAGES, "num_stages": 2, "image_size": SIDE},
    "deit": PATCHES,
    "dinov2": PATCHES,
    "dinov2_with_registers": PATCHES,
    "dinov3_vit": PATCHES,
    "ijepa": PATCHES,
    "mobilenet_v1": {"depth_multiplier": 0.25, "image_size": SIDE},
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": SIDE},
    "poolformer": {"hidden_sizes": [4, 8, 8, 12], "depths": [1, 1, 1, 1]},
    "regnet": {"embedding_size": 8, **STAGES, "groups_width": 4},
    "resnet": {"embedding_size": 8, **STAGES, "layer_type": "basic"},
    "siglip_vision_model": PATCHES,
    "swin": {"image_size": SIDE, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "vit": PATCHES,
    "vit_msn": PATCHES,
}
PROCESSOR = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}


def randomised(model: nn.Module, seed: int = 0) -> Any:
    """The model in evaluation mode, with random weights, so that every part of it has an effect."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draws)
                tensor.copy_(1 + 0.1 * noise.abs() if name.endswith("running_var") else tensor + 0.1 * noise)
    return model.eval()


def save(model: Any, folder: Path, processor: Mapping[str, Any] | None = PROCESSOR, **options: Any) -> Path:
    """Write a network as `save_pretrained` does; without a `processor`, without preprocessor_config.json."""
    model.save_pretrained(folder, **options)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def tiny(model_type: str, folder: Path, processor: Mapping[str, Any] | None = PROCESSOR, **options: Any) -> Any:
    """A tiny network with random weights, saved to the folder."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config = CONFIG_MAPPING[model_type](**TINY[model_type])
    model = randomised(MODEL_MAPPING[type(config)](config))  # type: ignore[operator]
    save(model, folder, processor, **options)
    return model


class Hub(ThreadingHTTPServer):
    """Serves folders as repositories, as the hub does; its attributes set refusals and interruptions."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = dict(repositories)  # by OWNER/NAME
        self.refusals: dict[str, tuple[int, str]] = {}  # status and X-Error-Code by OWNER/NAME
        self.cut: set[str] = set()  # files whose first download breaks off halfway
        self.requests: list[str] = []  # paths

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(path)
        owner, name, kind, *rest = [*path.removeprefix("/api/models").strip("/").split("/"), "", "", ""]
        repository = f"{owner}/{name}"
        if repository in self.server.refusals:
            self._refuse(*self.server.refusals[repository])
        elif repository not in self.server.repositories:
            self._refuse(404, "RepoNotFound")
        elif rest[0] not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            self._answer(self.server.repositories[repository], kind, rest[1])

    do_HEAD = do_GET

    def _answer(self, folder: Path, kind: str, file: str) -> None:
        if kind == "revision":
            self._send(json.dumps({"id": "", "sha": COMMIT, "siblings": []}).encode(), "application/json")
        elif kind == "tree":
            self._send(json.dumps([_entry(path) for path in sorted(folder.iterdir())]).encode(), "application/json")
        else:
            self._send((folder / file).read_bytes(), "application/octet-stream", file)

    def _send(self, content: bytes, kind: str, file: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if file in self.server.cut else content)
            self.server.cut.discard(file)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _entry(path: Path) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path.name,
        "size": path.stat().st_size,
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
    }


@contextmanager
def serving(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """A hub on loopback with these repositories."""
    with Hub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
