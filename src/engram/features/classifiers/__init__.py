"""Classifiers on unit features: closed forms (ridge, LDA, nearest mean), a linear SVM, softmax regression, FeCAM."""

from engram.features.classifiers.base import Classifier
from engram.features.classifiers.fecam import FeCAM
from engram.features.classifiers.linear import LDA, Auto, NearestMean, RandomProjection, Ridge
from engram.features.classifiers.softmax import Softmax
from engram.features.classifiers.svm import LinearSVM

CLASSIFIERS: dict[str, type[Classifier]] = {
    "auto": Auto,
    "ridge": Ridge,
    "lda": LDA,
    "nearest-mean": NearestMean,
    "random-projection": RandomProjection,
    "svm": LinearSVM,
    "softmax": Softmax,
    "fecam": FeCAM,
}

__all__ = ["CLASSIFIERS", "LDA", "Auto", "Classifier", "FeCAM", "LinearSVM", "NearestMean", "RandomProjection", "Ridge"]
__all__ += ["Softmax"]
