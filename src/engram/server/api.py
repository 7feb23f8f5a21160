"""The HTTP routes, their schemas, and the parsing of uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from prometheus_client import generate_latest
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from typing_extensions import TypedDict  # pydantic needs it below Python 3.12

from engram.data.images import UnreadableImage
from engram.data.labelled import check_class_names
from engram.errors import DataError, UsageError
from engram.model import (
    Answer,
    ModelFolder,
    ModelSummary,
    Rejection,
    forget,
    inspect,
    merge,
    rejection,
    rename,
    rollback,
)
from engram.server.config import Config
from engram.server.connections import Connections, address_of
from engram.server.decoding import COSTLY_IMAGES, Decoders
from engram.server.inference import ACCEPT_ALL, Batcher, LoadedModel, ModelLoader
from engram.server.jobs import STATUS, Jobs, JobStatus, Upload
from engram.server.limits import RequestLimits
from engram.server.metrics import Metrics
from engram.server.problems import NoModel, Problem, too_many
from engram.server.security import COOKIE, Authenticator
from engram.server.webhook import Webhook
from engram.text import LONGEST_NAME, composed, printable, unfit

Result = TypeVar("Result")
LONGEST_FILE_NAME = 200  # characters in responses
LONGEST_NEW_NAME = 300  # characters of a class; models made on the command line may have longer ones
NAME_TOO_LONG = f"The name of a class may have {LONGEST_NEW_NAME} characters at most. Shorten it."


class Services:
    """The parts of a server that its routes use."""

    def __init__(self, folder: ModelFolder, config: Config) -> None:
        self.folder, self.config = folder, config
        self.webhook = Webhook(config.webhook, config.webhook_allow)  # first: it may refuse to start
        self.authenticator = Authenticator(config)
        self.connections = Connections(config)
        self.limits = RequestLimits(config)
        self.loader = ModelLoader(folder, config.device)
        self.decoders = Decoders(config, lambda: self.metrics.decoder_restarts.inc())
        self.batcher = Batcher(config, lambda size: self.metrics.batches.observe(size))
        self.jobs = Jobs(self.loader, config, self.decoders, self._learned)
        self.metrics = Metrics(self.jobs, self.loader)

    def close(self) -> None:
        """End all processes and threads."""
        self.jobs.close()
        self.decoders.close()
        self.batcher.close()
        self.webhook.close()

    def _learned(self, status: JobStatus) -> None:
        self.webhook.send("learned", job=STATUS.dump_python(status, mode="json"))


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Server = Annotated[Services, Depends(_services)]


def require_model(server: Server) -> None:
    """Without a model, there is nothing to describe or to edit."""
    if not server.folder.exists():
        raise NoModel(404)


health = APIRouter()
api = APIRouter(prefix="/api")
edits = APIRouter(prefix="/api", dependencies=[Depends(require_model)])


@health.get("/livez")
async def live() -> dict[str, str]:
    """Whether the server runs."""
    return {"status": "alive"}


@health.get("/readyz")
def ready(server: Server) -> dict[str, int | None]:
    """The version that answers, and a newer one that does not because it is damaged."""
    return {"generation": server.loader.current().generation, "damaged": server.loader.damaged}


@health.get("/metrics", response_class=Response)
def metrics(server: Server) -> Response:
    """Metrics for Prometheus."""
    with suppress(NoModel):  # update what the metrics say about the model
        server.loader.current()
    return Response(generate_latest(server.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


PredictedClass = TypedDict("PredictedClass", {"class": str, "probability": Annotated[float, Field(ge=0, le=1)]})


class ImagePrediction(BaseModel):
    """The most probable classes of an image, most probable first."""

    name: str = Field(description="The name of the uploaded file.")
    top: list[PredictedClass]
    rejected: bool = Field(description="It is probably of none of the classes, by `reject`.")


class UnreadableFile(BaseModel):
    """Why a file could not be classified."""

    name: str
    problem: str


class Predictions(BaseModel):
    """Predictions of one version, in the order of the files."""

    generation: int
    calibrated: bool = Field(description="Whether probabilities were calibrated on held-out images.")
    predictions: list[ImagePrediction | UnreadableFile]


def form_description(**fields: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a form. FastAPI's own form parameters allow 1,000 files at most."""
    properties = {name: {"type": "array", "minItems": 1, "items": items} for name, items in fields.items()}
    schema = {"type": "object", "required": list(fields), "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


Reject = Annotated[
    Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    | Annotated[str, Field(pattern=r"^(auto|[0-9]{1,2}(\.[0-9]{1,6})?%)$")],
    Query(),
]
FILE = {"type": "string", "format": "binary"}
CLASS_NAME = {"type": "string", "minLength": 1, "maxLength": LONGEST_NEW_NAME}


@api.post("/classify", openapi_extra=form_description(files=FILE))
async def classify(
    request: Request,
    server: Server,
    top: Annotated[int, Query(ge=1, le=100)] = 5,
    reject: Reject = 0.0,
) -> Predictions:
    """Predict the classes of images.

    `reject` is a probability, below which the most probable class is not accepted, or `auto` or a rate such as `5%`:
    about this share of images of unknown classes is accepted.
    """
    await run_in_threadpool(server.loader.current)  # without a model, do not read the upload
    async with read_form(request, server.config) as form:
        files = uploaded_files(form, server.config)
        loaded = await run_in_threadpool(server.loader.current)
        try:
            rejected = await run_in_threadpool(rejection, loaded.model, reject or None)
        except UsageError as error:  # the value is valid: it is the model that cannot reject by it
            raise Problem(409, str(error)) from error
        client = address_of(request.scope)
        predictions = await while_connected(
            request, [_predict(server, loaded, file, top, rejected, client) for file in files]
        )
    found = Predictions(generation=loaded.generation, calibrated=loaded.model.is_calibrated, predictions=predictions)
    server.webhook.send("classified", **found.model_dump(mode="json"))
    return found


async def _predict(
    server: Services, loaded: LoadedModel, file: UploadFile, top: int, rejected: Rejection, client: str
) -> ImagePrediction | UnreadableFile:
    answer = await predict_file(server, loaded, file, top, client, rejected)
    if isinstance(answer, UnreadableFile):
        return answer
    return ImagePrediction(
        name=file_name(file),
        top=[{"class": each.name, "probability": min(each.probability, 1.0)} for each in answer.top[:top]],
        rejected=rejected.rejects(answer.top[0].probability, answer.similarity),
    )


async def predict_file(
    server: Services, loaded: LoadedModel, file: UploadFile, top: int, client: str, rejected: Rejection = ACCEPT_ALL
) -> Answer | UnreadableFile:
    """At least the `top` most probable classes of an uploaded image, which a process decodes."""
    decoders = server.decoders
    try:
        async with decoders.turn(client):
            if wait := decoders.seconds_to_wait(client):
                raise too_many(COSTLY_IMAGES, wait)
            content, size = await file.read(), loaded.image_size
            loop = asyncio.get_running_loop()
            image = await loop.run_in_executor(decoders.threads, decoders.decode, content, size, client)
    except UnreadableImage as error:
        server.metrics.images.labels("unreadable").inc()
        return UnreadableFile(name=file_name(file), problem=str(error))
    answer = await server.batcher.predict(loaded, image, top, rejected)
    server.metrics.images.labels("answered").inc()
    return answer


async def while_connected(request: Request, work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order. An error, or the end of the connection, cancels what is left."""
    tasks = [asyncio.create_task(each) for each in work]
    results, end = asyncio.gather(*tasks), asyncio.ensure_future(request.receive())  # the body is read: it is the end
    try:
        await asyncio.wait((results, end), return_when=asyncio.FIRST_COMPLETED)
        if results.done():
            return results.result()
        raise Problem(400, "The connection was closed.")
    finally:
        for task in (*tasks, end):
            task.cancel()


@asynccontextmanager
async def read_form(request: Request, config: Config) -> AsyncIterator[FormData]:
    """The form that a request sends; its files are deleted at the end."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise Problem(415, "Send the images as multipart/form-data, in fields named 'files'.")
    try:
        form = await request.form(max_files=config.files, max_fields=config.files, max_part_size=4 * LONGEST_NEW_NAME)
    except (Problem, OSError):  # a limit was exceeded, or the disk is full
        raise
    except Exception as error:
        if "Too many" in (reason := str(getattr(error, "detail", ""))):
            raise Problem(413, f"A request may have {config.files:,} files at most. Send fewer at a time.") from None
        if "exceeded maximum size" in reason:
            raise Problem(422, NAME_TOO_LONG) from None
        raise Problem(400, "The form is malformed. See /openapi.json.") from None
    try:
        yield form
    finally:
        await form.close()


def uploaded_files(form: FormData, config: Config) -> list[UploadFile]:
    """The images of a form."""
    files = [file for file in form.getlist("files") if isinstance(file, UploadFile)]
    if not files or len(files) != len(form.getlist("files")):
        raise Problem(422, "Send at least one image as a file, in fields named 'files'.")
    for file in files:
        if (file.size or 0) > config.file_bytes:
            raise Problem(413, f"'{file_name(file)}' has more than {config.file_bytes:,} bytes. Make it smaller.")
    return files


def file_name(file: UploadFile) -> str:
    """The name of an uploaded file, for responses."""
    return printable(file.filename or "")[:LONGEST_FILE_NAME]


@api.post("/teach", status_code=202, openapi_extra=form_description(files=FILE, classes=CLASS_NAME))
async def teach(
    request: Request,
    server: Server,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> JobStatus:
    """Update the model with images, each with the class at the same position. This starts a job."""
    async with read_form(request, server.config) as form:
        upload = await _read_upload(form, server.config)
    return await run_in_threadpool(server.jobs.add, upload, idempotency_key)


def labelled_files(form: FormData, config: Config) -> tuple[list[UploadFile], list[str]]:
    """The images of a form and their classes."""
    files = uploaded_files(form, config)
    classes = [composed(name) for name in form.getlist("classes") if isinstance(name, str)]
    if not len(files) == len(classes) == len(form.getlist("classes")):
        raise Problem(422, f"There are {len(files)} files and {len(classes)} classes. Send one class for each file.")
    return files, classes


async def _read_upload(form: FormData, config: Config) -> Upload:
    files, classes = labelled_files(form, config)
    for name in classes:
        if problem := unfit(name) or (NAME_TOO_LONG if len(name) > LONGEST_NEW_NAME else None):
            raise Problem(422, problem)
    try:
        check_class_names(dict.fromkeys(classes, "sent"))
    except DataError as error:
        raise Problem(422, str(error)) from None
    upload = Upload()
    try:
        for file, class_name in zip(files, classes, strict=True):
            await run_in_threadpool(upload.add, file_name(file), class_name, await file.read())
    except BaseException:
        upload.close()
        raise
    return upload


@api.get("/jobs")
def list_jobs(
    server: Server,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
    before: Annotated[str | None, Query(max_length=100)] = None,
) -> dict[str, list[JobStatus]]:
    """The newest jobs that are remembered, oldest first; with `before`, those older than that job."""
    return {"jobs": server.jobs.page(limit, before)}


@api.get("/jobs/{id}")
def get_job(id: str, server: Server) -> JobStatus:
    """One job."""
    return server.jobs.get(id).status


@api.delete("/jobs/{id}")
def cancel_job(id: str, server: Server) -> JobStatus:
    """Stop a job. The model stays unchanged."""
    return server.jobs.cancel(id)


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class Forget(BaseModel, extra="forbid"):
    """Classes to forget."""

    classes: Annotated[list[Name], Field(min_length=1, max_length=10_000)]


class Rename(BaseModel, extra="forbid"):
    """A class and its new name."""

    old: Annotated[Name, Field(alias="from")]
    new: Annotated[str, Field(alias="to", min_length=1, max_length=LONGEST_NEW_NAME)]


class Merge(BaseModel, extra="forbid"):
    """A class and the class to merge it into."""

    name: Annotated[Name, Field(alias="class")]
    into: Name


class Rollback(BaseModel, extra="forbid"):
    """The version to use; null: the parent of the current one."""

    to: Annotated[int, Field(ge=1, le=2**53)] | None = None


class EditResponse(BaseModel, extra="allow"):
    """The model after an edit, and what was changed."""

    action: str
    generation: int
    classes: list[str]


@edits.get("/model")
def describe_model(server: Server) -> ModelSummary:
    """What the model knows and stores, as `engram inspect --json` prints it."""
    return inspect(server.folder)


@edits.post("/forget")
def forget_classes(body: Forget, server: Server) -> EditResponse:
    """Remove classes and all earlier versions. This cannot be undone."""
    edited = forget(server.folder, body.classes)
    server.jobs.delete_finished()
    server.webhook.clear()
    return EditResponse(**edited.to_json())


@edits.post("/rename")
def rename_class(body: Rename, server: Server) -> EditResponse:
    """Give a class another name."""
    return EditResponse(**rename(server.folder, body.old, body.new).to_json())


@edits.post("/merge")
def merge_classes(body: Merge, server: Server) -> EditResponse:
    """Merge a class into another."""
    return EditResponse(**merge(server.folder, body.name, body.into).to_json())


@edits.post("/rollback")
def roll_back(body: Rollback, server: Server) -> EditResponse:
    """Use an earlier version again."""
    return EditResponse(**rollback(server.folder, body.to).to_json())


class SignIn(BaseModel, extra="forbid"):
    """The server's token."""

    token: Annotated[str, Field(min_length=1, max_length=1_000)]


class Session(BaseModel):
    """Whether this client is authenticated, whether it has to be, and the name of the model's folder if it may know."""

    authenticated: bool
    token_required: bool
    model: str | None


@api.get("/session")
async def get_session(request: Request, server: Server) -> Session:
    """The session of this client."""
    authenticated = request.state.authenticated
    name = printable(server.folder.path.name) if authenticated else None
    return Session(authenticated=authenticated, token_required=server.authenticator.token_required, model=name)


@api.post("/session", status_code=204, response_class=Response)
async def sign_in(body: SignIn, request: Request, response: Response, server: Server) -> None:
    """Start a session, identified by a cookie."""
    if server.authenticator.token_required:
        server.authenticator.check_token(body.token.strip(), address_of(request.scope))
        session, seconds = server.authenticator.start_session(), round(server.config.session_seconds)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, session, max_age=seconds, secure=secure, httponly=True, samesite="strict")


@api.delete("/session", status_code=204, response_class=Response)
async def sign_out(request: Request, response: Response, server: Server) -> None:
    """End the session."""
    server.authenticator.end_session(request.cookies.get(COOKIE, ""))
    response.delete_cookie(COOKIE)
