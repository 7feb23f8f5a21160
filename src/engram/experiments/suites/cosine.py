"""A cosine head or a plain one, on LwF."""

from __future__ import annotations

from engram.experiments.suites.suite import Suite, Variant

SUITE = Suite(
    summary="cosine head or plain, on lwf (validation)",
    finding="The cosine head is better: 48.7 against 45.2 on CIFAR-100's validation split.",
    variants=lambda facts: [
        Variant(label=f"{head} head", method="lwf", settings={"head": head}, series="lwf")
        for head in ("cosine", "linear")
    ],
    validation=0.1,
)
