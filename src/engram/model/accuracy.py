"""`Accuracy`: correct answers out of a number of photos, with the 95 % confidence interval that the number implies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Z = 1.959964  # standard deviations of a normal distribution within which 95 % lie


@dataclass(frozen=True)
class Accuracy:
    """Correct answers on photos that the model was not trained on; `total` is at least 1."""

    correct: int
    total: int

    @property
    def value(self) -> float:
        """The share of correct answers."""
        return self.correct / self.total

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval."""
        return interval(self.correct, self.total)[0]

    @property
    def high(self) -> float:
        """The upper end of the 95 % interval."""
        return interval(self.correct, self.total)[1]

    def __str__(self) -> str:
        photos = "photo" if self.total == 1 else "photos"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, {self.total:,} {photos})"

    def to_json(self) -> dict[str, Any]:
        """The counts, the share and the interval as plain values."""
        return {"value": self.value, "correct": self.correct, "total": self.total, "low": self.low, "high": self.high}


def interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % confidence interval of `correct / total` (Agresti and Coull, 1998).

    Near 1, where the accuracy on photos often is, it is wider than Wilson's, and covers more often than it says.
    """
    n = total + Z**2
    share = (correct + Z**2 / 2) / n
    margin = Z * math.sqrt(share * (1 - share) / n)
    return max(0.0, share - margin), min(1.0, share + margin)
