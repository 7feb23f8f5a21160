"""Lessons that wait, are under way, or are over. One is taught at a time."""

from __future__ import annotations

import json
import logging
import multiprocessing
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch import Tensor

from engram.data.images import UnreadableImage
from engram.errors import DataError, EngramError
from engram.network import DEFAULT_PRETRAINED
from engram.network.efficientnet import VARIANTS
from engram.server import shapes
from engram.server.config import Config
from engram.server.decoding import Decoders
from engram.server.problems import Problem, sentence_of, too_many
from engram.server.snapshot import Snapshots
from engram.server.teaching import FAILED, WAITING, Lesson, Standing, generation_of, work
from engram.server.uploads import Upload
from engram.text import printable

OVER = ("done", "failed", "cancelled")
GRACE = 5.0  # seconds for a lesson to end by itself
KILLED = (
    "The lesson was ended from outside, or for want of memory, before anything was saved. The model is as it was. "
    "The pictures are not kept: send them again."
)
KILLED_LATE = (
    "The lesson was ended from outside when the model was saved already, as generation {}. "
    "Look at it before you send the pictures again."
)

log = logging.getLogger("engram.server")


class Cancelled(Exception):
    """The lesson is no longer wanted."""


@dataclass(eq=False)
class Job:
    """A lesson, and what became of it."""

    id: str
    created: str
    classes: dict[str, int]
    digest: str
    upload: Upload | None  # None once it is over
    key: str | None = None
    state: str = "queued"
    progress: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    problem: str | None = None
    saved: bool = False  # whether the model is another, though the lesson failed
    cancelled: threading.Event = field(default_factory=threading.Event)
    process: BaseProcess | None = None

    def told(self) -> shapes.Lesson:
        """As it is told to those who ask."""
        return shapes.Lesson.model_validate(self, from_attributes=True)


class Jobs:
    """The lessons of a server, in the order they came."""

    def __init__(self, snapshots: Snapshots, config: Config, decoders: Decoders) -> None:
        self.snapshots, self.folder = snapshots, snapshots.folder
        self.config, self.decoders = config, decoders
        self._jobs: dict[str, Job] = {}
        self._keys: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lessons", daemon=True)
        self._thread.start()

    def add(self, upload: Upload, key: str | None = None) -> Job:
        """Queue a lesson. What was sent before with the same key is not queued again, unless nothing came of it."""
        with self._changed:
            before = self._keys.get(key) if key is not None else None
            if before is not None:
                upload.close()
                if before.digest != upload.digest:
                    raise Problem(422, "This Idempotency-Key came with other pictures before. Use a new one.")
                return before
            self._check_room(upload)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            progress = Standing("queued", 0, len(upload)).to_json()
            job = Job(secrets.token_hex(8), now, upload.counts(), upload.digest, upload, key, progress=progress)
            self._jobs[job.id] = job
            if key is not None:
                self._keys[key] = job
            self._waiting.append(job)
            self._drop_old()
            self._changed.notify_all()
            return job

    def all(self) -> list[Job]:
        """Every lesson that is remembered, oldest first."""
        with self._changed:
            return list(self._jobs.values())

    def get(self, id: str) -> Job:
        """One of them."""
        with self._changed:
            if id not in self._jobs:
                raise Problem(404, "There is no such lesson, or it is long over. GET /api/jobs lists those there are.")
            return self._jobs[id]

    def cancel(self, id: str) -> Job:
        """Stop a lesson that is not over."""
        job = self.get(id)
        with self._changed:
            if job.state in OVER:
                taught = " What it taught can be rolled back." if job.state == "done" else ""
                raise Problem(409, f"This lesson is over: it is {job.state}.{taught}")
            job.cancelled.set()
            if job in self._waiting:
                self._waiting.remove(job)
                self._end(job, "cancelled")
            elif job.process is not None:
                _stop(job.process)
        return job

    def forget(self) -> None:
        """Forget the lessons that are over: by whatever names a class had, they would tell of it."""
        with self._changed:
            for job in [each for each in self._jobs.values() if each.state in OVER]:
                self._drop(job)

    def close(self) -> None:
        """Stop all of them."""
        with self._changed:
            self._closing = True
            for job in self._jobs.values():
                job.cancelled.set()
                if job.process is not None and job.state not in OVER:
                    _stop(job.process)
            self._changed.notify_all()
        self._thread.join(2 * GRACE)
        for job in self.all():
            if job.state not in OVER:
                self._end(job, "cancelled")

    def counts(self) -> dict[str, int]:
        """How many are in each state."""
        states = [job.state for job in self.all()]
        return {state: states.count(state) for state in ("queued", "learning", *OVER)}

    def _check_room(self, upload: Upload) -> None:
        held = sum(job.upload.bytes for job in self._jobs.values() if job.upload is not None)
        full = len(self._waiting) >= self.config.queue or (held and held + upload.bytes > self.config.lesson_bytes)
        if full or self._closing:
            upload.close()
            raise too_many("Other lessons are waiting already. Try again when one of them is over.", self._wait())

    def _wait(self) -> float:
        """Seconds until there may be room, as far as the lesson under way can tell."""
        learning = next((job for job in self._jobs.values() if job.state == "learning"), None)
        left = (learning.progress or {}).get("seconds_left") if learning is not None else None
        return min(600.0, max(5.0, left or 0.0))

    def _drop_old(self) -> None:
        over = [job for job in self._jobs.values() if job.state in OVER]
        for job in over[: max(0, len(over) - self.config.finished)]:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        del self._jobs[job.id]
        self._release_key(job)

    def _release_key(self, job: Job) -> None:
        """Let the next lesson that comes with the same key be another."""
        if job.key is not None:
            self._keys.pop(job.key, None)
            job.key = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                job = self._waiting.popleft()
                job.state = "learning"
            try:
                result = self._carry_out(job)
            except Cancelled:
                self._end(job, "cancelled")
            except Problem as error:  # there is no model that could learn
                self._end(job, "failed", problem=str(error.detail))
            except EngramError as error:
                self._end(job, "failed", problem=sentence_of(error, self.folder.path))
            except Exception as error:
                log.error("A lesson failed.", exc_info=error)
                self._end(job, "failed", problem=FAILED)
            else:
                self._end(job, "done", result=result)

    def _end(self, job: Job, state: str, *, result: dict[str, Any] | None = None, problem: str | None = None) -> None:
        with self._changed:
            if job.upload is not None:
                job.upload.close()
            job.upload = job.process = None
            job.result, job.problem, job.progress = result, problem, None
            job.state = state
            if state != "done" and not job.saved:
                self._release_key(job)

    def _carry_out(self, job: Job) -> dict[str, Any]:
        upload = job.upload
        assert upload is not None
        while True:
            side = self._side()
            try:
                return self._carry_out_at(job, upload, side)
            except EngramError:
                if self._side() == side:
                    raise
                # While it waited, another has made the model, which sees pictures of another size.

    def _carry_out_at(self, job: Job, upload: Upload, side: int) -> dict[str, Any]:
        images, kept, skipped = self._decode(job, upload, side)
        names = tuple(sorted(set(upload.classes)))
        _check_left(names, {upload.classes[number] for number in kept}, skipped)
        lesson = Lesson(
            folder=str(self.folder.path.absolute()),
            side=side,
            class_names=names,
            labels=tuple(names.index(upload.classes[number]) for number in kept),
            seen_bytes=upload.bytes,
            epochs=self.config.epochs,
            device=self.config.device,
            nice=self.config.nice,
            busy_seconds=self.config.busy_seconds,
        )
        result = self._teach(job, lesson, images)
        return {**result, "skipped": skipped}

    def _side(self) -> int:
        """The side of the squares that pictures are decoded to: the model's, or that of a new one's network."""
        return self.snapshots.current().size if self.folder.exists() else VARIANTS[DEFAULT_PRETRAINED].size

    def _decode(self, job: Job, upload: Upload, side: int) -> tuple[list[Tensor], list[int], list[dict[str, str]]]:
        """The pictures that can be read, which they are, and why the others cannot."""
        images: list[Tensor] = []
        kept: list[int] = []
        skipped: list[dict[str, str]] = []
        standing = Standing("read", 0, len(upload))
        for number, name in enumerate(upload.names):
            if job.cancelled.is_set():
                raise Cancelled
            try:
                images.append(self.decoders.decode(upload.content(number), side))
                kept.append(number)
            except UnreadableImage as error:
                skipped.append({"name": printable(name), "class": upload.classes[number], "reason": str(error)})
            standing.advance(1)
            job.progress = standing.to_json()
        return images, kept, skipped

    def _teach(self, job: Job, lesson: Lesson, images: list[Tensor]) -> dict[str, Any]:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("forkserver").Process(target=work, args=(theirs, lesson), daemon=True)
        with self._changed:
            if job.cancelled.is_set():
                raise Cancelled
            process.start()
            job.process = process
        theirs.close()
        try:
            outcome = self._listen(job, ours, images)
        finally:
            ours.close()
            process.kill()
            process.join()
        if "done" in outcome:
            result: dict[str, Any] = outcome["done"]
            return result
        if "failed" in outcome:
            raise EngramError(outcome["failed"])
        now = generation_of(self.folder)
        job.saved = "held" in outcome and now != outcome["held"]
        if job.cancelled.is_set() and not job.saved:
            raise Cancelled
        raise EngramError(KILLED_LATE.format(now) if job.saved else KILLED)

    def _listen(self, job: Job, pipe: Connection, images: list[Tensor]) -> dict[str, Any]:
        """Send the images, then collect what the process reports besides progress; no outcome, if it was killed."""
        said: dict[str, Any] = {}
        try:
            for image in images:  # one by one: 2,000 of them are 300 MB, of which no second copy is made
                pipe.send_bytes(image.flatten().numpy().data)
            images.clear()
            while not {"done", "failed"} & said.keys():
                said |= json.loads(pipe.recv_bytes())
                if "progress" in said:
                    job.progress = said.pop("progress")
                    job.state = "queued" if job.progress["phase"] == WAITING else "learning"
        except (EOFError, OSError):
            pass
        return said


def _stop(process: BaseProcess) -> None:
    """Ask a process to end, which leaves things clean, and do not wait for it for long."""
    process.terminate()
    later = threading.Timer(GRACE, process.kill)
    later.daemon = True
    later.start()


def _check_left(names: tuple[str, ...], readable: set[str], skipped: list[dict[str, str]]) -> None:
    """A class of which nothing can be read is a mistake; the others would be taught without it."""
    for name in names:
        if name not in readable:
            first = next(left for left in skipped if left["class"] == name)
            raise DataError(
                f"None of the pictures of the class '{printable(name)}' can be read. {first['name']}: {first['reason']} "
                "Replace them, or leave the class out."
            )
