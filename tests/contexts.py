"""The training of one task on two networks, for tests of what an objective makes of it."""

from typing import Any

import torch
from torch import Tensor

from engram.data import Samples
from engram.methods import TrainingContext
from engram.network import Network, Training


def context(student: Network, teacher: Network | None, in_task: Tensor, **others: Any) -> TrainingContext:
    """The context of the training; by default it has no samples, and the teacher's classes came with the first task."""
    old = teacher.classes if teacher is not None else 0
    values: dict[str, Any] = {
        "samples": Samples.of(torch.empty(0, 12), torch.empty(0, dtype=torch.int64)),
        "class_indices": torch.empty(0, dtype=torch.int64),
        "exemplars": 0,
        "task_of_class": (torch.arange(len(in_task)) >= old).long(),
        "training": Training(),
        "seed": 0,
        "task": 0,
    }
    return TrainingContext(student=student, teacher=teacher, in_task=in_task, **{**values, **others})
