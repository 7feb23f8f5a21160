"""Ridge regression on random nonlinear features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from engram.features.classifiers.closed_form import ClosedForm, LeaveOneOut
from engram.features.classifiers.moments import Moments
from engram.features.classifiers.ridge import Ridge
from engram.features.threads import threads_for
from engram.settings import INTERNAL

SEED = 2023  # of the random signs; saved models depend on it
PER_SAMPLE = 10  # random features per sample; more did not help on digits
PENALTIES = (0.01, 0.1, 0.001, 1.0)  # ties go to the first


@dataclass
class RandomProjection(ClosedForm):
    """Ridge regression on h = relu(x W / √d), where W (d, width) is random signs (RanPAC, McDonnell et al., 2023).

    `weight_` is (K, width). W is regenerated and not part of the state. The penalty is relative to width / 2d, the
    expected squared length of h for a unit vector x; leave-one-out accuracy chooses it unless it is given.
    """

    width: int = field(default=5000, metadata=INTERNAL)  # random features, at most ten per sample
    relative_penalty: float | None = field(default=None, metadata=INTERNAL)

    dimension_: int = field(init=False, repr=False, compare=False)  # d

    @property
    def description(self) -> str:
        width = self.weight_.shape[1] if "weight_" in vars(self) else self.width
        return f"random projection (width {width})"

    def variants(self) -> list[Self]:
        """One of each penalty, unless it is given."""
        if self.relative_penalty is not None:
            return [self]
        return [replace(self, relative_penalty=penalty) for penalty in PENALTIES]

    def prepare(self, moments: Moments) -> None:
        """Compute the moments of the random features."""
        lifted = self._lifted(moments)[1]
        with threads_for(lifted.multiplications):
            lifted.prepare()

    def solve(self, moments: Moments) -> dict[str, Tensor]:
        """Solve ridge regression on the random features."""
        ridge, lifted = self._lifted(moments)
        with threads_for(lifted.multiplications):
            return {**ridge.solve(lifted), "dimension": torch.tensor(moments.samples.shape[1])}

    def leave_one_out(self, moments: Moments, coarse: bool) -> LeaveOneOut:
        """Leave out samples of ridge regression on the random features."""
        ridge, lifted = self._lifted(moments)
        return ridge.leave_one_out(lifted, coarse)

    def scores(self, features: Tensor) -> Tensor:
        """The least-squares estimate of +1 for the class and −1 for the rest: (n, K)."""
        self.check_fitted()
        self._check_width(features, self.dimension_)
        return self._affine(project(features, self._signs))

    def state(self) -> dict[str, Tensor]:
        """Return the fitted state; W is not part of it."""
        return {**super().state(), "dimension": torch.tensor(self.dimension_)}

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        """Restore what `state` returned."""
        self._require(tensors, "classes", "intercept", "weight", "dimension")
        self.dimension_ = int(tensors["dimension"])
        self._signs = random_signs(self.dimension_, tensors["weight"].shape[1])  # not while a graph is traced
        return super().restore(tensors)

    def _lifted(self, moments: Moments) -> tuple[Ridge, Moments]:
        """The ridge regression to solve, and the moments of the random features."""
        if self.relative_penalty is None:
            raise ValueError("choose one of the variants() first")
        self._check_positive(width=self.width, relative_penalty=self.relative_penalty)
        width = min(self.width, PER_SAMPLE * len(moments))
        if width not in moments.derived:
            signs = random_signs(moments.samples.shape[1], width)
            moments.derived[width] = Moments(moments.samples, moments.labels, lambda rows: project(rows, signs), width)
        return Ridge(self.relative_penalty * width / (2 * moments.samples.shape[1])), moments.derived[width]


def project(features: Tensor, signs: Tensor) -> Tensor:
    """relu(x W / √d) for every row x of features (n, d) and signs W (d, width): (n, width), float32."""
    return torch.relu(features.detach().float() @ signs.to(features.device) / len(signs) ** 0.5)


@lru_cache(maxsize=4)
def random_signs(dimension: int, width: int) -> Tensor:
    """Random ±1 (dimension, width), float32, the same for ever; fewer columns are the first of more."""
    words = -(-dimension // 64)  # for each column
    # NumPy guarantees the stream of a bit generator, but not that of the distributions drawn from it.
    stream = np.random.PCG64(SEED).random_raw(words * width).astype("<u8")
    bits = np.unpackbits(stream.view(np.uint8), bitorder="little").reshape(width, 64 * words)[:, :dimension]
    return torch.from_numpy(2.0 * bits.T.astype(np.float32) - 1.0).contiguous()
