"""ResNet-18 at 64×64 and 84×84: our loop against a plain one, NCHW with an eager teacher."""

from __future__ import annotations

import plain_loop
import torch
from side_by_side import Outcome, in_turns, ratio, show

import engram
from engram.methods import make
from engram.network.registry import resnet18

BATCH, BATCHES = 128, 2


def main() -> None:
    show(*(compare(side) for side in (64, 84)))


def compare(side: int) -> Outcome:
    random = torch.Generator().manual_seed(0)
    count = BATCH * BATCHES
    images = torch.randint(0, 256, (2, count, side, side, 3), dtype=torch.uint8, generator=random)
    labels = torch.arange(count) % 4
    parts = [engram.Samples.of(images[number], labels + 4 * number) for number in range(2)]
    first, second = (engram.Task(number, part.classes(), part, part) for number, part in enumerate(parts))
    learner = make("lwf", network="resnet18", epochs=1, batch_size=BATCH, learning_rate=0.1)
    learner.learn(first)
    batches = [
        (images[1, rows].permute(0, 3, 1, 2).float().div(255).contiguous(), 4 + labels[rows])
        for rows in torch.arange(count).split(BATCH)
    ]
    teacher = plain_loop.Classifier(resnet18(), 512, 4).eval()

    def plain() -> None:  # without a loader: images are ready and not augmented
        plain_loop.train(plain_loop.grown(teacher, 4), teacher, batches, epochs=1, learning_rate=0.1)

    ours, theirs = in_turns(lambda: learner.train(second), plain, rounds=5)
    return Outcome(
        f"training, LwF, ResNet-18, {side}×{side}",
        "the plain loop on images that are decoded and augmented already",
        ratio(theirs, ours),
        1,
    )


if __name__ == "__main__":
    main()
