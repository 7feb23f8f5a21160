"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn: nothing to download, seconds to learn."""

from __future__ import annotations

import numpy as np

from engram.data.holdout import hold_out
from engram.data.samples import Dataset, Samples

BRIGHTEST = 16  # scikit-learn's pixels count the inked cells of a 4 x 4 block


def load() -> Dataset:
    """Images (n, 8, 8, 1) of ten classes; a fixed fifth of each is for testing."""
    from sklearn.datasets import load_digits  # takes a second to import, which only those who want digits should wait

    digits = load_digits()
    images = np.rint(digits.images * (255 / BRIGHTEST)).astype(np.uint8)
    train, test = hold_out(Samples.of(images, digits.target), share=0.2, seed=0, purpose="test")
    return Dataset("digits", train, test, tuple(str(digit) for digit in range(10)))
