"""The frontier: the best accuracy that so many bytes can buy, by every method that keeps something, and every codec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engram.experiments.suites.suite import Facts, Suite, Variant

IMAGES = (1 / 3, 1, 10 / 3, 10, 20, 65)  # budgets of a class, in images: of 100 classes of CIFAR-100, 0.1 to 19 MB

ROWS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("icarl", {}),
    ("eeil", {}),
    ("lucir", {}),
    ("bic", {}),
    ("gamma-icarl", {}),
    ("hybrid", {}),
    ("features", {}),
    ("engram", {}),
    ("engram", {"codec": "float32"}),
    ("engram", {"codec": "int8"}),
    ("engram", {"codec": "pq"}),
)


def _variants(facts: Facts) -> Iterable[Variant]:
    for method, settings in ROWS:
        series = ", ".join((method, *map(str, settings.values())))
        for share in IMAGES:
            budget = round(share * facts.sample_bytes)
            yield Variant(
                label=f"{series}, {budget:,} bytes a class",
                method=method,
                settings=settings,
                series=series,
                budget=budget,
            )


SUITE = Suite(
    summary="accuracy against bytes: every method that keeps something, and every codec (ours)",
    finding="At equal memory float32 features are ahead of images where images are large.",
    variants=_variants,
)
