"""A small model of one's own images, taught twice, and copies of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from images_made import encoded

from engram.model import LearnOptions, ModelFolder, learn
from engram.model.manifest import Manifest

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
    """A model in `place`/model of three classes, learned in two generations; their images in `place`/1 and /2.

    The second brings a new class, and more of one that is known. It learns as the paper's do, and keeps float32: tests
    can compare numbers. Its network is trained from scratch, on half of the images.
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
    """The network file of a generation, relative to the model's folder."""
    assert manifest.network is not None
    return f"networks/{manifest.network.sha256}.safetensors"


def copied(folder: ModelFolder, path: Path) -> ModelFolder:
    """The same model elsewhere."""
    shutil.copytree(folder.path, path)
    return ModelFolder(path)
