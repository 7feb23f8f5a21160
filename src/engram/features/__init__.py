"""Stored features: herding, memory, codecs, adapters and classifiers, on plain tensors.

Two of four classes are stored, 20 vectors of each in a byte per number. Then the network changes, here by a rotation.
The stored vectors are adapted by pairs of the other two classes, which join the memory, and a classifier is fitted:

>>> import torch
>>> from torch.nn.functional import normalize
>>> random = torch.Generator().manual_seed(0)
>>> labels, centres = torch.arange(400) % 4, torch.randn(4, 16, generator=random)
>>> before = centres[labels] + 0.5 * torch.randn(400, 16, generator=random)
>>> after = before @ torch.linalg.qr(torch.randn(16, 16, generator=random))[0]
>>> old, new = labels < 2, labels >= 2

>>> sources, counts = select(FeatureMemory.empty(16), before[old], labels[old], per_class=20)
>>> memory = FeatureMemory.empty(16).rearranged(normalize(before[old]), sources, counts, CODECS["int8"]())
>>> adapter = ADAPTERS["ridge"]().fit(Pairs(before[new], after[new], labels[new]))
>>> memory = memory.adapted(adapter)
>>> sources, counts = select(memory, after[new], labels[new], per_class=20)
>>> memory = memory.rearranged(normalize(after[new]), sources, counts, CODECS["int8"]())
>>> classifier = CLASSIFIERS["svm"]().fit(memory.rows, memory.class_indices)

>>> memory.codec, len(memory), memory.nbytes
('int8', 80, 1408)
>>> (classifier.scores(normalize(after)).argmax(1) == labels).float().mean().item()
1.0
"""

from engram.features.adapters import ADAPTERS, Adapter, AutoAdapter, IdentityAdapter, MLPAdapter, Pairs, RidgeAdapter
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
from engram.features.drift import COMPENSATIONS, Compensation, Drift
from engram.features.memory import (
    MEGABYTE,
    Covariance,
    FeatureMemory,
    ImageMemory,
    Memory,
    Statistics,
    adapt,
    herd,
    select,
    statistics_bytes,
    warn_of_small_classes,
)

__all__ = ["ADAPTERS", "CLASSIFIERS", "CODECS", "COMPENSATIONS", "LDA", "MEGABYTE", "Adapter", "Auto", "AutoAdapter"]
__all__ += ["AutoCodec", "Classifier", "Codec", "Compensation", "Covariance", "Drift", "Encoded", "FeatureMemory"]
__all__ += ["Float16", "Float32", "IdentityAdapter", "ImageMemory", "Int8", "LinearSVM", "MLPAdapter", "Memory"]
__all__ += ["NearestMean", "Pairs", "ProductQuantisation", "RandomProjection", "Ridge", "RidgeAdapter", "Softmax"]
__all__ += ["Statistics", "adapt", "herd", "select", "statistics_bytes", "warn_of_small_classes"]
