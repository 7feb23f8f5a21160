"""Classes removed or merged, from the memory alone. The extractor does not change."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples
from engram.errors import UsageError
from engram.features import FeatureMemory, ImageMemory, Memory, herd
from engram.methods.learner import Learner
from engram.methods.replay import held_out_rows, merge_parts
from engram.network import extract

Kind = TypeVar("Kind", FeatureMemory, ImageMemory)


def forget(learner: Learner, *labels: int) -> None:
    """Remove classes: their features, their images, their rows of the head and of the classifier."""
    removed = {_class_index(learner, label) for label in labels}
    if len(learner.classes_) == len(removed):
        raise UsageError("No class would be left. Remove the model instead.")
    _regroup(learner, [[other] for other in range(len(learner.classes_)) if other not in removed])


def merge(learner: Learner, label: int, into: int) -> None:
    """Merge a class into another one.

    Features and exemplars of both are herded again, up to the limit for one class, and a classifier of stored features
    is refitted. Rows of a head, and means of exemplars, become the mean of the two, so the two should look alike.
    """
    gone, class_index = _class_index(learner, label), _class_index(learner, into)
    if gone == class_index:
        raise UsageError("A class cannot be joined into itself.")
    others = (other for other in range(len(learner.classes_)) if other != gone)
    _regroup(learner, [[other, gone] if other == class_index else [other] for other in others])


def _class_index(learner: Learner, label: int) -> int:
    if label not in learner.classes_:
        raise UsageError(f"This learner does not know the class {label}.")
    return learner.classes_.index(label)


def _regroup(learner: Learner, groups: Sequence[Sequence[int]]) -> None:
    """Make one class of each group of class indices, and remove those in no group. The state is replaced at the end."""
    network = copy.deepcopy(learner.trained)
    network.head.regroup(groups)
    network.requires_grad_(False)
    features, images = learner.memory.features, learner.memory.images
    vectors = torch.empty(0, network.dimension)
    if len(images) and any(len(group) > 1 for group in groups):  # only merged classes are herded
        vectors = F.normalize(extract(network, Samples.of(images.rows, images.class_indices)))
    none = torch.zeros(len(features), dtype=torch.bool)
    held_out = held_out_rows(images.counts) & learner.objective.holds_out
    features = _regrouped(features, features.rows, none, groups, learner.features_limit(len(groups)))
    if sum(map(len, groups)) < len(learner.classes_):  # a codebook was computed from the forgotten features too
        features = features.refitted()
    memory = Memory(
        features,
        _regrouped(images, vectors, held_out, groups, learner.images_limit(len(groups))),
        learner.memory.statistics.regrouped(groups),
        learner.memory.carried_bytes,
    )
    classifier = learner.refit(network, memory, groups)
    learner.classes_ = tuple(learner.classes_[group[0]] for group in groups)
    learner.task_of_class_ = tuple(learner.task_of_class_[group[0]] for group in groups)
    learner.network_, learner.memory_, learner.classifier_ = network, memory, classifier


def _regrouped(memory: Kind, vectors: Tensor, held_out: Tensor, groups: Sequence[Sequence[int]], limit: int) -> Kind:
    """The rows of each group, `limit` of a merged one, herded by `vectors`; `held_out` rows (bool, (n,)) stay so."""
    if not len(memory.counts):
        return memory
    rows_of = torch.arange(len(memory)).split(memory.counts.tolist())
    chosen = []
    for group in groups:
        rows = torch.cat([rows_of[class_index] for class_index in group])
        if len(group) > 1 and len(rows):
            most = min(len(rows), max(limit, *(len(rows_of[class_index]) for class_index in group)))
            parts = (rows[~held_out[rows]], rows[held_out[rows]])
            trained, validation = (part[herd(vectors[part], most)] for part in parts)
            rows = merge_parts(trained, validation, most) if bool(held_out.any()) else trained
        chosen.append(rows)
    return memory.take(torch.cat(chosen), torch.tensor([len(rows) for rows in chosen]))
