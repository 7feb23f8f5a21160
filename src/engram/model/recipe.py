"""What is sensible for pictures of one's own, where nothing else is asked for."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from engram.data.images import UnreadableImage, extent
from engram.data.pictures import Found
from engram.errors import DataError
from engram.network import extractor_for_weights

LOOKED_AT = 100  # pictures, spread over all that were found
LARGEST_FROM_NOTHING = 96  # pixels a side: more shows little to a network that learns from a few hundred pictures
LARGEST = 224  # what published weights were trained with

BATCH = 32
STEPS = 1_500  # of training, each time: a few minutes of two cores, at any number of pictures
FEWEST_EPOCHS, MOST_EPOCHS = 5, 60

SETTINGS: dict[str, Any] = {
    **{"batch_size": BATCH, "schedule": "one-cycle", "rate": 2.0, "expected_classes": 100},
    **{"pad": 4, "flip": True},
    **{"adapter_width": 1024},
}


def choose_size(found: Found, weights: Path | None) -> int:
    """A side for the squares that pictures become: the smaller side that half of them have, within limits."""
    step = max(1, len(found.paths) // LOOKED_AT)
    sides = []
    for path in found.paths[::step]:
        try:
            sides.append(min(extent(path)))
        except UnreadableImage:
            continue
    if not sides:
        raise DataError(f"None of the pictures that were looked at can be read, such as {found.paths[0]}.")
    return min(int(statistics.median_low(sides)), LARGEST if weights is not None else LARGEST_FROM_NOTHING)


def choose_epochs(samples: int) -> int:
    """How often so many samples are gone through."""
    return max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(STEPS * BATCH / samples)))


def choose_network(weights: Path | None) -> str:
    """The network that weights are of; without any, it goes by the size of the images."""
    return "auto" if weights is None else extractor_for_weights(weights)
