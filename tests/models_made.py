"""A small model of made-up images, learned in two updates, and copies of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from images_made import encoded

from engram.model import LearnOptions, ModelFolder, learn
from engram.model.manifest import Manifest
from engram.progress import SILENT

DAISY = "gänseblümchen"
TULIP = "[red]tulip"  # what a terminal might take for a colour
FORMULA = "=1+1"  # what a spreadsheet might take for a formula
NAMES = (TULIP, DAISY, FORMULA)  # in the order they are learned
COLOURS = {TULIP: (220, 40, 40), DAISY: (40, 220, 40), FORMULA: (40, 40, 220)}
SIDE = 16


def draw(folder: Path, names: tuple[str, ...], count: int) -> Path:
    """A folder with noisy images of one colour per class."""
    for name in names:
        draws = np.random.default_rng(list(name.encode()))
        colour = COLOURS.get(name, (128, 128, 128))
        (folder / name).mkdir(parents=True)
        for number in range(count):
            noisy = np.clip(colour + draws.integers(-40, 41, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
            (folder / name / f"{number}.png").write_bytes(encoded(noisy, "PNG"))
    return folder


def taught(place: Path, *, features_per_class: int = 6, **options: Any) -> ModelFolder:
    """A model in `place`/model of three classes, learned in two versions; their images in `place`/1 and /2.

    The second update has a new class and more of a known one. The network is trained from scratch on half of the
    images, and features are stored as float32, so that tests can compare numbers.
    """
    folder = ModelFolder(place / "model")
    settings = {"adapter_steps": 60, "adapter_width": 64}
    options.setdefault("method", "hybrid" if "images_per_class" in options else "features")
    options |= {"network": "auto", "features_per_class": features_per_class, "settings": settings}
    quick = LearnOptions(image_size=SIDE, epochs=10, hold_out=0.5, **options)
    learn(folder, draw(place / "1", (TULIP, DAISY), 24), quick)
    learn(folder, draw(place / "2", (FORMULA, TULIP), 24), quick)
    return folder


def network_path(manifest: Manifest) -> str:
    """The network file of a version, relative to the model's folder."""
    assert manifest.network is not None
    return f"networks/{manifest.network.sha256}.safetensors"


def files_of(path: Path) -> dict[str, bytes]:
    """Every file of a folder, with its content."""
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def entries(path: Path) -> dict[str, bytes | None]:
    """Every file of a folder with its content, and every folder with None."""
    return {str(each.relative_to(path)): each.read_bytes() if each.is_file() else None for each in path.rglob("*")}


def copied(folder: ModelFolder, path: Path) -> ModelFolder:
    """A copy of a model."""
    shutil.copytree(folder.path, path)
    return ModelFolder(path)


class Interrupting:
    """Progress that is interrupted, as by Ctrl-C, when a phase begins."""

    def __init__(self, name: str) -> None:
        self.name = name

    def phase(self, name: str, steps: int | None = None):  # type: ignore[no-untyped-def]
        if name == self.name:
            raise KeyboardInterrupt
        return SILENT.phase(name, steps)
