"""The folder of a run: what it is a run of, how far it came, and its result.

run.json             what is run; written first
checkpoint-003/      the learner after three tasks, what was measured so far, and where its memory came from
training.safetensors a task's training under way
result.json          written last
events.jsonl         what happened and when, a line each, for those who watch
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram import storage
from engram.errors import UsageError
from engram.experiments.identity import identifying
from engram.experiments.results import Result
from engram.settings import differences

BESIDE = (".lock", "events.jsonl", "failed.json", "tensorboard")  # what lies in the folder and is not the run
TAKEN = "{} already holds a run. Continue it with --resume, or choose another --out."
SAVING_SHARE = 0.05  # of the time training takes may go into snapshots


class Checkpoint(NamedTuple):
    """A run between two tasks."""

    tasks: int  # how many are done
    learner: dict[str, Tensor]
    origins: Tensor  # int64 (n, 2), see `metrics.origin_of`
    measurements: list[dict[str, Any]]  # one per task
    seconds: dict[str, float]  # by phase
    networks_taken: int = 0  # how many networks were other runs', on which no second was spent
    environment: Mapping[str, str] = MappingProxyType({})  # what it was made with so far


class RunFolder:
    """The folder of one run. All methods are for the holder of its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, request: dict[str, Any], *, resume: bool) -> None:
        """Begin the run `request` here, or make sure that what was begun is the same and may go on."""
        entries = [entry.name for entry in self.path.iterdir() if entry.name not in BESIDE]
        if not entries:
            storage.write_json(self.path / "run.json", request)
            return
        if "run.json" not in entries:
            raise UsageError(f"{self.path} holds something else ({sorted(entries)[0]}). Choose an empty or new folder.")
        if not resume:
            raise UsageError(TAKEN.format(self.path))
        before = storage.read_json(self.path / "run.json")
        if not isinstance(before, dict) or not request.keys() - {"weights"} <= before.keys():
            raise UsageError(f"{self.path} holds something else (a run.json not of engram). Choose an empty folder.")
        self._refuse_another(before, request)
        if len(request["tasks"]) > len(before["tasks"]):
            storage.remove(self.path / "result.json")  # of fewer tasks: it must not pass for the longer run's
        if before != request:
            storage.write_json(self.path / "run.json", request)

    def withdraw(self) -> None:
        """After an error: a run that has nothing to go on from yet leaves the folder free for another."""
        if not self._checkpoints() and not self._training.exists():
            storage.remove(self.path / "run.json")

    def _refuse_another(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Only the same run goes on. One that was asked for fewer tasks of the same stream may be carried further."""
        done, wanted = before["tasks"], now["tasks"]
        # A run may go on on another device, and from a file of weights that was moved.
        known = before.get("weights") and now.get("weights")  # earlier versions did not tell what it holds
        same = {"device": "", **({"weights": ""} if known else {})}
        flat = [
            {**identifying(request["settings"]), **same, "method": request["method"], "dataset": request["dataset"]}
            for request in (before, now)
        ]
        changed = differences(*flat)
        if known and before["weights"] != now["weights"]:
            changed.append("what the file of weights holds")
        if not changed and wanted[: len(done)] != done:
            changed = ["the data, the class order or the tasks"]
        if changed:
            raise UsageError(
                f"{self.path} holds another run; it differs in {'; '.join(changed)}. Choose another --out."
            )

    def save(self, checkpoint: Checkpoint) -> None:
        """Publish a checkpoint; what it supersedes is removed."""

        def fill(folder: Path) -> None:
            storage.save_tensors(folder / "learner.safetensors", checkpoint.learner)
            storage.save_tensors(folder / "origins.safetensors", {"origins": checkpoint.origins})
            storage.write_json(folder / "measurements.json", checkpoint.measurements)
            spent = {"by_phase": checkpoint.seconds, "networks_taken": checkpoint.networks_taken}
            storage.write_json(folder / "seconds.json", {**spent, "environment": dict(checkpoint.environment)})

        storage.publish_folder(self.path / f"checkpoint-{checkpoint.tasks:03d}", fill)
        self._tidy()

    def finish(self, result: Result) -> None:
        """Write the result; of the way there only the last checkpoint stays."""
        self._tidy()
        result.save(self.path / "result.json")

    def result(self) -> Result | None:
        """What was written last, if the run came to its end."""
        path = self.path / "result.json"
        return Result.load(path) if path.exists() else None

    def load(self) -> Checkpoint | None:
        """The last checkpoint, if there is one."""
        folders = self._checkpoints()
        if not folders:
            return None
        folder = folders[-1]
        spent = storage.read_json(folder / "seconds.json")
        return Checkpoint(
            self.learned,
            storage.load_tensors(folder / "learner.safetensors"),
            storage.load_tensors(folder / "origins.safetensors")["origins"],
            storage.read_json(folder / "measurements.json"),
            spent.get("by_phase", spent),  # as it was before networks were counted
            spent.get("networks_taken", 0),
            spent.get("environment", {}),
        )

    @property
    def learned(self) -> int:
        """How many tasks the last checkpoint has behind it."""
        folders = self._checkpoints()
        return _number(folders[-1]) if folders else 0

    def checkpoints(self, task: int) -> FileEpochCheckpoints:
        """Where the training of this task is kept while it is under way."""
        return FileEpochCheckpoints(self._training, task)

    def _tidy(self) -> None:
        """Remove what the last checkpoint supersedes."""
        for folder in self._checkpoints()[:-1]:
            storage.remove(folder)
        storage.remove(self._training)

    @property
    def _training(self) -> Path:
        return self.path / "training.safetensors"

    def _checkpoints(self) -> list[Path]:
        # glob, unlike iterdir, finds nothing in a folder that is not there yet
        ours = (found for found in self.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", found.name))
        return sorted(ours, key=_number)


def _number(checkpoint: Path) -> int:
    """How many tasks a checkpoint's folder is named for."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


class FileEpochCheckpoints:
    """Training under way, in one file that is replaced as often as saving stays a small share of the time."""

    def __init__(self, path: Path, task: int) -> None:
        self.path, self.task = path, task
        self.next = 0.0  # when the next save is due, on the monotonic clock
        self.seconds_before = 0.0  # that went into what was loaded
        self._began = time.monotonic()

    def load(self) -> dict[str, Tensor] | None:
        """The last snapshot, if it is of this task."""
        if not self.path.exists():
            return None
        state = storage.load_tensors(self.path)
        if int(state.pop("task")) != self.task:
            return None
        self.seconds_before = float(state.pop("seconds", torch.zeros(())))  # older ones do not tell
        return state

    def save(self, collect: Callable[[], dict[str, Tensor]]) -> None:
        """Save, unless too little time has passed since the last."""
        start = time.monotonic()
        if start < self.next:
            return
        seconds = torch.tensor(self.seconds_before + start - self._began, dtype=torch.float64)
        storage.save_tensors(self.path, {**collect(), "task": torch.tensor(self.task), "seconds": seconds})
        end = time.monotonic()
        self.next = end + (end - start) / SAVING_SHARE
