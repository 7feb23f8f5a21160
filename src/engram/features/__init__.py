"""Stored features: memories, codecs and adapters, and the classifiers that are fitted to them."""

from engram.features.adapters import Adaptation, Adapter, MLPAdapter, Pairs, adapt, fit_ridge, kind_of
from engram.features.classifiers import (
    CLASSIFIERS,
    LDA,
    Auto,
    Classifier,
    LinearSVM,
    NearestMean,
    RandomProjection,
    Ridge,
    Softmax,
)
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
    "LDA",
    "MEGABYTE",
    "Adaptation",
    "Adapter",
    "Auto",
    "Classifier",
    "Codec",
    "Coded",
    "Coding",
    "FeatureMemory",
    "ImageMemory",
    "LinearSVM",
    "MLPAdapter",
    "Memory",
    "NearestMean",
    "Pairs",
    "RandomProjection",
    "Ridge",
    "Softmax",
    "adapt",
    "fit_ridge",
    "herd",
    "kind_of",
    "preserved_bytes",
    "select",
    "warn_of_small_classes",
]
