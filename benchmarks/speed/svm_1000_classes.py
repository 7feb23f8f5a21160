"""The linear SVM of ImageNet-1000: 250 features of each of 1,000 classes; minutes, so `make bench` leaves it out."""

from __future__ import annotations

import resource
import time

from side_by_side import Outcome, show
from svm import clustered

from engram.features import LinearSVM


def main() -> None:
    features, labels = clustered(250_000, 512, 1_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    LinearSVM().fit(features, labels)
    minutes = (time.perf_counter() - start) / 60
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    show(
        Outcome(
            "linear SVM, 250,000 × 512, 1,000 classes",
            "a time of its own",
            minutes,
            10,
            at_least=False,
            unit="min",
            detail=f"Peak memory {peak / 2**20:.1f} GB, of which {before / 2**20:.1f} GB were there before.",
        )
    )


if __name__ == "__main__":
    main()
