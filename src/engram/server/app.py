"""`make_app`: all parts of the server put together, and what it answers."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

import engram
from engram.data.images import UnreadableImage
from engram.model import ModelFolder, inspect
from engram.server import shapes
from engram.server.batching import Batches
from engram.server.config import Config
from engram.server.decoding import Decoders
from engram.server.edits import add_edits
from engram.server.forms import CLASSES, FILES, described, files_of, form_of, name_of, upload_of
from engram.server.jobs import Jobs
from engram.server.limits import Limits
from engram.server.metrics import Measured, Metrics
from engram.server.problems import NoModel, Problem, handle_problems
from engram.server.security import Guard, Security
from engram.server.sessions import add_sessions
from engram.server.snapshot import Snapshot, Snapshots

PAGE = Path(__file__).parent / "page"
PRELOADED = ["engram.server.decoding", "engram.server.teaching"]  # by the process that all others are begun from
UNCALIBRATED = (
    "This model's probabilities were never calibrated, so no picture can be rejected by them. Leave out reject, or "
    "teach the model more pictures."
)
PROBLEM = {"description": "What is wrong, in a sentence.", "content": {"application/problem+json": {}}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: PROBLEM for status in (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 422, 429, 500, 503, 507)
}


def make_app(folder: ModelFolder, config: Config | None = None) -> FastAPI:
    """The server of a model's folder, which may be yet to be made."""
    config = config or Config()
    # A whole path is found in a sentence; a folder's name alone, or a dot, would also be found in other words.
    folder = ModelFolder(folder.path.absolute())
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    parts = Parts(folder, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        parts.batches.start()
        try:
            yield
        finally:
            await parts.batches.stop()
            await run_in_threadpool(parts.close)

    app = FastAPI(
        title="engram", version=engram.__version__, docs_url=None, redoc_url=None, lifespan=lifespan, responses=PROBLEMS
    )
    app.state.parts = parts
    handle_problems(app, folder.path)
    add_health(app, parts)
    add_answers(app, parts)
    add_lessons(app, parts)
    add_edits(app, folder, parts.jobs)
    add_sessions(app, parts.guard)
    add_page(app)
    app.add_middleware(Limits, config=config)  # the one added last stands first
    app.add_middleware(Security, guard=parts.guard)
    app.add_middleware(Measured, metrics=parts.metrics)
    return app


class Parts:
    """What the answers are made with."""

    def __init__(self, folder: ModelFolder, config: Config) -> None:
        self.folder, self.config = folder, config
        self.metrics = Metrics()
        self.guard = Guard(config)
        self.snapshots = Snapshots(folder, config.device)
        self.decoders = Decoders(config)
        self.batches = Batches(config, self.metrics.batches.observe)
        self.jobs = Jobs(self.snapshots, config, self.decoders)
        self.metrics.watch(self.jobs, self.decoders, self.snapshots)

    def snapshot(self) -> Snapshot:
        """The model as it is now."""
        return self.snapshots.current()

    def close(self) -> None:
        """End all processes."""
        self.jobs.close()
        self.decoders.close()


def add_health(app: FastAPI, parts: Parts) -> None:
    """Whether the server lives, whether it can answer, and its numbers."""

    @app.get("/livez")
    async def live() -> shapes.Alive:
        """Whether the server runs."""
        return shapes.Alive()

    @app.get("/readyz")
    def ready() -> shapes.Ready:
        """Whether there is a model that is whole."""
        return shapes.Ready(generation=parts.snapshot().generation, damaged=parts.snapshots.damaged)

    @app.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Numbers for Prometheus."""
        with suppress(NoModel):  # what they say of the model is of now, not of when somebody last asked it
            parts.snapshot()
        return Response(parts.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_answers(app: FastAPI, parts: Parts) -> None:
    """What the model knows, and what it says of pictures."""

    @app.get("/api/model")
    def model() -> shapes.Inventory:
        """What the model knows and keeps."""
        if not parts.folder.exists():
            raise NoModel(404)
        return shapes.Inventory(**inspect(parts.folder).to_json())

    @app.post("/api/classify", openapi_extra=described(files=FILES))
    async def classify(
        request: Request,
        top: Annotated[int, Query(ge=1, le=100)] = 5,
        reject: Annotated[float, Query(ge=0, le=1, allow_inf_nan=False)] = 0.0,
    ) -> shapes.Predictions:
        """What the model says of pictures: the likeliest classes of each; rejected, if it is probably none of them."""
        await run_in_threadpool(parts.snapshot)  # without a model there is no need to send pictures
        form = await form_of(request, parts.config)
        try:
            files = files_of(form, parts.config)
            snapshot = await run_in_threadpool(parts.snapshot)
            if reject and not snapshot.model.is_calibrated:
                raise Problem(409, UNCALIBRATED)
            few = asyncio.Semaphore(2 * parts.config.decoders)  # of one request in memory at a time
            said = [_said(parts, snapshot, file, top, reject, few) for file in files]
            predictions = await asyncio.gather(*said)
        finally:
            await form.close()
        return shapes.Predictions(
            generation=snapshot.generation, calibrated=snapshot.model.is_calibrated, predictions=predictions
        )


async def _said(
    parts: Parts, snapshot: Snapshot, file: UploadFile, top: int, reject: float, few: asyncio.Semaphore
) -> shapes.Predicted | shapes.Unreadable:
    name, loop = name_of(file), asyncio.get_running_loop()
    try:
        async with few:
            content = await file.read()
            image = await loop.run_in_executor(parts.decoders.threads, parts.decoders.decode, content, snapshot.size)
    except UnreadableImage as error:
        parts.metrics.pictures.labels("unreadable").inc()
        return shapes.Unreadable(name=name, problem=str(error))
    answers = await parts.batches.ask(snapshot, image, top)
    parts.metrics.pictures.labels("answered").inc()
    return shapes.Predicted.of(name, answers, top, reject)


def add_lessons(app: FastAPI, parts: Parts) -> None:
    """Lessons: begun, watched, stopped."""

    @app.post("/api/teach", status_code=202, openapi_extra=described(files=FILES, classes=CLASSES))
    async def teach(
        request: Request, idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None
    ) -> shapes.Lesson:
        """Teach the model pictures, each with the class in the same place. It is done in the background."""
        form = await form_of(request, parts.config)
        try:
            upload = await upload_of(form, parts.config)
        finally:
            await form.close()
        job = await run_in_threadpool(parts.jobs.add, upload, idempotency_key)
        return job.told()

    @app.get("/api/jobs")
    def jobs() -> shapes.Lessons:
        """All lessons that are remembered, oldest first."""
        return shapes.Lessons(jobs=[job.told() for job in parts.jobs.all()])

    @app.get("/api/jobs/{id}")
    def job(id: str) -> shapes.Lesson:
        """One lesson."""
        return parts.jobs.get(id).told()

    @app.delete("/api/jobs/{id}")
    def cancel(id: str) -> shapes.Lesson:
        """Stop a lesson. The model stays as it is."""
        return parts.jobs.cancel(id).told()


def add_page(app: FastAPI) -> None:
    """The page for people."""

    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/static", StaticFiles(directory=PAGE), name="static")
