"""One training by many processes: each has its share of every batch, and all take the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engram.network.parallel.exchange import broadcast_module
from engram.network.parallel.norms import synchronised
from engram.network.parallel.ranks import is_distributed

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor, float], Tensor]  # (inputs, columns, what their share weighs) -> its part of the loss


@contextmanager
def distributed_step(network: nn.Module, loss: Loss) -> Iterator[Step]:
    """Gives the loss of a share of a batch, by whose `backward` all processes get the gradient of the whole batch's.

    `loss` is a mean over the inputs it is given, through `network` in any way: some of it, all of it, or twice.
    """
    if not is_distributed():
        yield lambda inputs, class_indices, weight: loss(inputs, class_indices)
        return
    from torch.nn.parallel import DistributedDataParallel  # it imports torch's compiler, for seconds

    broadcast_module(network)
    with synchronised(network):
        yield DistributedDataParallel(_Objective(network, loss), find_unused_parameters=True)


class _Objective(nn.Module):
    """The loss as a module, which is what torch can distribute. It has no buffers: those are seen to elsewhere."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.learned = nn.ParameterList(learned)
        # torch warns where it was to look for unused parameters and there is none: so there is one.
        self.unused = nn.Parameter(torch.zeros((), device=learned[0].device))
        self.loss = loss

    def forward(self, inputs: Tensor, class_indices: Tensor, weight: float) -> Tensor:
        return weight * self.loss(inputs, class_indices)
