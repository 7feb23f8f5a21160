"""Fine-tuning: train on the new classes as an ordinary classifier would. The lower bound."""

from __future__ import annotations

from dataclasses import dataclass, field

from engram.data import Task
from engram.methods.learner import NOTHING, Kept, Learner
from engram.methods.objectives import Classification
from engram.network import Network, Snapshots
from engram.progress import SILENT, Progress


@dataclass(kw_only=True)
class Finetune(Learner):
    """Take no measure against forgetting: old classes are wrong answers like any other."""

    objective: Classification = field(default_factory=Classification)

    def train(self, task: Task, progress: Progress = SILENT, snapshots: Snapshots | None = None) -> Network:
        return self.fit(task, task.train, progress, snapshots, start=self.network_)

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> Kept:
        self.take_over(task, network, self.memory_, None)
        return Kept(NOTHING, NOTHING)
