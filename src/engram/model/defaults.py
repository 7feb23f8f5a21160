"""What is sensible for pictures of one's own, where nothing else is asked for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engram.data.images import UnreadableImage, extent
from engram.data.labelled import LabelledFiles
from engram.methods import METHODS, setting_names
from engram.network import DEFAULT_PRETRAINED, extractor_for_weights
from engram.network.registry import IDENTITY, SMALL_SIDE

LOOKED_AT = 100  # pictures, spread over all that were found
# Pixels a side, at most, for a network that begins with nothing, by how many pictures it learns from: 84-pixel photos
# of twelve classes were told apart no better at 64 or 84 pixels than at 32, in three times the time.
FROM_NOTHING = {2_000: 32, 20_000: 64}
MANY = 96
SMALLEST_SIDE, LARGEST_SIDE = 8, 1024  # below, networks have nothing to see; above, no CPU ends
TRAINED_AT = {"resnet18": 224, "resnet18-small": 64, "resnet32": 32, "small": 16}  # what weights were made for

BATCH = 32
STEPS = 1_000  # of training, each time, within the limits below
FEWEST_EPOCHS, MOST_EPOCHS = 10, 40

METHOD = "engram"

# A network that begins with nothing must move far. One that knows something, by weights or by an earlier lesson, is
# moved less: of twelve classes of photos in three lessons .40 were told rightly at the end instead of .35.
FIRST_RATE, LATER_RATE = 2.0, 0.5
# The same for objectives that are not divided by the number of classes. They hold features by themselves: in later
# lessons a lower rate costs three points of a hundred (three lessons of four CIFAR-100 classes, 80 images of each).
UNDIVIDED_RATE, UNDIVIDED_RATE_FROM_WEIGHTS = 0.1, 0.025

PICTURES: dict[str, Any] = {
    **{"batch_size": BATCH, "schedule": "one-cycle", "expected_classes": 100},
    **{"pad": 4, "flip": True},
    **{"adapter_width": 1024},
}

# For a pretrained network: its features are strong, so the classifier is chosen by cross-validation on them, and its
# images are large, so that windows of them may be larger than a few pixels less.
PRETRAINED: dict[str, Any] = {"classifier": "auto", "shrinkage": 0.2, "pad": 16}

# For arrays from Python, of which nothing is known: images are not mirrored, and shifted by nothing.
ARRAYS: dict[str, Any] = {
    **{"batch_size": BATCH, "schedule": "one-cycle", "learning_rate": 0.2, "expected_classes": 10},
    **{"pad": 0, "flip": False},
    **{"adapter_width": 256},
}
# Of vectors there may be few, and hundreds of models be made of them. Their network has no batch norm: at a lower rate,
# and with its features held more tightly, what is stored stays usable (found on digits as vectors, and on blobs).
VECTORS: dict[str, Any] = {**ARRAYS, "learning_rate": 0.03, "feature_distillation": 20.0, "adapter_steps": 120}
UNDIVIDED_VECTOR_RATE = 0.05  # of vectors, for objectives that are not divided by the number of classes
VECTOR_STEPS, FEWEST_VECTOR_EPOCHS, MOST_VECTOR_EPOCHS = 300, 5, 30


def picture_settings(
    method: str, objective: str | None, *, from_scratch: bool, pretrained: bool = False
) -> dict[str, Any]:
    """What is sensible for pictures, of the settings that the method has; `pretrained`: for a network by name."""
    known = setting_names(method, objective)
    if "expected_classes" in known:  # its loss is divided by their number
        learning_rate = FIRST_RATE if from_scratch else LATER_RATE
    else:
        learning_rate = UNDIVIDED_RATE if from_scratch else UNDIVIDED_RATE_FROM_WEIGHTS
    settings = {**PICTURES, "learning_rate": learning_rate, **(PRETRAINED if pretrained else {})}
    return {name: value for name, value in settings.items() if name in known}


def array_settings(method: str, objective: str | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """What is sensible for inputs of this shape; what makes a method itself stays."""
    known, vectors = setting_names(method, objective), len(shape) == 1
    recipe = dict(VECTORS if vectors else ARRAYS)
    if "expected_classes" not in known:
        recipe |= {"learning_rate": UNDIVIDED_VECTOR_RATE if vectors else None}
    fixed = METHODS[method].settings
    return {name: value for name, value in recipe.items() if name in known and name not in fixed and value is not None}


def array_epochs(samples: int, shape: tuple[int, ...]) -> int:
    """How often so many inputs of this shape are gone through."""
    if len(shape) == 3:
        return choose_epochs(samples)
    return max(FEWEST_VECTOR_EPOCHS, min(MOST_VECTOR_EPOCHS, round(VECTOR_STEPS * BATCH / samples)))


def choose_size(found: LabelledFiles, weights: Path | None) -> int:
    """A side for the squares that pictures become: the smaller side that half of them have, within limits."""
    step = max(1, len(found.paths) // LOOKED_AT)
    sides = []
    for path in found.paths[::step]:
        try:
            sides.append(min(extent(path)))
        except UnreadableImage:
            continue
    return choose_side(sides, len(found.paths), weights)


def choose_side(sides: Sequence[int], pictures: int, weights: Path | None = None) -> int:
    """The same of so many pictures, of which some have these smaller sides."""
    if weights is not None:
        largest = TRAINED_AT[extractor_for_weights(weights)]
    else:
        largest = next((side for most, side in FROM_NOTHING.items() if pictures <= most), MANY)
    # Where none of those looked at can be read, the reading of all of them will say why.
    return max(SMALLEST_SIDE, min(statistics.median_low(sides or [largest]), largest))


def choose_epochs(samples: int) -> int:
    """How often so many samples are gone through."""
    return max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(STEPS * BATCH / samples)))


def choose_network(shape: tuple[int, ...]) -> str:
    """The network of a new model for inputs of this shape, (h, w, c) or (d,): pretrained, unless they are tiny."""
    if len(shape) == 1:
        return IDENTITY
    return DEFAULT_PRETRAINED if min(shape[:2]) >= SMALL_SIDE else "auto"
