"""Data-parallel training by torch's DistributedDataParallel, with synchronised batch norms also on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from engram.network.parallel.collectives import broadcast_module, is_distributed

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor, float], Tensor]  # (inputs, class indices, weight of the share) -> scalar loss


@contextmanager
def distributed_step(network: nn.Module, loss: Loss) -> Iterator[Step]:
    """A function that gives the loss of one rank's share; its `backward` averages gradients over all ranks.

    `loss` is a mean over its inputs. It may use all or part of `network`, any number of times.
    """
    if not is_distributed():
        yield lambda inputs, class_indices, weight: loss(inputs, class_indices)
        return
    from torch.nn.parallel import DistributedDataParallel  # imports torch's compiler, which takes seconds

    broadcast_module(network)
    with synchronised(network):
        yield DistributedDataParallel(_LossModule(network, loss), find_unused_parameters=True)


class _LossModule(nn.Module):
    """The loss as a module for DistributedDataParallel. It has no buffers: batch norms synchronise their own."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.trainable = nn.ParameterList(trainable)
        # torch warns if it looks for unused parameters and finds none, so there is always one.
        self.unused = nn.Parameter(torch.zeros((), device=trainable[0].device))
        self.loss = loss

    def forward(self, inputs: Tensor, class_indices: Tensor, weight: float) -> Tensor:
        return weight * self.loss(inputs, class_indices)


@contextmanager
def synchronised(network: nn.Module) -> Iterator[None]:
    """Inside, the batch norms of a network take their statistics over all ranks; their tensors stay the same."""
    if not is_distributed():
        yield
        return
    norms = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, _BatchNorm)
    ]
    replacements = {norm: _replacement(norm) for _, _, norm in norms}  # a norm that is used twice stays one
    for parent, name, norm in norms:
        setattr(parent, name, replacements[norm])
    try:
        yield
    finally:
        for parent, name, norm in norms:
            setattr(parent, name, norm)


def _replacement(norm: _BatchNorm) -> nn.Module:
    """A synchronised batch norm with the same parameter and buffer tensors. torch's own works on GPUs only."""
    on_gpu = any(tensor.is_cuda for tensor in (*norm.parameters(), *norm.buffers()))
    kind = nn.SyncBatchNorm if on_gpu else SynchronisedBatchNorm
    replacement = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    replacement._parameters, replacement._buffers = norm._parameters, norm._buffers
    return replacement.train(norm.training)


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm over all ranks for CPU tensors (n, c, ...)."""

    def forward(self, input: Tensor) -> Tensor:
        """As a batch norm's; in training with the statistics of the global batch."""
        if not self.training and self.running_mean is not None:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(input, mean, var, self.weight, self.bias, training=False, eps=self.eps)
        # In float32 also under autocast, because it sums over a batch.
        output, mean, var, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input.float(), self.weight, self.bias, self.eps
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            self.running_var.mul_(1 - momentum).add_(var * (count / (count - 1)), alpha=momentum)
        return output.to(input.dtype)  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any: the norm that this one replaces was made for it."""


class _Normalise(torch.autograd.Function):
    """(x − mean) / √(var + ε) · weight + bias per channel, with mean and variance of the global batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var = (own.double() for own in torch.batch_norm_update_stats(x, None, None, 0.0))  # (c,), of this rank
        own = x.new_tensor([x.numel() // x.shape[1]], dtype=torch.float64)
        sums = torch.cat([own, own * mean, own * (var + mean.square())])
        distributed.all_reduce(sums)
        count, (mean, square) = sums[0], (sums[1:] / sums[0]).chunk(2)
        var = (square - mean.square()).clamp(min=0)  # float64, since this difference cancels digits
        mean, var, count = mean.float(), var.float(), count.float()
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var, count)
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps), mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """dx = w / σ · (dy − mean of dy − x̂ · mean of dy x̂). torch takes the means of this rank; they are corrected."""
        x, weight, mean, inverse, count = ctx.saved_tensors
        slope = inverse if weight is None else weight * inverse  # (c,): w / σ
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        sums = torch.stack([db, dw])  # (2, c): of dy and of dy x̂
        means = sums.double()
        distributed.all_reduce(means)
        off_dy, off_dyx = sums / (x.numel() // x.shape[1]) - (means / count).float()  # (c,) each
        by_x = slope * off_dyx * inverse  # the correction is linear in x
        shape = (1, -1, *[1] * (x.ndim - 2))
        dx.addcmul_(x, by_x.view(shape)).add_((slope * off_dy - by_x * mean).view(shape))
        return dx, (dw if ctx.needs_input_grad[1] else None), (db if ctx.needs_input_grad[2] else None), None
