"""Classifiers of 1,000 classes: 250 features of 1,280 numbers each; minutes, so `make bench` leaves it out.

python benchmarks/speed/classifiers_1000_classes.py [CLASSES] [NAME ...]
"""

from __future__ import annotations

import resource
import sys

from side_by_side import Outcome, clock, show
from svm import clustered

from engram.features import CLASSIFIERS

DIMENSION, PER_CLASS = 1280, 250
NAMES = ("nearest-mean", "ridge", "lda", "auto")


def main() -> None:
    classes = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    features, labels = clustered(PER_CLASS * classes, DIMENSION, classes)
    outcomes = []
    for name in sys.argv[2:] or NAMES:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = clock()
        CLASSIFIERS[name]().fit(features, labels)
        minutes = (clock() - start) / 60
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcomes.append(
            Outcome(
                f"{name}, {len(features):,} × {DIMENSION}, {classes:,} classes",
                "a time of its own",
                minutes,
                10,
                at_least=False,
                unit="min",
                detail=f"Peak memory {peak / 2**20:.1f} GB, of which {before / 2**20:.1f} GB were there before.",
            )
        )
    show(*outcomes)


if __name__ == "__main__":
    main()
