"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn: no download, and seconds to learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from engram.data.samples import Dataset, DecodeOptions, Samples, Source, hold_out
from engram.progress import Progress

BRIGHTEST = 16  # scikit-learn's pixels count the inked cells of a 4 x 4 block
FILE = Path("datasets", "data", "digits.csv.gz")  # within scikit-learn; a row: 64 pixels and the digit


def load(root: Path | None = None, options: DecodeOptions | None = None, progress: Progress | None = None) -> Dataset:
    """Images (n, 8, 8, 1) of ten classes; a fixed fifth of each is the test split."""
    rows = _rows()
    images = np.rint(rows[:, :64].reshape(-1, 8, 8) * (255 / BRIGHTEST)).astype(np.uint8)
    train, test = hold_out(Samples.of(images, rows[:, 64].astype(np.int64)), share=0.2, seed=0, purpose="test")
    return Dataset("digits", train, test, tuple(str(digit) for digit in range(10)), published=True)


def _rows() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Pixels and digits (1797, 65), from the file itself: importing scikit-learn takes a second or two."""
    package = find_spec("sklearn")
    for place in (package and package.submodule_search_locations) or []:
        if (path := Path(place) / FILE).exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # another version, which may store the file elsewhere

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


SOURCE = Source(
    summary="1,797 handwritten digits of 8 x 8 pixels, 10 classes; comes with scikit-learn",
    load=load,
    location="installed",
    classes_per_task=2,
    settings={"pad": 1, "flip": False},  # a mirrored digit is another symbol, or none
    # Chosen on the validation split. A task has 290 images, so the adapter is narrower than 16 d. The learning rate is
    # for objectives that are divided by the number of classes; the others have their own.
    short={
        "all": {
            **{"epochs": 20, "batch_size": 32, "schedule": "one-cycle", "learning_rate": 0.2},
            **{"features_per_class": 100, "images_per_class": 10},
            **{"adapter_width": 256, "adapter_steps": 400, "adapter_batch": 32},
        },
        "lucir": {"learning_rate": 0.05},
    },
    methods={"engram": {"feature_distillation": 5.0, "C": 3.0}},  # chosen on the validation split, as those above
)
