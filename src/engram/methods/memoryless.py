"""Methods that keep nothing: what they know is in the network alone, and its head answers."""

from __future__ import annotations

from dataclasses import dataclass

from engram.data import Task
from engram.methods.learner import NOTHING, Learner, MemorySources
from engram.network import Network
from engram.progress import SILENT, Progress


@dataclass(kw_only=True)
class Memoryless(Learner):
    """Fine-tuning, LwF (Li & Hoiem; multi-class form of Rebuffi et al.), γ-LwF: objective and head tell them apart."""

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        self.commit(task, network, self.memory_, None)
        return MemorySources(NOTHING, NOTHING)
