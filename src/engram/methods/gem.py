"""Gradient episodic memory (Lopez-Paz & Ranzato, NeurIPS 2017): steps that raise no earlier task's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from engram.methods.objectives import Classification, TrainingContext
from engram.network import GradientHook, unchanged_statistics

RIDGE = 1e-9  # added to the Gram matrix of the constraints, relative to its mean diagonal


@dataclass(frozen=True, kw_only=True)
class GEM(Classification):
    """L_CE over all classes, on the task's images alone, by gradients projected so as not to raise it on stored images.

    A step may not raise the loss of the stored images of any earlier task, or (A-GEM, Chaudhry et al., ICLR 2019) that
    of all of them together.
    """

    name: ClassVar = "gem"
    replays: ClassVar = False
    of_later_tasks: ClassVar = frozenset({"constraints", "constraint_samples", "memory_strength"})

    constraints: Literal["tasks", "one"] = "tasks"  # one for each earlier task, or a single one
    constraint_samples: PositiveInt = 64  # stored images, drawn in each step, behind a constraint
    memory_strength: NonNegativeFloat = 0.5  # γ, §3 and Appendix A: the smallest multiplier of every constraint

    def gradient_hook(self, context: TrainingContext) -> GradientHook | None:
        if not context.exemplars:
            return None
        student, loss = context.student, self.loss(context)
        tasks = context.task_of_class.cpu()[context.class_indices[: context.exemplars]]  # (n,): of the stored images
        stored = torch.arange(context.exemplars)
        groups = [stored] if self.constraints == "one" else [stored[tasks == task] for task in tasks.unique()]

        def project(draws: torch.Generator) -> None:
            trained = [parameter for parameter in student.parameters() if parameter.grad is not None]
            constraints = []
            for group in groups:
                rows = group[torch.randperm(len(group), generator=draws)[: self.constraint_samples]]
                inputs, class_indices = context.samples.batch(rows), context.class_indices[rows]
                with unchanged_statistics(student):
                    value = loss(inputs.to(student.mean.device), class_indices.to(student.mean.device))
                gradients = torch.autograd.grad(value, trained, materialize_grads=True)
                constraints.append(torch.cat([gradient.flatten() for gradient in gradients]))
            own = [parameter.grad for parameter in trained if parameter.grad is not None]
            whole = torch.cat([gradient.flatten() for gradient in own])
            found = projected(whole, torch.stack(constraints), self.memory_strength)
            for gradient, part in zip(own, found.split([each.numel() for each in own]), strict=True):
                gradient.copy_(part.view(gradient.shape))

        return project


def projected(gradient: Tensor, constraints: Tensor, strength: float) -> Tensor:
    """g + Gᵀ v for a gradient g (p,) and constraints G (k, p): itself if G g ≥ 0, or Eq. 11's solution, v ≥ `strength`.

    With strength 0 it is the nearest vector to g whose products with all constraints are at least 0.
    """
    products = constraints @ gradient  # (k,)
    if bool((products >= 0).all()):
        return gradient
    import scipy.optimize  # imported here so that commands that do not train start sooner

    # min ½ vᵀ G Gᵀ v + vᵀ G g over v = w + strength, w ≥ 0: with G Gᵀ = L Lᵀ, min ‖Lᵀ w + L⁻¹ (G g + G Gᵀ strength)‖.
    gram = (constraints @ constraints.T).double().cpu()
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    factor = torch.linalg.cholesky(gram)
    target = products.double().cpu() + strength * gram.sum(1)
    right = torch.linalg.solve_triangular(factor, -target[:, None], upper=False)[:, 0]
    multipliers = torch.from_numpy(scipy.optimize.nnls(factor.T.numpy(), right.numpy())[0]) + strength
    return gradient + multipliers.to(gradient) @ constraints
