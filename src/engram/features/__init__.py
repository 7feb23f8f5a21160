"""Stored features: memories, codecs and adapters, and the classifiers that are fitted to them."""

from engram.features.adapters import (
    ADAPTERS,
    Adapter,
    AutoAdapter,
    IdentityAdapter,
    MLPAdapter,
    Pairs,
    RidgeAdapter,
    adapt,
)
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
from engram.features.codecs import CODECS, AutoCodec, Codec, Encoded, Float16, Float32, Int8, ProductQuantisation
from engram.features.herding import herd
from engram.features.memory import (
    MEGABYTE,
    FeatureMemory,
    ImageMemory,
    Memory,
    select,
    warn_of_small_classes,
)

__all__ = [
    "ADAPTERS",
    "CLASSIFIERS",
    "CODECS",
    "LDA",
    "MEGABYTE",
    "Adapter",
    "Auto",
    "AutoAdapter",
    "AutoCodec",
    "Classifier",
    "Codec",
    "Encoded",
    "FeatureMemory",
    "Float16",
    "Float32",
    "IdentityAdapter",
    "ImageMemory",
    "Int8",
    "LinearSVM",
    "MLPAdapter",
    "Memory",
    "NearestMean",
    "Pairs",
    "ProductQuantisation",
    "RandomProjection",
    "Ridge",
    "RidgeAdapter",
    "Softmax",
    "adapt",
    "herd",
    "select",
    "warn_of_small_classes",
]
