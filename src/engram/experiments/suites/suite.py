"""`Suite`: a table or figure of the paper as a declaration of the runs it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER_SAMPLES = 500  # a class of CIFAR-100 has so many training images; the paper's numbers per class are for those


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table, or one point of the figure: a method with settings, run once per seed."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    series: str  # the line of the figure it lies on
    value: float | None = None  # where on the axis, where something is varied
    classes_per_task: int | None = None  # None: the data set's usual number
    budget: int | None = (
        None  # bytes a class: what fits in is chosen by it, and a variant of which nothing does, left out
    )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a suite must know of a data set to choose its values."""

    classes: int
    per_class: int  # training samples of the smallest class
    sample_bytes: int  # of an image
    classes_per_task: int
    features_per_class: int  # L and P as the preset has them
    images_per_class: int
    whole: bool  # whether everything the paper varies is wanted, or what short runs can show

    def scaled(self, *counts: int) -> list[int]:
        """Numbers per class of the paper's CIFAR-100, for classes that have fewer samples in proportion."""
        share = min(1.0, self.per_class / PAPER_SAMPLES)
        return sorted({max(1, round(count * share)) for count in counts})

    def task_sizes(self) -> list[int]:
        """M, the numbers of classes per task: the usual one; half and twice of it too where the whole is wanted."""
        usual = self.classes_per_task
        sizes = {usual // 2, usual, 2 * usual} if self.whole else {usual}
        return sorted(size for size in sizes if 1 <= size <= self.classes // 2)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Which runs, on which split, what is varied, and what the paper found."""

    summary: str
    variants: Callable[[Facts], Iterable[Variant]]
    finding: str | None = None  # the paper's; a suite of ours has none
    varies: str | None = None  # what the axis of `value` is
    validation: float = 0.0  # the share of the training samples that is held out and tested on
