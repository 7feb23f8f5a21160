"""A training step, augmentation and teacher included, against the arithmetic that nothing can take away from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from side_by_side import Outcome, in_turns, milliseconds, ratio, show, two_tasks
from torch import Tensor, nn

from engram.methods import make
from engram.network import Network
from engram.network.network import normalise

BATCHES = 3


def main() -> None:
    few = two_tasks(128 * BATCHES)
    learner = make("gamma-lwf", network="resnet32", epochs=1, learning_rate=0.1)
    learner.learn(few[0])
    network, batch = learner.train(few[1]), few[1].train.batch(torch.arange(128))
    mixed = learner.training.resolved_precision(batch.shape[1:], batch.device) == "bfloat16"
    wall = convolutions(network, batch, torch.bfloat16 if mixed else torch.float32)
    teacher = learner.frozen_network

    def bound() -> None:
        for _ in range(BATCHES):
            wall()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                teacher(batch)

    ours, least = in_turns(lambda: learner.train(few[1]), bound)
    show(
        Outcome(
            "training step, ResNet-32, batch 128",
            "the student's convolutions forward and backward and the teacher's forward pass, alone",
            ratio(least, ours),
            0.9,
            unit="%",
            detail=f"{milliseconds([t / BATCHES for t in ours])} a step in {'bfloat16' if mixed else 'float32'}.",
        )
    )


def convolutions(network: Network, batch: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """A function that runs all convolutions of a network forward and backward, each on an input of its own."""
    seen: list[tuple[nn.Conv2d, Tensor, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(
            lambda module, given, gives: seen.append(
                (module, *(each.to(dtype) for each in (given[0], module.weight.detach(), gives)))
            )
        )
        for module in network.extractor.modules()
        if isinstance(module, nn.Conv2d)
    ]
    with torch.no_grad():
        network.extractor(normalise(batch, network.mean, network.std))
    for hook in hooks:
        hook.remove()

    def run() -> None:
        for number, (module, inputs, weight, outputs) in enumerate(seen):
            geometry = module.stride, module.padding, module.dilation
            torch.conv2d(inputs, weight, None, *geometry)
            wanted = [number > 0, True, False]  # images need no gradient
            torch.ops.aten.convolution_backward(outputs, inputs, weight, None, *geometry, False, [0, 0], 1, wanted)

    return run


if __name__ == "__main__":
    main()
