"""One lesson, in a process of its own: it can be stopped at any moment, and answers do not wait for it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engram.data import Samples
from engram.data.labelled import LabelledImages
from engram.errors import BusyError, DataError, EngramError
from engram.model import LearnOptions, ModelFolder, UpdateResult, learn_images
from engram.progress import Phase
from engram.server.problems import sentence_of

OFTEN = 0.2  # seconds between two reports
AGAIN = 1.0  # seconds until a folder that another holds is tried again
WAITING = "wait"  # the phase of a lesson that waits for such a folder
FAILED = "The lesson failed for a reason that should not be. The model is as it was. The server's log says more."
HELD = (
    "Another command has been at work on the model all the while, and still is. The model is as it was. "
    "The pictures are not kept: send them again when that is done."
)


@dataclass(frozen=True)
class Lesson:
    """What a process is to teach; the images follow by its pipe, one message each."""

    folder: str
    side: int
    class_names: tuple[str, ...]
    labels: tuple[int, ...]
    seen_bytes: int
    epochs: int | None
    device: str
    nice: int
    busy_seconds: float  # to wait for a folder that another holds


def work(pipe: Connection, lesson: Lesson) -> None:
    """Teach, and report by the pipe in JSON: {"progress"}, {"held"} once, {"progress"}, then {"done"} or {"failed"}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it belongs to the server, which ends this process
    signal.signal(signal.SIGTERM, _stopped)
    os.nice(lesson.nice)
    inputs = _received(pipe, len(lesson.labels), lesson.side)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    try:
        outcome: dict[str, Any] = {"done": _teach(lesson, inputs, pipe).to_json()}
    except EngramError as error:
        outcome = {"failed": sentence_of(error, Path(lesson.folder))}
    except MemoryError:
        outcome = {"failed": "There is not enough memory for this lesson. Teach fewer pictures at a time."}
    except Exception:
        import traceback

        traceback.print_exc()
        outcome = {"failed": FAILED}
    except KeyboardInterrupt:
        return
    _send(pipe, outcome)


def _stopped(*_: object) -> None:
    """As Ctrl-C would: what was begun is put away on the way out."""
    raise KeyboardInterrupt


def _received(pipe: Connection, count: int, side: int) -> torch.Tensor:
    """The images, uint8 (count, side, side, 3)."""
    images = torch.empty(count, side, side, 3, dtype=torch.uint8)
    for image in images:
        pipe.recv_bytes_into(image.flatten().numpy())
    return images


def _teach(lesson: Lesson, inputs: torch.Tensor, pipe: Connection) -> UpdateResult:
    samples = Samples.of(inputs, torch.tensor(lesson.labels, dtype=torch.int64))
    pictures = LabelledImages(samples, lesson.class_names, (), ())
    options = LearnOptions(epochs=lesson.epochs, device=lesson.device, image_size=lesson.side)
    folder = ModelFolder(Path(lesson.folder))
    end = time.monotonic() + lesson.busy_seconds
    while True:
        try:
            return learn_images(folder, pictures, options, Reporter(pipe, folder), seen_bytes=lesson.seen_bytes)
        except BusyError as error:
            if time.monotonic() >= end:
                raise BusyError(HELD) from error
        _send(pipe, {"progress": Standing(WAITING, 0, None).to_json()})
        time.sleep(AGAIN)


def generation_of(folder: ModelFolder) -> int | None:
    """The number of the generation in use; None without one."""
    try:
        return folder.pointer().current if folder.exists() else None
    except DataError:
        return None


def _end_with(pipe: Connection) -> None:
    """End when the server does: nobody would hear of what is learned."""
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(1)


class Reporter:
    """Sends how far the work in a folder is by a pipe, now and then."""

    def __init__(self, pipe: Connection, folder: ModelFolder) -> None:
        self.pipe, self.folder = pipe, folder
        self.held = False

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        """Report while the phase lasts."""
        if not self.held:  # nobody else writes from here on: a generation after this one is of this lesson
            self.held = True
            _send(self.pipe, {"held": generation_of(self.folder)})
        phase = _Reported(self.pipe, name, steps)
        phase.report()
        yield phase


class _Reported:
    def __init__(self, pipe: Connection, name: str, steps: int | None) -> None:
        self.pipe, self.progress = pipe, Standing(name, 0, steps)
        self.last = 0.0

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.progress.advance(steps)
        if time.monotonic() - self.last > OFTEN:
            self.report()

    def tell(self, **values: float) -> None:
        pass

    def report(self) -> None:
        self.last = time.monotonic()
        _send(self.pipe, {"progress": self.progress.to_json()})


@dataclass
class Standing:
    """How far a phase is, and how long the rest of it will take at this rate."""

    phase: str
    done: int
    of: int | None

    def __post_init__(self) -> None:
        self.begin = time.monotonic()

    def advance(self, steps: int) -> None:
        """So many more are done."""
        self.done += steps

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        left = None
        if self.of and self.done:
            left = round((time.monotonic() - self.begin) / self.done * max(0, self.of - self.done), 1)
        return {**asdict(self), "seconds_left": left}


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the server has ended, and so will this process
        pipe.send_bytes(json.dumps(message).encode())
