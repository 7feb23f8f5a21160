"""Twenty tasks: time and memory of each must not grow with the tasks before it, but for the classifier's own growth."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from side_by_side import Outcome, cifar100, show

import engram
from engram.methods import make

IMAGES = 40  # of each class: growth shows as well in small


def resident() -> float:
    """GB of memory in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def main() -> None:
    stream = engram.split(cifar100(), classes_per_task=5)
    learner = make(
        "features", network="resnet32", epochs=2, learning_rate=0.1, features_per_class=IMAGES, adapter_width=256
    )
    seconds, memory = [], []
    for task in stream.tasks:
        labels = task.train.labels
        few = torch.cat([(labels == label).nonzero().squeeze(1)[:IMAGES] for label in task.classes])
        small = replace(task, train=task.train.select(few))
        start = time.perf_counter()
        learner.learn(small)
        seconds.append(time.perf_counter() - start)
        memory.append(resident())
    early, late = statistics.median(seconds[1:6]), statistics.median(seconds[-5:])
    kept = learner.memory.nbytes / 2**20
    show(
        Outcome(
            "time of a task, tasks 16–20",
            "tasks 2–6 of the same run",
            late / early,
            1.3,
            at_least=False,
            detail=f"{early:.2f} s and {late:.2f} s a task; the classifier grew from 25 classes to 100.",
        ),
        Outcome(
            "resident memory after task 20",
            "after task 5",
            memory[-1] / memory[4],
            1.1,
            at_least=False,
            detail=f"{memory[4]:.2f} GB and {memory[-1]:.2f} GB; {kept:.1f} MB of features are kept at the end.",
        ),
    )


if __name__ == "__main__":
    main()
