"""Which settings tell one run, or one training, from another over the versions of engram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram import storage
from engram.errors import DataError
from engram.methods import Learner
from engram.text import printable

# Settings that came later, and the value of each that does what was done before: earlier runs are found and go on.
LATER: Mapping[str, Any] = {
    "codec": "float32",
    "codec_bytes": None,
    "crop": None,
    "crop_area": None,
    "crop_ratio": (3 / 4, 4 / 3),
    "weight_averaging": 0.0,
    "weight_averaging_from": 0.0,
    "precision": "float32",
    "shrinkage": 0.05,
    "tune": "auto",
    "tuned_weights": "auto",
    "unlabelled": None,
}


def identifying(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that came later and change nothing."""
    return {name: value for name, value in settings.items() if name not in LATER or _plain(value) != LATER[name]}


def content_of_weights(learner: Learner) -> dict[str, str]:
    """What tells the file that a learner starts from, if it does, from another under the same name."""
    if learner.weights is None:
        return {}
    try:
        return {"weights": storage.checksum(Path(learner.weights))}
    except OSError as error:
        raise DataError(f"The weights {printable(learner.weights)} cannot be read: {error.strerror}.") from error


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # as JSON gives it back
