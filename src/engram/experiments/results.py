"""The files of runs and suites: `Result`, what a run measured and with which settings, and `SuiteFile`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from engram import storage
from engram.data import Stream
from engram.errors import DataError
from engram.experiments.folder import RunState
from engram.experiments.measuring import average_incremental_accuracy, forgetting
from engram.features import MEGABYTE
from engram.methods import Learner

SCHEMA = 1
BY_TASK = (  # fields with a value for each task
    *("classes_seen", "curve", "curve_top5", "accuracy_matrix"),
    *("omega", "omega_previous", "omega_first", "ceiling_curve", "drift_gap"),
)


@dataclass(frozen=True)
class SuiteRow:
    """One line or point of a suite's file: runs that differ only in the seed."""

    label: str
    series: str
    value: float | None = None
    runs: list[str] = field(default_factory=list)  # folders, relative to the suite's


@dataclass(frozen=True, kw_only=True)
class SuiteFile:
    """What a suite writes beside its runs, for reports and for resuming."""

    schema: int
    suite: str
    dataset: str = ""
    preset: str = ""
    summary: str = ""
    finding: str | None = None  # what the paper found
    varies: str | None = None  # the setting that `value` is a value of
    command: str | None = None
    variants: list[SuiteRow] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run measured. Lists have one value per task; None where a method has no such value (ω needs features)."""

    schema: int = SCHEMA
    method: str
    dataset: str
    seed: int
    classes_per_task: int | None
    class_order: list[str]
    classes_seen: list[int]
    settings: dict[str, Any]  # resolved: see `Learner.resolved_settings`
    curve: list[float]  # top-1 accuracy on all classes seen
    average_incremental_accuracy: float
    curve_top5: list[float]
    average_incremental_accuracy_top5: float
    head_curve: list[float] | None  # of the network's own head, where another classifier predicts
    accuracy_matrix: list[list[float]]  # [t][i]: on task i's classes after task t
    forgetting: float
    omega: list[float | None] | None  # over all stored features
    omega_previous: list[float | None] | None  # over those of the previous task's classes
    omega_first: list[float | None] | None  # over those of the first task's classes
    ceiling_curve: list[float] | None  # the same classifier, fitted on true current features instead of stored ones
    drift_gap: list[float] | None  # ceiling_curve - curve: the accuracy that drift costs
    memory_bytes: int
    memory_mb: float  # MB of 2^20 bytes, as in the paper
    seconds: dict[str, float]  # by phase
    environment: dict[str, str]
    split: dict[str, Any]  # how the stream was made from the data set
    networks_reused: int | None  # networks that other runs had trained: `seconds` does not count them; None: unknown

    @property
    def leading(self) -> tuple[str, float, list[float]]:
        """The accuracy to quote, as prefix, average and curve: on ImageNet top-5, as in the literature."""
        if self.dataset.startswith("imagenet"):
            return "top-5 ", self.average_incremental_accuracy_top5, self.curve_top5
        return "", self.average_incremental_accuracy, self.curve

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return asdict(self)

    def is_consistent(self) -> bool:
        """Whether all lists have a value for each task, and all numbers are in their range."""
        tasks = len(self.curve)
        by_task = [values for name in (*BY_TASK, "head_curve") if (values := getattr(self, name)) is not None]
        averages = [self.average_incremental_accuracy, self.average_incremental_accuracy_top5]
        return (
            tasks > 0
            and all(len(values) == tasks for values in by_task)
            and [len(row) for row in self.accuracy_matrix] == list(range(1, tasks + 1))
            and all(0 <= accuracy <= 1 for row in [self.curve, averages, *self.accuracy_matrix] for accuracy in row)
            and self.classes_seen[0] > 0
            and self.classes_seen == sorted(self.classes_seen)  # a task may bring known classes only
            and min([self.memory_bytes, *self.seconds.values()]) >= 0
        )

    def save(self, path: Path) -> None:
        """Write the result file atomically."""
        storage.write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result file; raise `DataError` if it is damaged, of another schema, or not a result."""
        return load_file(cls, path)


File = TypeVar("File", Result, SuiteFile)


def load_file(kind: type[File], path: Path, check: Callable[[Any], Any] = lambda values: values) -> File:
    """Read a file; raise `DataError` if it is damaged, of another kind or schema, or `check` raises a ValueError."""
    values = storage.read_json(path)
    name = kind.__name__.removesuffix("File").lower()
    if not isinstance(values, dict) or "schema" not in values:
        raise DataError(f"{path} is not a {name} of engram: it has no schema.")
    if values["schema"] != SCHEMA:
        raise DataError(f"{path} has schema {values['schema']}; this version reads {SCHEMA}.")
    try:
        return pydantic.TypeAdapter(kind).validate_python(check(values))
    except (ValueError, RecursionError) as error:  # pydantic's errors are ValueErrors
        raise DataError(f"{path} is not a {name} of engram: {' '.join(str(error).split())[:200]}") from error


def result_of(learner: Learner, stream: Stream, settings: dict[str, Any], state: RunState) -> Result:
    """The result of a run: `state` after the last task."""

    def column(name: str) -> list[Any]:
        return [getattr(each, name) for each in state.measurements]

    last = state.measurements[-1]
    curve, top5, matrix = column("accuracy"), column("accuracy_top5"), column("by_task")
    names = ("omega", "omega_previous", "omega_first")
    omegas: dict[str, Any] = {name: column(name) if last.omega is not None else None for name in names}
    ceilings = column("ceiling") if last.ceiling is not None else None
    return Result(
        method=learner.name,
        dataset=stream.name,
        seed=learner.seed,
        classes_per_task=stream.classes_per_task,
        class_order=[stream.class_names[label] for label in stream.classes],
        classes_seen=column("classes"),
        settings=settings,
        curve=curve,
        average_incremental_accuracy=average_incremental_accuracy(curve),
        curve_top5=top5,
        average_incremental_accuracy_top5=average_incremental_accuracy(top5),
        head_curve=column("head_accuracy") if last.head_accuracy is not None else None,
        accuracy_matrix=matrix,
        forgetting=forgetting(matrix),
        **omegas,
        ceiling_curve=ceilings,
        drift_gap=[ceiling - reached for ceiling, reached in zip(ceilings, curve, strict=True)] if ceilings else None,
        memory_bytes=learner.memory.nbytes,
        memory_mb=learner.memory.nbytes / MEGABYTE,
        seconds=state.seconds,
        environment=state.environment,
        split=dict(stream.split),
        networks_reused=state.networks_reused,
    )


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds of one plan."""
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "method": results[0].method,
        "dataset": results[0].dataset,
        "seeds": [result.seed for result in results],
    }
    for name in ("average_incremental_accuracy", "average_incremental_accuracy_top5", "forgetting", "memory_mb"):
        values = [float(getattr(result, name)) for result in results]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {"mean": statistics.fmean(values), "deviation": deviation, "values": values}
    summary["curve"] = [statistics.fmean(points) for points in zip(*(each.curve for each in results), strict=True)]
    return summary
