"""Folders of small generated images, laid out as data sets are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from images_made import encoded

WIDTH, HEIGHT = 40, 30


def noisy_image(label: int, number: int) -> np.ndarray:
    """A noisy image (30, 40, 3) of the pattern of its class."""
    pattern = np.random.default_rng(label).integers(0, 256, (3, 4, 3))
    noise = np.random.default_rng((label, number)).integers(-30, 31, (HEIGHT, WIDTH, 3))
    return np.clip(np.kron(pattern, np.ones((10, 10, 1))) + noise, 0, 255).astype(np.uint8)


def write(path: Path, label: int, number: int, format: str = "JPEG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(noisy_image(label, number), format))
    return path


def class_folders(root: Path, classes: int = 4, per_class: int = 10, first: int = 0) -> Path:
    """`root/n00000000/n00000000_0.JPEG` and so on."""
    for label in range(classes):
        name = f"n{label:08d}"
        for number in range(first, first + per_class):
            write(root / name / f"{name}_{number}.JPEG", label, number)
    return root


def imagenet(root: Path, classes: int = 4, train: int = 10, test: int = 4) -> Path:
    """A folder in the layout of ImageNet."""
    class_folders(root / "train", classes, train)
    class_folders(root / "val", classes, test, first=train)
    return root


def tiny_imagenet(root: Path, classes: int = 3, train: int = 4, test: int = 2) -> Path:
    """A folder in the layout of Tiny ImageNet: lists, boxes beside the images, all validation images in one folder."""
    names = [f"n{label:08d}" for label in range(classes)]
    annotations = []
    for label, name in enumerate(names):
        for number in range(train):
            write(root / "train" / name / "images" / f"{name}_{number}.JPEG", label, number)
        (root / "train" / name / f"{name}_boxes.txt").write_text("a box")
        for number in range(test):
            file = f"val_{number * classes + label}.JPEG"  # classes take turns
            write(root / "val" / "images" / file, label, train + number)
            annotations.append(f"{file}\t{name}\t0\t0\t9\t9")
    (root / "val" / "val_annotations.txt").write_text("\n".join(annotations) + "\n")
    (root / "wnids.txt").write_text("\n".join(reversed(names)) + "\n")
    words = ["goldfish, Carassius auratus", "newt", "newt, eft"][:classes]
    lines = [f"{name}\t{word}" for name, word in zip(names, words, strict=True)]
    (root / "words.txt").write_text("\n".join(["n99999999\tsomething else", *lines]) + "\n")
    (root / "test" / "images").mkdir(parents=True)
    return root


COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220), "white": (230, 230, 230)}
COLOURS |= {"black": (20, 20, 20), "yellow": (230, 220, 40)}


def paint(folder: Path, names: tuple[str, ...], count: int, seed: int = 0, side: int = 16) -> Path:
    """Images of one colour per class with uneven brightness, which a network learns from a few examples."""
    draws = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            light = draws.uniform(0.7, 1.1) + draws.normal(0, 0.1, (side, side, 1))
            pixels = np.clip(light * np.array(COLOURS[name]), 0, 255).astype(np.uint8)
            (folder / name / f"{number}.png").write_bytes(encoded(pixels, "PNG"))
    return folder


def settle(root: Path, age: float = 10.0) -> Path:
    """Set modification times back, as if the folder had not changed for a while."""
    then = time.time() - age
    for folder, _, _ in os.walk(root):
        os.utime(folder, (then, then))
    return root
