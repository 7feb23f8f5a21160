"""`Result`: what a run found, and the file it is kept in."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engram.errors import DataError
from engram.features import MEGABYTE
from engram.storage import read_json, write_json

SCHEMA = 1
THEN = ", then "


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found. Lists run along the tasks; what a method cannot have, such as ω without features, is None."""

    schema: int = SCHEMA
    method: str
    dataset: str
    seed: int
    classes_per_task: int | None
    class_order: list[str]
    classes_seen: list[int]
    settings: dict[str, Any]
    curve: list[float]  # top-1 accuracy on all classes seen
    average_incremental_accuracy: float
    curve_top5: list[float]
    average_incremental_accuracy_top5: float
    head_curve: list[float] | None  # the network's own head, where another classifier answers
    accuracy_matrix: list[list[float]]  # [t][i]: on task i's classes after task t
    forgetting: float
    omega: list[float | None] | None  # over all stored vectors
    omega_previous: list[float | None] | None  # over those of the previous task's classes
    omega_first: list[float | None] | None  # over those of the first task's classes
    ceiling_curve: list[float] | None  # the same classifier on the true current features of the stored vectors' images
    drift_gap: list[float] | None  # the ceiling less the curve: what drift costs
    memory_bytes: int
    memory_mb: float
    seconds: dict[str, float]  # by phase
    environment: dict[str, str]
    split: dict[str, Any] = field(default_factory=dict)  # how the stream was made of the data set
    networks_taken: int | None = None  # how many were other runs', which spent the time on them; None: not recorded

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write it, atomically."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result file; a foreign or newer one is refused with a sentence."""
        values = read_json(path)
        if not isinstance(values, dict) or "schema" not in values:
            raise DataError(f"{path} is not a result of engram: it has no schema.")
        if values["schema"] != SCHEMA:
            raise DataError(f"{path} has schema {values['schema']}; this version reads {SCHEMA}. Run it again.")
        known = {each.name for each in fields(cls)}
        if missing := known - {"split", "networks_taken"} - set(values):
            raise DataError(f"{path} is not a whole result: {', '.join(sorted(missing))} missing.")
        return cls(**{name: values[name] for name in known & set(values)})


def megabytes(count: int) -> float:
    """Bytes in the paper's MB of 2^20."""
    return count / MEGABYTE


def joined(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What a run was made with that was begun in one environment and gone on with in another."""
    both = {name: (before.get(name, now.get(name, "")), now.get(name, "not recorded")) for name in {**before, **now}}
    return {name: old if old.split(THEN)[-1] == new else f"{old}{THEN}{new}" for name, (old, new) in both.items()}


def environment(device: str) -> dict[str, str]:
    """What the numbers were made with."""
    import numpy
    import torch

    import engram
    from engram.network import parallel

    return {
        "engram": engram.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),  # which kernels: with others, other roundings
        "device": device,
        "processes": str(parallel.world_size()),
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
    }
