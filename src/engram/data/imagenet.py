"""ImageNet (ILSVRC 2012), all of it or the field's hundred classes, as `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engram.data.files import DecodeOptions
from engram.data.folder import load_split
from engram.data.labelling import Defaults, listed
from engram.data.samples import Dataset
from engram.data.tasks import FIELD_SEED
from engram.errors import UsageError
from engram.progress import SILENT, Progress

WHOLE, SUBSET = "imagenet1000", "imagenet100"
CLASSES, CHOSEN = 1000, 100
DEFAULTS = Defaults(256, "stretch")  # iCaRL's code; an image counts 256 × 256 × 3 bytes, Table 1


def load(name: str, root: Path, reading: DecodeOptions, progress: Progress = SILENT) -> Dataset:
    """Images (n, 256, 256, 3) of the classes that a list names, or of all; of `imagenet100`, of the field's hundred.

    The list is the one asked for or, in the folder, the file called like the data set: imagenet100.txt.
    """
    own = root / f"{name}.txt"
    path = reading.class_list or (own if own.is_file() else None)

    def choose(names: list[str]) -> list[str]:
        if path is not None:
            return listed(path, names)
        return field_subset(names) if name == SUBSET else names

    return load_split(name, root, reading, DEFAULTS, choose, progress)


def field_subset(names: list[str]) -> list[str]:
    """The hundred classes that most of the field has used: the first of iCaRL's permutation of the thousand."""
    if len(names) == CHOSEN:  # someone has chosen before
        return names
    if len(names) != CLASSES:
        raise UsageError(
            f"The field's {CHOSEN} classes are drawn from {CLASSES:,}, and there are {len(names):,}. Name those to "
            f"take, one a line, in {SUBSET}.txt in the folder, or with --class-list FILE; or use --dataset {WHOLE}."
        )
    # The legacy generator on purpose: its permutation is what "seed 1993" means in published code.
    return [names[i] for i in sorted(np.random.RandomState(FIELD_SEED).permutation(CLASSES)[:CHOSEN])]
