"""The process that updates the model: it can be killed at any moment, and predictions do not wait for it."""

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
from pydantic_core import to_jsonable_python

from engram.data import Samples
from engram.data.labelled import LabelledImages
from engram.errors import BusyError, EngramError
from engram.model import LearnOptions, ModelFolder, UpdateResult, learn_images
from engram.progress import Phase
from engram.server.problems import as_problem

REPORT_SECONDS = 0.2  # between two progress messages
RETRY_SECONDS = 0.25  # between two attempts to lock the model
WAITING = "wait"  # the phase in which another process locks the model


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """What to learn. The images follow through the pipe, one message each."""

    folder: ModelFolder
    options: LearnOptions
    class_names: tuple[str, ...]
    labels: tuple[int, ...]
    paths: tuple[Path, ...]  # names of the files, for warnings
    seen_bytes: int
    lock_seconds: float
    nice: int


@dataclass
class JobProgress:
    """The progress of a phase, with an estimate of the time left."""

    phase: str
    done: int = 0
    of: int | None = None
    seconds_left: float | None = None

    def __post_init__(self) -> None:
        self._begin = time.monotonic()

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if self.of and self.done:
            rate = (time.monotonic() - self._begin) / self.done
            self.seconds_left = round(rate * max(0, self.of - self.done), 1)


class PipeProgress(Phase):
    """Sends the progress of `learn_images` through a pipe; serves as every phase, too."""

    def __init__(self, pipe: Connection, folder: ModelFolder) -> None:
        self.pipe, self.folder = pipe, folder
        self.progress: JobProgress | None = None
        self.reported = 0.0

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator[Phase]:
        if self.progress is None:  # the model is locked from here on: a later version is from this update
            send(self.pipe, locked=self.folder.number_in_use())
        self.progress, self.reported = JobProgress(name, 0, steps), 0.0
        self.advance(0)
        yield self

    def advance(self, steps: int = 1, note: str = "") -> None:
        assert self.progress is not None
        self.progress.advance(steps)
        if time.monotonic() - self.reported > REPORT_SECONDS:
            self.reported = time.monotonic()
            send(self.pipe, progress=asdict(self.progress))


def run_update(pipe: Connection, request: UpdateRequest) -> None:
    """Learn, and send JSON messages: {"progress"}, {"locked"} once, {"progress"}, then {"done"} or {"failed"}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server gets it too and ends this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt, so that partial files are removed
    os.nice(request.nice)
    size = request.options.image_size
    assert size is not None
    images = torch.empty(len(request.labels), size, size, 3, dtype=torch.uint8)
    for image in images:
        pipe.recv_bytes_into(image.flatten().numpy())
    threading.Thread(target=_exit_with_server, args=(pipe,), daemon=True).start()
    try:
        send(pipe, done=to_jsonable_python(_learn(request, images, pipe)))
    except KeyboardInterrupt:
        return
    except Exception as error:
        send(pipe, failed=as_problem(error, request.folder.path).detail)


def send(pipe: Connection, **message: Any) -> None:
    """Send a JSON object, unless the server has ended."""
    with suppress(OSError):
        pipe.send_bytes(json.dumps(message).encode())


def _exit_with_server(pipe: Connection) -> None:
    """The server sends nothing after the images, so reading returns when the server ends."""
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(1)


def _learn(request: UpdateRequest, images: torch.Tensor, pipe: Connection) -> UpdateResult:
    samples = Samples.of(images, torch.tensor(request.labels, dtype=torch.int64))
    labelled = LabelledImages(samples, request.class_names, request.paths, ())
    deadline = time.monotonic() + request.lock_seconds
    while True:
        progress = PipeProgress(pipe, request.folder)
        try:
            return learn_images(request.folder, labelled, request.options, progress, seen_bytes=request.seen_bytes)
        except BusyError as error:
            if time.monotonic() >= deadline:
                raise EngramError(
                    "Another process locked the model for too long. The model is unchanged, and the images were "
                    "deleted. Send them again when the other process has finished."
                ) from error
        send(pipe, progress=asdict(JobProgress(WAITING)))
        time.sleep(RETRY_SECONDS)
