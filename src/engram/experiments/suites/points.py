"""Accuracy against the number of data points kept: a feature counts as much as an image."""

from __future__ import annotations

from collections.abc import Iterable

from engram.experiments.suites.suite import Facts, Suite, Variant


def _variants(facts: Facts) -> Iterable[Variant]:
    for size in facts.task_sizes():
        for count in facts.scaled(10, 20, 50, 100, 250):
            for method, setting in (("features", "features_per_class"), ("gamma-icarl", "images_per_class")):
                yield Variant(
                    label=f"{method}, {count} a class, M = {size}",
                    method=method,
                    settings={setting: count},
                    series=f"{method}, M = {size}",
                    value=count,
                    classes_per_task=size,
                )


SUITE = Suite(
    summary="accuracy against data points kept, L features or P images",
    finding="Features are ahead of images mostly even at equal numbers, whatever each costs.",
    variants=_variants,
    varies="data points kept per class",
)
