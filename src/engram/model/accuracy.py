"""`Accuracy`: correct answers out of a number of photos, with the 95 % confidence interval that the number implies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Accuracy:
    """Correct answers on photos that the model was not trained on; `total` is at least 1."""

    right: int
    total: int

    @property
    def value(self) -> float:
        """The share of correct answers."""
        return self.right / self.total

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval."""
        return interval(self.right, self.total)[0]

    @property
    def high(self) -> float:
        """The upper end of the 95 % interval."""
        return interval(self.right, self.total)[1]

    def __str__(self) -> str:
        photos = "photo" if self.total == 1 else "photos"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, {self.total:,} {photos})"

    def to_json(self) -> dict[str, Any]:
        """The counts, the share and the interval as plain values."""
        return {"value": self.value, "right": self.right, "total": self.total, "low": self.low, "high": self.high}


def interval(right: int, total: int) -> tuple[float, float]:
    """The exact 95 % confidence interval of `right / total` (Clopper and Pearson, 1934)."""
    from scipy.special import betaincinv  # slow to import

    tail = (1 - CONFIDENCE) / 2
    low = float(betaincinv(right, total - right + 1, tail)) if right else 0.0
    high = float(betaincinv(right + 1, total - right, 1 - tail)) if right < total else 1.0
    return low, high
