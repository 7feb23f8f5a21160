"""Batch norm over all processes' shares of a batch, so that what is learned does not depend on how it is shared out.

torch's own does so on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from engram.network.parallel.ranks import is_distributed


@contextmanager
def synchronised(network: nn.Module) -> Iterator[None]:
    """Inside, the batch norms of a network take their statistics over all processes; their tensors stay the same."""
    if not is_distributed():
        yield
        return
    found = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, _BatchNorm)
    ]
    twins = {child: _twin(child) for _, _, child in found}  # a norm that is used in two places stays one
    for parent, name, child in found:
        setattr(parent, name, twins[child])
    try:
        yield
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


def _twin(norm: _BatchNorm) -> nn.Module:
    """A synchronised batch norm with the very same parameters and running statistics."""
    affine, tracked = norm.weight is not None, norm.running_mean is not None
    on_gpu = next((tensor.is_cuda for tensor in (norm.weight, norm.running_mean) if tensor is not None), False)
    kind = nn.SyncBatchNorm if on_gpu else SynchronisedNorm
    twin = kind(norm.num_features, norm.eps, norm.momentum, affine, tracked)
    twin.weight, twin.bias = norm.weight, norm.bias
    twin.running_mean, twin.running_var = norm.running_mean, norm.running_var
    twin.num_batches_tracked = norm.num_batches_tracked
    return twin.train(norm.training)


class SynchronisedNorm(_BatchNorm):
    """Batch norm of any number of dimensions, on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """As a batch norm's; in training, of the whole batch."""
        if not self.training and self.running_mean is not None:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(input, mean, var, self.weight, self.bias, training=False, eps=self.eps)
        # In float32, for sums over a batch, also where the rest is computed with fewer digits.
        answer, mean, var, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input.float(), self.weight, self.bias, self.eps
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._follow(mean, var * (count / (count - 1)))
        return answer.to(input.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        """Let the running statistics follow those of a batch."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.mul_(1 - share).add_(mean, alpha=share)
        self.running_var.mul_(1 - share).add_(var, alpha=share)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any will do: the norm whose place this takes was made for it."""


class _Normalise(torch.autograd.Function):
    """(x − mean) / √(var + ε) · weight + bias, mean and variance those of the whole batch, per channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var = (own.double() for own in torch.batch_norm_update_stats(x, None, None, 0.0))  # (c,), of this share
        own = x.new_tensor([x.numel() // x.shape[1]], dtype=torch.float64)
        sums = torch.cat([own, own * mean, own * (var + mean.square())])
        distributed.all_reduce(sums)
        count, (mean, square) = sums[0], (sums[1:] / sums[0]).chunk(2)
        var = (square - mean.square()).clamp(min=0)  # float64 leaves enough of the difference
        mean, var, count = mean.float(), var.float(), count.float()
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var, count)
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps), mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """dx = w / σ · (dy − mean of dy − x̂ · mean of dy x̂): the means of all; torch takes those of this share."""
        x, weight, mean, inverse, count = ctx.saved_tensors
        slope = inverse if weight is None else weight * inverse  # (c,): w / σ
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        sums = torch.stack([db, dw])  # (2, c): of dy and of dy x̂
        means = sums.double()
        distributed.all_reduce(means)
        off_dy, off_dyx = sums / (x.numel() // x.shape[1]) - (means / count).float()  # (c,) each
        by_x = slope * off_dyx * inverse  # what is off is linear in x
        shape = (1, -1, *[1] * (x.ndim - 2))
        dx.addcmul_(x, by_x.view(shape)).add_((slope * off_dy - by_x * mean).view(shape))
        return dx, (dw if ctx.needs_input_grad[1] else None), (db if ctx.needs_input_grad[2] else None), None
