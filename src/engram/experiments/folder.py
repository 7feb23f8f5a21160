"""The folder of a run, from which a killed run resumes, and the events of a run as they happen.

run.json             the identity of the run; written first
checkpoint-003/      the learner after three tasks, and everything measured so far
training.safetensors the training of the current task, saved between epochs
result.json          written last
events.jsonl         the event log: one JSON line per event
tensorboard/         scalars for TensorBoard, if asked for
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from engram import __version__, storage
from engram.errors import EngramError, UsageError, not_installed
from engram.experiments.measuring import Measurement
from engram.methods import Learner
from engram.network import parallel
from engram.progress import Phase, Progress
from engram.settings import differences

NOT_THE_RUN = frozenset({".lock", "events.jsonl", "failed.json", "tensorboard"})  # may lie in a folder without a run
TAKEN = "{} already holds a run. Continue it with --resume, or choose another --out."
FOREIGN = "{} holds something else ({}). Choose an empty or new folder."
THEN = ", then "
SAVING_SHARE = 0.05  # of the training time may be spent on saving


@dataclass
class RunState:
    """What a run has measured so far; a checkpoint holds it beside the learner."""

    origins: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int64))  # see `origin_of`
    measurements: list[Measurement] = field(default_factory=list)  # one per task
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    networks_reused: int = 0  # trained by other runs, whose seconds do not count here
    environment: dict[str, str] = field(default_factory=dict)


def environment(device: str, before: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions and hardware. What differs from `before`, where the run started, is recorded as "old, then new"."""
    now = {
        "engram": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),  # other kernels round differently
        "device": device,
        "processes": str(parallel.world_size()),
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
    }
    old = {name: (before or now).get(name, "not recorded") for name in now}
    return {
        name: old[name] if old[name].split(THEN)[-1] == new else f"{old[name]}{THEN}{new}" for name, new in now.items()
    }


@contextmanager
def open_run(path: Path, identity: dict[str, Any], *, resume: bool) -> Iterator[RunFolder]:
    """Lock a folder for one run. After an error, a run with nothing to resume from leaves the folder free."""
    storage.make_folder(path)
    with storage.locked(path):
        folder = RunFolder(path)
        folder.start(identity, resume=resume)
        try:
            yield folder
        except Exception:
            if not folder.checkpoints() and not folder.training.exists():
                storage.remove(path / "run.json")
            raise


class RunFolder:
    """The folder of one run. Whoever writes must hold its lock: see `open_run`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training, self.result = path / "training.safetensors", path / "result.json"

    def start(self, identity: dict[str, Any], *, resume: bool) -> None:
        """Begin a run here, or check that the one found is the same. The same run with more tasks may go on."""
        found = sorted(entry.name for entry in self.path.iterdir() if entry.name not in NOT_THE_RUN)
        if found:
            if "run.json" not in found:
                raise UsageError(FOREIGN.format(self.path, found[0]))
            if not resume:
                raise UsageError(TAKEN.format(self.path))
            self._refuse_another(identity)
        storage.write_json(self.path / "run.json", identity)

    def _refuse_another(self, identity: dict[str, Any]) -> None:
        before = storage.read_json(self.path / "run.json")
        if not isinstance(before, dict) or not identity.keys() <= before.keys():
            raise UsageError(FOREIGN.format(self.path, "a run.json that is not engram's"))
        names = ("method", "dataset")
        changed = differences(
            *({**run["settings"], **{name: run[name] for name in names}} for run in (before, identity))
        )
        done = before["tasks"]
        if not changed and identity["tasks"][: len(done)] != done:
            changed = ["the data, the class order or the tasks"]
        if changed:
            raise UsageError(
                f"{self.path} holds another run; it differs in {'; '.join(changed)}. Choose another --out."
            )
        if len(identity["tasks"]) > len(done):
            storage.remove(self.result)  # it is the result of fewer tasks

    def save(self, learner: Learner, state: RunState) -> None:
        """Publish a checkpoint and remove what it supersedes."""
        with storage.writing_folder(self.path / f"checkpoint-{learner.tasks_:03d}") as folder:
            storage.save_tensors(folder / "learner.safetensors", learner.state())
            storage.save_tensors(folder / "origins.safetensors", {"origins": state.origins})
            storage.write_json(folder / "measurements.json", [asdict(each) for each in state.measurements])
            names = ("seconds", "networks_reused", "environment")
            storage.write_json(folder / "seconds.json", {name: getattr(state, name) for name in names})
        self.tidy()

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint: the learner's state as `learner`, and the fields of `RunState` as plain values."""
        checkpoints = self.checkpoints()
        if not checkpoints:
            return None
        folder = checkpoints[max(checkpoints)]
        return {
            "learner": storage.load_tensors(folder / "learner.safetensors"),
            "origins": storage.load_tensors(folder / "origins.safetensors")["origins"],
            "measurements": storage.read_json(folder / "measurements.json"),
            **storage.read_json(folder / "seconds.json"),
        }

    @property
    def tasks_done(self) -> int:
        """How many tasks the last checkpoint has."""
        return max(self.checkpoints(), default=0)

    def checkpoints(self) -> dict[int, Path]:
        """The folders of checkpoints by their number of tasks."""
        found = self.path.glob("checkpoint-*")  # unlike iterdir, this accepts a folder that does not exist yet
        return {int(match[1]): path for path in found if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))}

    def tidy(self) -> None:
        """Remove what the last checkpoint supersedes."""
        last = self.tasks_done
        for tasks, folder in self.checkpoints().items():
            if tasks < last:
                storage.remove(folder)
        storage.remove(self.training)


class FileEpochCheckpoints:
    """The training of one task in a file, saved between epochs as often as that takes a small share of the time."""

    def __init__(self, path: Path, task: int) -> None:
        self.path, self.task = path, task
        self.next = 0.0  # when to save next, on the monotonic clock
        self.seconds_before = 0.0  # training time of the loaded checkpoint
        self._began = time.monotonic()

    def load(self) -> dict[str, Tensor] | None:
        """The last checkpoint, if it is of this task."""
        if not self.path.exists():
            return None
        state = storage.load_tensors(self.path)
        if int(state.pop("task")) != self.task:
            return None
        self.seconds_before = float(state.pop("seconds"))
        return state

    def save(self, collect: Callable[[], dict[str, Tensor]]) -> None:
        """Save, unless too little time has passed since the last time."""
        start = time.monotonic()
        if start < self.next:
            return
        seconds = torch.tensor(self.seconds_before + start - self._began, dtype=torch.float64)
        storage.save_tensors(self.path, {**collect(), "task": torch.tensor(self.task), "seconds": seconds})
        end = time.monotonic()
        self.next = end + (end - start) / SAVING_SHARE


class Listener(Protocol):
    """Receives the events of a run: begin, epoch, phase, task, and end or stop."""

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        """Handle one event."""


class EventLog:
    """`events.jsonl`: one line is appended per event; lines written before a kill stay."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        """Append a line."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self.path.open("ab") as file:
            file.write(storage.json_bytes({"time": now, "event": event, **values}))


class TensorBoard:
    """Scalars for TensorBoard: loss and learning rate by epoch; measurements and seconds by task.

    They go to `folder`; by default to the folder `tensorboard` in that of each run.
    """

    def __init__(self, folder: Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise not_installed("TensorBoard", "track") from error
        self.folder, self.make_writer = folder, SummaryWriter

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        """Write the numbers of the event and flush them."""
        if event == "begin":
            self.writer = self.make_writer(str(self.folder or Path(values["folder"] or "") / "tensorboard"))
        task = values.get("task", 0)
        names = {"epoch": ("loss", "learning_rate"), "task": tuple(values), "phase": ("seconds",)}.get(event, ())
        for name in names:
            if isinstance(values[name], int | float) and name != "task":
                tag = name if event == "task" else f"task {task}/{values['phase']}/{name}"
                self.writer.add_scalar(tag, values[name], values["epoch"] if event == "epoch" else task)
        self.writer.flush()


class RunProgress:
    """Adds up the seconds of each phase, sends events to listeners, and passes everything on to `inner`."""

    def __init__(self, inner: Progress, listeners: Sequence[Listener]) -> None:
        self.inner, self.listeners = inner, listeners
        self.seconds: dict[str, float] = {}  # by phase
        self.task = 0  # the current task, counted from 1

    def log(self, event: str, **values: Any) -> None:
        """Send an event to all listeners."""
        for listener in self.listeners:
            listener.on_event(event, values)

    @contextmanager
    def run(self, **values: Any) -> Iterator[None]:
        """Log the begin of a run, and its end or why it stopped."""
        self.log("begin", **values)
        try:
            yield
        except BaseException as error:
            self.log("stop", why=str(error) if isinstance(error, EngramError) else type(error).__name__)
            raise
        self.log("end")

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """A phase of the inner progress; unless an error ends it, its end is logged with its seconds."""
        before, start = self.seconds.get(name, 0.0), time.perf_counter()
        try:
            with self.inner.phase(name, steps) as phase:
                yield _RunPhase(phase, self, name)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.log("phase", task=self.task, phase=name, seconds=round(self.seconds[name] - before, 3))


class _RunPhase(Phase):
    def __init__(self, inner: Phase, progress: RunProgress, name: str) -> None:
        self.inner, self.progress, self.name = inner, progress, name
        self.advance = inner.advance  # type: ignore[method-assign]

    def log(self, **values: float) -> None:
        self.inner.log(**values)
        self.progress.log("epoch", task=self.progress.task, phase=self.name, **values)
