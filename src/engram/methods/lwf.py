"""Learning without forgetting: keep nothing, but answer for old classes as the previous network did."""

from __future__ import annotations

from dataclasses import dataclass, field

from engram.data import Task
from engram.methods.learner import NOTHING, Kept, Learner
from engram.methods.objectives import Distillation
from engram.network import Network, Snapshots
from engram.progress import SILENT, Progress


@dataclass(kw_only=True)
class LwF(Learner):
    """Distil the previous network (Li & Hoiem; multi-class form of Rebuffi et al.); with γ and a cosine head, γ-LwF."""

    objective: Distillation = field(default_factory=Distillation)

    def train(self, task: Task, progress: Progress = SILENT, snapshots: Snapshots | None = None) -> Network:
        return self.fit(task, task.train, progress, snapshots, start=self.network_)

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> Kept:
        self.take_over(task, network, self.memory_, None)
        return Kept(NOTHING, NOTHING)
