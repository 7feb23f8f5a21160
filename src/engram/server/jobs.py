"""Updates of the model as jobs: queued, run one at a time in a process, and remembered for a while."""

from __future__ import annotations

import json
import multiprocessing
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter
from torch import Tensor

from engram.data.images import UnreadableImage
from engram.data.scanning import SkippedFile
from engram.errors import DataError, EngramError
from engram.model import LearnOptions, UpdateResult
from engram.network import DEFAULT_PRETRAINED
from engram.network.pretrained import VARIANTS
from engram.server.config import Config
from engram.server.decoding import COSTLY_IMAGES, Decoders
from engram.server.inference import ModelLoader
from engram.server.problems import Problem, as_problem, too_many
from engram.server.updating import WAITING, JobProgress, UpdateRequest, run_update
from engram.server.uploads import Upload
from engram.text import printable

State = Literal["queued", "learning", "done", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
FINISHED = STATES[2:]
RESULT = TypeAdapter(UpdateResult)
KILL_SECONDS = 5.0  # after SIGTERM
KILLED = (
    "The update was killed, perhaps because memory ran out. The model is unchanged, and the images were deleted. "
    "Send them again."
)
KILLED_LATE = "The update was killed after it was saved as version {}. Check the model before you send it again."


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """An update and its outcome."""

    id: str
    state: State = "queued"
    created: str
    classes: dict[str, int]
    progress: JobProgress | None = None
    result: UpdateResult | None = None
    problem: str | None = None


@dataclass(eq=False, kw_only=True)
class Job:
    """A job with what only the server knows. `status` is replaced as a whole, so it can be read without a lock."""

    status: JobStatus
    upload: Upload | None  # None once it is finished
    digest: str
    key: str | None  # its Idempotency-Key
    bytes: int = 0  # of the status as JSON, once it is finished
    saved: bool = False  # it failed after a new version was saved
    cancelled: threading.Event = field(default_factory=threading.Event)
    process: BaseProcess | None = None
    future: Future[None] = field(init=False)

    @property
    def finished(self) -> bool:
        return self.status.state in FINISHED

    def set(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def stop(self) -> None:
        """Ask a running process to end, and kill it if it does not."""
        self.cancelled.set()
        if self.process is not None:
            self.process.terminate()
            timer = threading.Timer(KILL_SECONDS, self.process.kill)
            timer.daemon = True
            timer.start()


STATUS = TypeAdapter(JobStatus)


class Jobs:
    """The jobs of a server, oldest first; `on_learned` is called with the status of each successful one."""

    def __init__(
        self, loader: ModelLoader, config: Config, decoders: Decoders, on_learned: Callable[[JobStatus], None]
    ) -> None:
        self.loader, self.config, self.decoders, self.on_learned = loader, config, decoders, on_learned
        self.folder = loader.folder
        self._jobs: dict[str, Job] = {}
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, "jobs")

    def add(self, upload: Upload, key: str | None = None) -> JobStatus:
        """Queue an update, unless a queued, running or successful job has the same key."""
        with self._lock:
            same = next((job for job in self._jobs.values() if key is not None and job.key == key), None)
            if same is not None:
                upload.close()
                if same.digest != upload.digest:
                    raise Problem(422, "This Idempotency-Key was used with other images. Use a new one.")
                return same.status
            if self._is_full(upload):
                upload.close()
                raise too_many("Other updates are waiting. Try again when one has finished.", self._seconds_left())
            status = JobStatus(
                id=secrets.token_hex(8),
                created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                classes=dict(Counter(upload.classes)),
                progress=JobProgress("queued", 0, len(upload.names)),
            )
            job = self._jobs[status.id] = Job(status=status, upload=upload, digest=upload.digest, key=key)
            job.future = self._thread.submit(self._run, job)
            return status

    def all(self) -> list[Job]:
        with self._lock:
            return list(self._jobs.values())

    def page(self, limit: int, before: str | None = None) -> list[JobStatus]:
        """The newest jobs, or the newest that are older than another, oldest first."""
        with self._lock:
            ids = list(self._jobs)
            end = len(ids) if before is None else ids.index(self.get(before).status.id)
            return [self._jobs[id].status for id in ids[max(0, end - limit) : end]]

    def get(self, id: str) -> Job:
        with self._lock:
            if id not in self._jobs:
                raise Problem(404, "There is no such job, or it was deleted. GET /api/jobs lists all jobs.")
            return self._jobs[id]

    def cancel(self, id: str) -> JobStatus:
        with self._lock:
            job = self.get(id)
            if job.finished:
                raise Problem(409, f"This job is finished: {job.status.state}.")
            job.stop()
            if job.future.cancel():  # it has not started
                self._finish(job, "cancelled")
            return job.status

    def delete_finished(self) -> None:
        """Delete finished jobs."""
        with self._lock:
            self._jobs = {id: job for id, job in self._jobs.items() if not job.finished}

    def close(self) -> None:
        """Stop all jobs."""
        for job in self.all():
            job.stop()
        self._thread.shutdown(cancel_futures=True)
        for job in self.all():
            if not job.finished:
                self._finish(job, "cancelled")

    def count(self, state: State) -> int:
        return sum(job.status.state == state for job in self.all())

    def _is_full(self, upload: Upload) -> bool:
        held = sum(job.upload.bytes for job in self._jobs.values() if job.upload is not None)
        waiting = sum(not job.future.running() and not job.future.done() for job in self._jobs.values())
        return waiting >= self.config.queue or (held > 0 and held + upload.bytes > self.config.queue_bytes)

    def _seconds_left(self) -> float:
        """An estimate of the time until the running job is finished."""
        running = [job.status.progress for job in self._jobs.values() if job.status.state == "learning"]
        return min(600.0, max([5.0, *(each.seconds_left or 0.0 for each in running if each is not None)]))

    def _run(self, job: Job) -> None:
        job.set(state="learning")
        try:
            result = self._update(job)
            self.loader.refresh()  # the update is done when its version answers
        except CancelledError:
            self._finish(job, "cancelled")
        except Exception as error:
            self._finish(job, "failed", problem=as_problem(error, self.folder.path).detail)
        else:
            self._finish(job, "done", result=result)
            self.on_learned(job.status)

    def _finish(self, job: Job, state: State, **outcome: Any) -> None:
        with self._lock:
            if job.upload is not None:
                job.upload.close()
            job.upload = job.process = None
            if state != "done" and not job.saved:
                job.key = None  # it may be sent again
            job.set(state=state, progress=None, **outcome)
            job.bytes = len(STATUS.dump_json(job.status))
            self._delete_old()

    def _delete_old(self) -> None:
        """Delete the oldest finished jobs above the limits of number and bytes, but not the last one."""
        kept = total = 0
        for id, job in reversed(list(self._jobs.items())):
            if job.finished:
                kept, total = kept + 1, total + job.bytes
                if kept > max(1, self.config.finished_jobs) or (kept > 1 and total > self.config.finished_bytes):
                    del self._jobs[id]

    def _update(self, job: Job) -> UpdateResult:
        while True:
            size = self._image_size()
            try:
                return self._update_at(job, size)
            except EngramError:
                if self._image_size() == size:
                    raise
                # Another process created the model meanwhile, with another image size.

    def _image_size(self) -> int:
        return self.loader.current().image_size if self.folder.exists() else VARIANTS[DEFAULT_PRETRAINED].size

    def _update_at(self, job: Job, image_size: int) -> UpdateResult:
        upload = job.upload
        assert upload is not None
        images, skipped = self._decode(job, upload, image_size)
        classes = [name for index, name in enumerate(upload.classes) if index not in skipped]
        for index, each in skipped.items():
            if (name := upload.classes[index]) not in classes:
                raise DataError(
                    f"No image of the class '{printable(name)}' can be read. {each} "
                    "Replace the images, or remove the class."
                )
        names = tuple(sorted(set(classes)))
        request = UpdateRequest(
            folder=self.folder,
            options=LearnOptions(epochs=self.config.epochs, device=self.config.device, image_size=image_size),
            class_names=names,
            labels=tuple(map(names.index, classes)),
            paths=tuple(Path(name) for index, name in enumerate(upload.names) if index not in skipped),
            seen_bytes=upload.bytes,
            lock_seconds=self.config.lock_seconds,
            nice=self.config.nice,
        )
        result = self._run_process(job, request, images)
        read = [index for index in range(len(upload.names)) if index not in skipped]
        doubtful = [{**each, "index": read[each["index"]]} for each in result["doubtful"]]
        return RESULT.validate_python({**result, "doubtful": doubtful, "skipped": tuple(skipped.values())})

    def _decode(self, job: Job, upload: Upload, image_size: int) -> tuple[list[Tensor], dict[int, SkippedFile]]:
        """The images, and the files that cannot be read by their index."""
        images: list[Tensor] = []
        skipped: dict[int, SkippedFile] = {}
        progress = JobProgress("read", 0, len(upload.names))
        job.set(progress=progress)
        for index, name in enumerate(upload.names):
            if job.cancelled.is_set():
                raise CancelledError
            if self.decoders.debt(job.status.id) > self.config.update_decode_budget:
                raise DataError(COSTLY_IMAGES)
            try:
                images.append(self.decoders.decode(upload.content(index), image_size, job.status.id))
            except UnreadableImage as error:
                skipped[index] = SkippedFile(Path(printable(name)), str(error))
            progress.advance()
        return images, skipped

    def _run_process(self, job: Job, request: UpdateRequest, images: list[Tensor]) -> dict[str, Any]:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=run_update, args=(theirs, request), daemon=True)
        with self._lock:
            if job.cancelled.is_set():
                raise CancelledError
            process.start()
            job.process = process
        theirs.close()
        try:
            messages = self._communicate(job, ours, images)
        finally:
            ours.close()
            process.kill()
            process.join()
        if "failed" in messages:
            raise EngramError(messages["failed"])
        if "done" not in messages:
            version = self.folder.number_in_use()
            job.saved = "locked" in messages and version != messages["locked"]
            if job.cancelled.is_set() and not job.saved:
                raise CancelledError
            raise EngramError(KILLED_LATE.format(version) if job.saved else KILLED)
        result: dict[str, Any] = messages["done"]
        return result

    def _communicate(self, job: Job, pipe: Connection, images: list[Tensor]) -> dict[str, Any]:
        """Send the images, follow the progress, and return all other messages."""
        messages: dict[str, Any] = {}
        with suppress(EOFError, OSError):  # the process was killed
            for image in images:  # one by one, so that there is no second copy of all images
                pipe.send_bytes(image.flatten().numpy().data)
            images.clear()
            while not {"done", "failed"} & messages.keys():
                messages |= json.loads(pipe.recv_bytes())
                if "progress" in messages:
                    progress = JobProgress(**messages.pop("progress"))
                    job.set(progress=progress, state="queued" if progress.phase == WAITING else "learning")
        return messages
