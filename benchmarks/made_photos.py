"""Generated photos that take as long to decode as real ones: noise of every scale, saved as JPEG."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

OCTAVES = (4, 8, 16, 32, 64, 128)


def photo(number: int, width: int, height: int) -> Image.Image:
    """Noise whose large shapes are stronger than its small ones, as in photographs."""
    random = np.random.default_rng(number)
    whole = np.zeros((height, width, 3), dtype=np.float32)
    for size in OCTAVES:
        cells = Image.fromarray(random.integers(0, 256, (size * 3 // 4, size, 3), dtype=np.uint8))
        whole += np.asarray(cells.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32) / size**0.7
    whole += random.normal(0, 6, whole.shape)
    low, high = whole.min(), whole.max()
    return Image.fromarray(((whole - low) * (255 / (high - low))).astype(np.uint8))


def class_folders(root: Path, *, count: int, distinct: int, classes: int, width: int, height: int) -> int:
    """Write `count` files `root/CLASS/*.JPEG`, links to `distinct` photos; returns the mean bytes of a photo."""
    own = root.with_name(f"{root.name}-distinct")
    own.mkdir(parents=True)
    for number in range(distinct):
        photo(number, width, height).save(own / f"{number}.JPEG", quality=92)
    for label in range(classes):
        (root / f"n{label:08d}").mkdir(parents=True)
    for number in range(count):
        os.link(own / f"{number % distinct}.JPEG", root / f"n{number % classes:08d}" / f"{number}.JPEG")
    return sum(path.stat().st_size for path in own.iterdir()) // distinct
