"""All that `features` does after a task's training, against that training; preset `short` of CIFAR-100."""

from __future__ import annotations

import resource
import time

from side_by_side import Outcome, cifar100, show, two_tasks

from engram.experiments.running import preset
from engram.methods import make

EPOCHS = 1  # trained and counted ten times: the preset's ten are alike


def main() -> None:
    first, second = two_tasks()
    settings = preset("short", "features", cifar100())
    learner = make("features", **{**settings, "network": "resnet32", "epochs": EPOCHS})
    learner.learn(first)
    start = time.perf_counter()
    network = learner.train(second)
    trained = time.perf_counter() - start
    learner.absorb(second, network)
    after = time.perf_counter() - start - trained
    whole = trained * settings["epochs"] / EPOCHS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    show(
        Outcome(
            "extract, adapt, herd and classify, second task",
            "the task's training",
            after / whole,
            0.15,
            at_least=False,
            unit="%",
            detail=f"{after:.1f} s after {whole:.0f} s of training ({EPOCHS} of {settings['epochs']} epochs were run).",
        ),
        Outcome(
            "peak resident memory of these two tasks",
            "a size of its own",
            peak,
            1.5,
            at_least=False,
            unit="GB",
            detail="All of CIFAR-100 is resident.",
        ),
    )


if __name__ == "__main__":
    main()
