"""Defaults of `learn` for image files, where nothing else is requested."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engram.data.images import UnreadableImage, extent
from engram.data.labelled import LabelledFiles
from engram.methods import setting_names
from engram.network import DEFAULT_PRETRAINED, extractor_for_weights
from engram.network.registry import IDENTITY, SMALL_SIDE

METHOD = "engram"
EXAMINED = 100  # images whose size is read, spread over all that were found
# Largest image side for a network trained from scratch, by the number of images: 84-pixel photos of twelve classes were
# classified no better at 64 or 84 pixels than at 32, in three times the time.
MAX_SIDE_FROM_SCRATCH = {2_000: 32, 20_000: 64}
MAX_SIDE_OF_MANY = 96
SMALLEST_SIDE, LARGEST_SIDE = 8, 1024  # smaller ones show a network nothing; larger ones take too long on a CPU
TRAINED_AT = {"resnet18": 224, "resnet18-small": 64, "resnet32": 32, "small": 16}  # image side that weights are for

BATCH = 32
STEPS = 1_000  # of training in each update, within these limits:
FEWEST_EPOCHS, MOST_EPOCHS = 10, 40

# A network that starts from random weights needs a high learning rate, later updates a lower one: twelve classes of
# photos in three updates ended at an accuracy of .40 instead of .35.
FIRST_RATE, LATER_RATE = 2.0, 0.5
# The same for objectives that are not divided by the number of classes. They preserve features by themselves: a lower
# rate in later updates costs three points (three updates of four CIFAR-100 classes, 80 images each).
UNDIVIDED_RATE, UNDIVIDED_RATE_FROM_WEIGHTS = 0.1, 0.025

IMAGES: dict[str, Any] = {
    **{"batch_size": BATCH, "schedule": "one-cycle", "expected_classes": 100},
    **{"pad": 4, "flip": True},
    **{"adapter_width": 1024},
}
# A pretrained network has strong features, so cross-validation on them chooses the classifier, and large images, so
# random crops may be shifted further.
PRETRAINED: dict[str, Any] = {"classifier": "auto", "shrinkage": 0.2, "pad": 16}


def image_settings(
    method: str, objective: str | None, *, from_scratch: bool, pretrained: bool = False
) -> dict[str, Any]:
    """Default settings of a method for images; `pretrained`: for a network of the catalogue with weights."""
    known = setting_names(method, objective)
    if "expected_classes" in known:  # the loss is divided by their number
        learning_rate = FIRST_RATE if from_scratch else LATER_RATE
    else:
        learning_rate = UNDIVIDED_RATE if from_scratch else UNDIVIDED_RATE_FROM_WEIGHTS
    settings = {**IMAGES, "learning_rate": learning_rate, **(PRETRAINED if pretrained else {})}
    if "features_per_class" not in known:  # cross-validation needs stored features
        settings.pop("classifier", None)
    return {name: value for name, value in settings.items() if name in known}


def choose_size(found: LabelledFiles, weights: Path | None) -> int:
    """The image side for these files: the median of their smaller sides, within limits."""
    sides = []
    for path in found.paths[:: max(1, len(found.paths) // EXAMINED)]:
        try:
            sides.append(min(extent(path)))
        except UnreadableImage:
            continue
    return choose_side(sides, len(found.paths), weights)


def choose_side(sides: Sequence[int], images: int, weights: Path | None = None) -> int:
    """The image side for so many images, given the smaller sides of some of them."""
    if weights is not None:
        largest = TRAINED_AT[extractor_for_weights(weights)]
    else:
        largest = next((side for most, side in MAX_SIDE_FROM_SCRATCH.items() if images <= most), MAX_SIDE_OF_MANY)
    # If none of them can be read, reading all of them will say why.
    return max(SMALLEST_SIDE, min(statistics.median_low(sides or [largest]), largest))


def choose_epochs(samples: int) -> int:
    """The number of epochs for so many samples."""
    return max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(STEPS * BATCH / samples)))


def choose_network(shape: tuple[int, ...]) -> str:
    """The network of a new model for inputs of this shape, (h, w, c) or (d,): pretrained, unless images are tiny."""
    if len(shape) == 1:
        return IDENTITY
    return DEFAULT_PRETRAINED if min(shape[:2]) >= SMALL_SIDE else "auto"
