"""Joint training: keep every image and train anew on all of them. The upper bound."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from engram.data import Task
from engram.features import ImageMemory, Memory
from engram.methods.learner import NOTHING, Learner, MemorySources, Work
from engram.methods.objectives import Classification, Objective
from engram.network import EpochCheckpoints, Network
from engram.progress import SILENT, Progress


@dataclass(kw_only=True)
class Joint(Learner):
    """Train a new network on all that was ever seen, after every task."""

    shares_training: ClassVar[bool] = False
    starts_over: ClassVar[bool] = True

    objective: Objective = field(default_factory=Classification)

    def train(self, task: Task, progress: Progress = SILENT, checkpoints: EpochCheckpoints | None = None) -> Network:
        return self.fit(task, progress, checkpoints, start=None, tunes=self.tuning(task, progress).tunes)

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        images = self.memory_.images if self.tasks_ else ImageMemory.empty(task.train.shape)
        class_indices = self.class_indices(task, task.train.labels)
        # Stable sorts group by class and leave the order of arrival within one.
        order = torch.cat([images.class_indices, class_indices]).argsort(stable=True)
        sources = torch.cat([-1 - torch.arange(len(images)), torch.arange(len(class_indices))])[order]
        counts = torch.bincount(
            torch.cat([images.class_indices, class_indices]), minlength=len(self.classes_with(task))
        )
        kept = images.rearranged(task.train.batch(torch.arange(len(task.train))), sources, counts)
        self.commit(task, network, Memory(self.memory_.features, kept), None)
        return MemorySources(NOTHING, sources)

    def images_limit(self, classes: int) -> int:
        return sys.maxsize

    def work(self, images: int, task: int, *, tunes: bool) -> Work:
        return replace(super().work(images, task, tunes=tunes), extracted=0)  # no image is chosen by its features
