"""Where the drift gap lies: in the class means, or in the spread around them?

    ENGRAM_DATA=… python benchmarks/drift.py RUN [--validation 0.1]  (the folder of a finished run; some minutes)

After the last task, the stored and adapted features are compared with the true features: those that the current
network computes from the same images, which no learner has. The run's classifier is fitted to each of

carried          the stored features
true means       the stored features, each class shifted so that its mean is the true one
true spread      the true features, each class shifted so that its mean is that of the stored ones
true             the true features: the ceiling

and the accuracies are compared. The result: benchmarks/results/drift.json, with an entry for each run by its name.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import engram
from engram.data import Samples, concatenate
from engram.experiments.folder import RunFolder
from engram.experiments.running import Plan
from engram.methods import Learner
from engram.methods.learner import class_indices_of
from engram.storage import read_json, write_json

RESULT = Path(__file__).parent / "results" / "drift.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--validation", type=float, default=0.0, help="the run's value")
    options = parser.parse_args()
    request, checkpoint = read_json(options.run / "run.json"), RunFolder(options.run).load()
    if checkpoint is None:
        raise SystemExit(f"{options.run} holds no finished task.")
    data, tasks = engram.load(request["dataset"]), len(checkpoint["measurements"])
    settings = {name: value for name, value in request["settings"].items() if name != "seed"}
    plan = Plan(
        method=request["method"],
        seed=request["settings"]["seed"],
        validation=options.validation,
        tasks=tasks,
        settings=settings,
    )
    stream, learner = plan.stream(data), plan.learner(data)
    if stream.fingerprints() != request["tasks"][:tasks]:
        raise SystemExit(f"{options.run} has other tasks. Was it run with --validation?")
    learner.restore(checkpoint["learner"])
    images = concatenate(*(task.train.select(rows_of(checkpoint["origins"], task.index)) for task in stream.tasks))
    found = measure(learner, images, concatenate(*(task.test for task in stream.tasks)))
    known = read_json(RESULT) if RESULT.exists() else {}
    write_json(RESULT, {**known, options.run.name: {"method": request["method"], "tasks": tasks, **found}})
    for name, value in found.items():
        print(name, value)


def rows_of(origins: Tensor, task: int) -> Tensor:
    """Positions in a task's training samples of its stored features, in the order of the memory."""
    return origins[origins[:, 0] == task, 1]


def measure(learner: Learner, images: Samples, test: Samples) -> dict[str, Any]:
    memory = learner.memory.features
    carried, class_indices = F.normalize(memory.rows), memory.class_indices
    if not torch.equal(class_indices_of(images.labels, learner.classes_), class_indices):
        raise SystemExit("The rows of the memory are not in the order of the tasks.")
    true, tested = F.normalize(learner.extract(images)), F.normalize(learner.extract(test))
    answers, task_of_class = class_indices_of(test.labels, learner.classes_), torch.tensor(learner.task_of_class_)
    means, true_means = means_of(carried, class_indices), means_of(true, class_indices)
    errors, between = true_means - means, true_means - true_means.mean(0)

    def right(vectors: Tensor) -> dict[str, Any]:
        classifier = learner.make_classifier().fit(F.normalize(vectors), class_indices)  # type: ignore[attr-defined]
        correct = (classifier.scores(tested).argmax(1) == answers).float()
        tasks = task_of_class[answers]
        by_task = [round(correct[tasks == task].mean().item(), 3) for task in tasks.unique()]
        return {"accuracy": round(correct.mean().item(), 4), "by_task": by_task}

    squares = errors.square().sum(1) / between.square().sum(1).mean()
    by_task = [squares[task_of_class == task].mean().item() for task in task_of_class.unique()]
    return {
        "carried": right(carried),
        "true means": right(carried + errors[class_indices]),
        "true spread": right(true - errors[class_indices]),
        "true": right(true),
        # Mean squared error of a task's class means, relative to the variance between the true means.
        "errors of means by task": [round(error, 4) for error in by_task],
    }


def means_of(vectors: Tensor, class_indices: Tensor) -> Tensor:
    """The mean (K, d) of each class."""
    return torch.stack([vectors[class_indices == class_index].mean(0) for class_index in class_indices.unique()])


if __name__ == "__main__":
    main()
