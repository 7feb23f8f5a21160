"""Extracting features, and answering for images, against the network's own forward pass."""

from __future__ import annotations

import torch
from side_by_side import Outcome, in_turns, milliseconds, ratio, show, two_tasks

from engram.methods import make

IMAGES = 2_000


def main() -> None:
    task = two_tasks(IMAGES)[0]
    learner = make("features", network="resnet32", epochs=1, learning_rate=0.1)
    learner.learn(task)
    network, inputs = learner.network_.eval(), task.train.batch(torch.arange(IMAGES))

    def forward(batch: int, images: int) -> None:
        with torch.no_grad():
            for part in inputs[:images].split(batch):
                network(part)

    extracted, passed = in_turns(lambda: learner.extract(task.train), lambda: forward(500, IMAGES), rounds=5)
    answered, batch = in_turns(lambda: learner.scores(inputs[:128]), lambda: forward(128, 128), rounds=15)
    answered_one, one = in_turns(lambda: learner.scores(inputs[:1]), lambda: forward(1, 1), rounds=50)
    show(
        Outcome(
            "feature extraction, ResNet-32",
            "the network's own forward pass over the same images",
            ratio(passed, extracted),
            0.9,
            unit="%",
            detail="Above 100 % because batch norms are folded into the convolutions.",
        ),
        Outcome(
            "predict, a batch of 128",
            "the forward pass",
            ratio(answered, batch),
            1.2,
            at_least=False,
            detail=milliseconds(answered),
        ),
        Outcome(
            "predict, one image",
            "the forward pass",
            ratio(answered_one, one),
            2,
            at_least=False,
            detail=milliseconds(answered_one),
        ),
    )


if __name__ == "__main__":
    main()
