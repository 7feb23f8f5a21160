"""LwF's second task on CIFAR-100: our loop against a plain PyTorch loop; same network, batches and epochs."""

from __future__ import annotations

import plain_loop
import torch
from side_by_side import Outcome, in_turns, ratio, show, speeds, two_tasks

from engram.methods import make
from engram.network.registry import resnet32

IMAGES = 1280  # of the task's 5,000, so that a round takes seconds


def main() -> None:
    few = two_tasks(IMAGES)
    learner = make("lwf", network="resnet32", epochs=1, learning_rate=0.1)
    learner.learn(few[0])
    images = few[1].train.batch(torch.arange(IMAGES)).numpy()
    labels = 10 + torch.tensor([few[1].classes.index(label) for label in few[1].train.labels.tolist()]).numpy()
    batches = plain_loop.loader(images, labels, batch_size=128)
    teacher = plain_loop.Classifier(resnet32(), 64, 10).eval()
    student = plain_loop.grown(teacher, 10)
    ours, plain = in_turns(
        lambda: learner.train(few[1]),
        lambda: plain_loop.train(student, teacher, batches, epochs=1, learning_rate=0.1),
        rounds=5,
    )
    show(
        Outcome(
            "training, LwF, ResNet-32",
            "a plain PyTorch loop: DataLoader with 2 workers, PIL transforms, NCHW, eager teacher (`plain_loop.py`)",
            ratio(plain, ours),
            1.6,
            detail=f"{speeds(IMAGES, ours, plain)}.",
        )
    )


if __name__ == "__main__":
    main()
