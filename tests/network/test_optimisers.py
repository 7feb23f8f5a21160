"""Optimisers without torch's compiler take the same steps."""

import pytest
import torch
from torch import Tensor, nn

from engram.network.training import uncompiled

OPTIMISERS = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "fused": True},
    torch.optim.Adam: {"lr": 0.1, "fused": True},
    torch.optim.LBFGS: {"max_iter": 3, "line_search_fn": "strong_wolfe"},
}


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_steps_and_restored_state_are_those_of_torchs_optimiser(kind: type[torch.optim.Optimizer]) -> None:
    def steps(made: type[torch.optim.Optimizer]) -> Tensor:
        layer = nn.Linear(4, 1)
        layer.weight.data = torch.linspace(-1, 1, 4)[None]
        layer.bias.data = torch.zeros(1)
        optimiser = made(layer.parameters(), **OPTIMISERS[kind])

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = (layer(torch.arange(20.0).reshape(5, 4) / 20) ** 2 - layer.weight.sum()).square().mean()
            value.backward()
            return value

        for _ in range(3):
            optimiser.step(loss)
        state = optimiser.state_dict()
        optimiser = made(layer.parameters(), **OPTIMISERS[kind])
        optimiser.load_state_dict(state)
        optimiser.step(loss)
        return torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])

    assert torch.equal(steps(uncompiled(kind)), steps(kind))
