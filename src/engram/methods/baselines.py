"""Methods that choose nothing to store: fine-tuning and LwF store nothing, joint training every image."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from engram.data import Task
from engram.features import Memory
from engram.methods.learner import Learner, MemorySources, Work
from engram.methods.objectives import Classification, Objective
from engram.network import EpochCheckpoints, Network
from engram.progress import SILENT, Progress


@dataclass(kw_only=True)
class Memoryless(Learner):
    """Fine-tuning, LwF (Li & Hoiem; multi-class form of Rebuffi et al.) and γ-LwF differ in objective and head."""

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        self.commit(task, network, self.memory_, None)
        return MemorySources()


@dataclass(kw_only=True)
class Joint(Learner):
    """Train a new network on all images seen so far, after every task: the upper bound."""

    shares_training: ClassVar[bool] = False
    starts_over: ClassVar[bool] = True

    objective: Objective = field(default_factory=Classification)

    def train(self, task: Task, progress: Progress = SILENT, checkpoints: EpochCheckpoints | None = None) -> Network:
        return self.fit(task, progress, checkpoints, start=None, tunes=self.tuning(task, progress).tunes)

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        images = self.memory_.images
        class_indices = torch.cat([images.class_indices, self.class_indices(task, task.train.labels)])
        order = class_indices.argsort(stable=True)  # by class, and within one in the order of arrival
        sources = torch.cat([-1 - torch.arange(len(images)), torch.arange(len(task.train))])[order]
        counts = torch.bincount(class_indices, minlength=len(self.classes_with(task)))
        stored = images.rearranged(task.train.batch(torch.arange(len(task.train))), sources, counts)
        self.commit(task, network, Memory(self.memory_.features, stored), None)
        return MemorySources(images=sources)

    def images_limit(self, classes: int) -> int:
        return sys.maxsize

    def work(self, images: int, task: int, *, tunes: bool) -> Work:
        return super().work(images, task, tunes=tunes)._replace(extracted=0)  # no image is chosen by its features
