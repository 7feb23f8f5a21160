"""FeCAM (Goswami et al., NeurIPS 2023): the nearest class mean by the Mahalanobis distance of each class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.nn.functional import normalize

from engram.features.classifiers.base import Classifier
from engram.features.memory import Statistics

SMALLEST_VARIANCE = 1e-9


@dataclass
class FeCAM(Classifier):
    """Minus the squared Mahalanobis distance to each class mean, after Tukey's transform (Eq. 4-9).

    Covariances are shrunk towards their mean variance and mean covariance, then normalised to correlations, so that
    classes of large variance do not attract everything. `weight_` holds the means, of transformed unit vectors; the
    authors' code scales them to unit length. Features of both signs keep theirs.
    """

    label: ClassVar = "Mahalanobis distance (FeCAM, Tukey {tukey:g})"
    saved: ClassVar = (*Classifier.saved, "precision")
    statistics: ClassVar = "covariances"

    tukey: Annotated[float, Field(gt=0, le=1)] = 0.5  # λ of Tukey's transform, §3.3; 1: none
    shrink_variance: NonNegativeFloat = 1.0  # γ1, Eq. 7
    shrink_covariance: NonNegativeFloat = 1.0  # γ2, Eq. 7

    precision_: Tensor = field(init=False, repr=False, compare=False)  # (K or 1, d, d): of inverse correlations

    def transform(self, features: Tensor) -> Tensor:
        if self.tukey == 1:
            return features
        return normalize(features.sign() * features.abs() ** self.tukey)

    def _solution(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        classes, members = labels.cpu().unique(return_inverse=True)
        statistics = Statistics.of(self.transform(features).cpu(), members, len(classes), "class")
        return {**self.solve_statistics(statistics), "classes": classes}

    def solve_statistics(self, statistics: Statistics) -> dict[str, Tensor]:
        return {
            "classes": torch.arange(len(statistics)),
            "weight": statistics.means,
            "intercept": torch.zeros(len(statistics)),
            "precision": torch.linalg.inv(self._correlations(statistics.covariances)).float().contiguous(),
        }

    def _correlations(self, covariances: Tensor) -> Tensor:
        """Shrunk (Eq. 7) and normalised (Eq. 8) covariances (m, d, d)."""
        dimension = covariances.shape[1]
        eye = torch.eye(dimension, dtype=covariances.dtype)
        variances = covariances.diagonal(dim1=1, dim2=2)  # (m, d)
        variance = variances.mean(1).clamp(min=SMALLEST_VARIANCE)  # (m,)
        others = (covariances * (1 - eye)).sum((1, 2)) / max(1, dimension * (dimension - 1))  # (m,)
        shrunk = covariances + self.shrink_variance * variance[:, None, None] * eye
        shrunk = shrunk + self.shrink_covariance * others[:, None, None] * (1 - eye)
        deviations = shrunk.diagonal(dim1=1, dim2=2).clamp(min=SMALLEST_VARIANCE).sqrt()
        return shrunk / (deviations[:, :, None] * deviations[:, None, :]) + 1e-6 * eye

    def scores(self, features: Tensor) -> Tensor:
        self.check_fitted()
        self._check_width(features, self.weight_.shape[1])
        rows = self.transform(features.detach().float())
        precision = self.precision_.to(rows.device).expand(len(self.weight_), -1, -1)
        scores = []
        for mean, matrix in zip(self.weight_.to(rows.device), precision, strict=True):
            centred = rows - mean
            scores.append(-((centred @ matrix) * centred).sum(1))
        return torch.stack(scores, dim=1)
