"""Classes dropped, or joined into one, from what is kept alone. The weights of the network stay as they are."""

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
from engram.methods.replay import apart_in, in_their_places
from engram.network import extract

Kind = TypeVar("Kind", FeatureMemory, ImageMemory)


def forget(learner: Learner, *labels: int) -> None:
    """Drop classes: their features, their images, their rows of the head and of the classifier."""
    class_indices = {_column(learner, label) for label in labels}
    if len(learner.classes_) == len(class_indices):
        raise UsageError("No class would be left. Remove the model instead.")
    _regroup(learner, [[other] for other in range(len(learner.classes_)) if other not in class_indices])


def merge(learner: Learner, label: int, into: int) -> None:
    """Join a class into another, which answers for both from then on.

    Of what was kept of the two, as much stays as the larger had, herded anew. A classifier of features learns the two
    as one; a head, or a mean of kept images, has only the middle between them, so what is joined should be alike.
    """
    gone, class_index = _column(learner, label), _column(learner, into)
    if gone == class_index:
        raise UsageError("A class cannot be joined into itself.")
    others = (other for other in range(len(learner.classes_)) if other != gone)
    _regroup(learner, [[other, gone] if other == class_index else [other] for other in others])


def _column(learner: Learner, label: int) -> int:
    if label not in learner.classes_:
        raise UsageError(f"This learner does not know the class {label}.")
    return learner.classes_.index(label)


def _regroup(learner: Learner, groups: Sequence[Sequence[int]]) -> None:
    """Make one class of each group of columns; those that are in no group are gone. All is assigned at the end."""
    network = copy.deepcopy(learner.trained)
    network.head.regroup(groups)
    network.requires_grad_(False)
    features, images = learner.memory.features, learner.memory.images
    seen = images.rows.new_empty(0, network.dimension, dtype=torch.float32)
    if len(images) and any(len(group) > 1 for group in groups):  # only those that are joined are herded
        seen = F.normalize(extract(network, Samples.of(images.rows, images.class_indices)))
    none = torch.zeros(len(features), dtype=torch.bool)
    apart = apart_in(images.counts) if learner.objective.holds_out else torch.zeros(len(images), dtype=torch.bool)
    memory = Memory(_regrouped(features, features.rows, none, groups), _regrouped(images, seen, apart, groups))
    classifier = learner.refit(network, memory)
    learner.classes_ = tuple(learner.classes_[group[0]] for group in groups)
    learner.task_of_class_ = tuple(learner.task_of_class_[group[0]] for group in groups)
    learner.network_, learner.memory_, learner.classifier_ = network, memory, classifier


def _regrouped(memory: Kind, vectors: Tensor, apart: Tensor, groups: Sequence[Sequence[int]]) -> Kind:
    """The rows of each group together, those of a larger one herded by their `vectors`.

    Rows that are kept `apart` from training (bool, (n,)) stay apart.
    """
    if not len(memory.counts):
        return memory
    slots = torch.arange(len(memory)).split(memory.counts.tolist())
    chosen = []
    for group in groups:
        rows = torch.cat([slots[class_index] for class_index in group])
        if len(group) > 1 and len(rows):
            most = max(len(slots[class_index]) for class_index in group)
            trained, held = (part[herd(vectors[part], most)] for part in (rows[~apart[rows]], rows[apart[rows]]))
            rows = in_their_places(trained, held, most) if bool(apart.any()) else trained
        chosen.append(rows)
    return memory.take(torch.cat(chosen), torch.tensor([len(rows) for rows in chosen]))
