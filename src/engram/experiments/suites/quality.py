"""How near adapted features are to true ones along the tasks, without images kept and with."""

from __future__ import annotations

from collections.abc import Iterable

from engram.experiments.suites.suite import Facts, Suite, Variant


def _variants(facts: Facts) -> Iterable[Variant]:
    features, images = facts.scaled(500)[0], facts.scaled(50)[0]
    kept = {"features_per_class": features}
    yield Variant(label="P = 0", method="features", settings=kept, series="P = 0")
    settings = {**kept, "images_per_class": images}
    yield Variant(label=f"P = {images}", method="hybrid", settings=settings, series=f"P = {images}")


SUITE = Suite(
    summary="ω along the tasks, without images and with",
    finding="ω of the previous task stays above .9 and rises along the tasks; that of the first falls to about .8 "
    "after ten tasks; both are higher with images.",
    variants=_variants,
)
