"""What each part of our method is worth: with one of them as in the paper's, or otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engram.experiments.suites.suite import Facts, Suite, Variant

CHANGED: Mapping[str, Mapping[str, Any]] = {
    "engram": {},
    "the paper's training": {"objective": "distillation"},
    "a network that is never held": {"weight_averaging": 0.0},  # shows from the sixth task on
    "an adapter of 720 steps": {"adapter_steps": 720},  # as features
    "a support vector machine": {"classifier": "svm", "C": 10.0},  # its best C on validation
    "a linear discriminant": {"classifier": "lda"},
    "always a linear adapter": {"adapter": "ridge"},
    "always an MLP": {"adapter": "mlp"},
    "float32": {"codec": "float32"},
    "product quantisation, 1/16": {"codec": "pq"},
}


def _variants(facts: Facts) -> Iterable[Variant]:
    kept = {"features_per_class": facts.features_per_class}
    for label, settings in CHANGED.items():
        yield Variant(label=label, method="engram", settings={**kept, **settings}, series=label)
    yield Variant(label="features, the paper's", method="features", settings=kept, series="features")


SUITE = Suite(
    summary="what each part of our method is worth (ours, validation)",
    variants=_variants,
    validation=0.1,
)
