"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn: nothing to download, seconds to learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from engram.data.samples import Dataset, Samples, hold_out

BRIGHTEST = 16  # scikit-learn's pixels count the inked cells of a 4 x 4 block
FILE = Path("datasets", "data", "digits.csv.gz")  # within scikit-learn; a row: 64 pixels and the digit


def load() -> Dataset:
    """Images (n, 8, 8, 1) of ten classes; a fixed fifth of each is for testing."""
    rows = _rows()
    images = np.rint(rows[:, :64].reshape(-1, 8, 8) * (255 / BRIGHTEST)).astype(np.uint8)
    train, test = hold_out(Samples.of(images, rows[:, 64].astype(np.int64)), share=0.2, seed=0, purpose="test")
    return Dataset("digits", train, test, tuple(str(digit) for digit in range(10)), published=True)


def _rows() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Pixels and digits (1797, 65): the file itself, since to import scikit-learn takes a second or two."""
    package = find_spec("sklearn")
    places = package.submodule_search_locations if package is not None else None
    for place in places or []:
        if (path := Path(place) / FILE).exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # another version of it, which may keep the file elsewhere

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])
