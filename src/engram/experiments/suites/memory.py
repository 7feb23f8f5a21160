"""Accuracy against the bytes that are kept, in features, in images and in both."""

from __future__ import annotations

from collections.abc import Iterable

from engram.experiments.suites.suite import Facts, Suite, Variant


def _variants(facts: Facts) -> Iterable[Variant]:
    beside = facts.scaled(100)[0]  # the hybrid's features, fixed
    for size in facts.task_sizes():
        for count in facts.scaled(50, 100, 250, 500):
            settings = {"features_per_class": count}
            yield _variant("features", f"L = {count}", settings, size)
        for count in facts.scaled(5, 10, 20, 50):
            images = {"images_per_class": count}
            yield _variant("gamma-icarl", f"P = {count}", images, size)
            yield _variant("hybrid", f"L = {beside}, P = {count}", {**images, "features_per_class": beside}, size)


def _variant(method: str, what: str, settings: dict[str, int], size: int) -> Variant:
    label = f"{method}, {what}, M = {size}"
    return Variant(label=label, method=method, settings=settings, series=f"{method}, M = {size}", classes_per_task=size)


SUITE = Suite(
    summary="accuracy against MB kept: features, images, or both",
    finding="At equal memory features are ahead of images where images are large, and the hybrid is ahead of images.",
    variants=_variants,
)
