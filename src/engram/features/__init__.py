"""What is kept of the past, carried over into the present, and used."""

from engram.features.adapters import Adaptation, Adapter, MLPAdapter, Pairs, carry_over, fit_ridge, kind_of
from engram.features.classifiers import CLASSIFIERS, Classifier, Discriminant, LinearSVM, NearestMean, Ridge, Softmax
from engram.features.codecs import Codec, Coded, Coding
from engram.features.herding import herd
from engram.features.memory import (
    MEGABYTE,
    FeatureMemory,
    ImageMemory,
    Memory,
    preserved_bytes,
    select,
    warn_of_small_classes,
)

__all__ = [
    "CLASSIFIERS",
    "MEGABYTE",
    "Adaptation",
    "Adapter",
    "Classifier",
    "Codec",
    "Coded",
    "Coding",
    "Discriminant",
    "FeatureMemory",
    "ImageMemory",
    "LinearSVM",
    "MLPAdapter",
    "Memory",
    "NearestMean",
    "Pairs",
    "Ridge",
    "Softmax",
    "carry_over",
    "fit_ridge",
    "herd",
    "kind_of",
    "preserved_bytes",
    "select",
    "warn_of_small_classes",
]
