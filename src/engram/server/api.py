"""Routes about the model, its updates and edits, the session and the server itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from prometheus_client import generate_latest
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from engram.model import EditResult, ModelSummary, forget, inspect, merge, rename, rollback
from engram.server.connections import address_of
from engram.server.jobs import JobStatus
from engram.server.security import COOKIE
from engram.server.services import Server, require_model
from engram.server.uploads import CLASS_NAME, FILE, LONGEST_NEW_NAME, form_description, read_form, read_upload
from engram.text import LONGEST_NAME, printable

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
    return {"version": server.loader.current().version, "damaged": server.loader.damaged}


@health.get("/metrics", response_class=Response)
def metrics(server: Server) -> Response:
    """Metrics for Prometheus."""
    return Response(generate_latest(server.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


@api.post("/teach", status_code=202, openapi_extra=form_description(files=FILE, classes=CLASS_NAME))
async def teach(
    request: Request,
    server: Server,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> JobStatus:
    """Update the model with images, each with the class at the same position. This starts a job."""
    async with read_form(request, server.config) as form:
        upload = await read_upload(form, server.config)
    return await run_in_threadpool(server.jobs.add, upload, idempotency_key)


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
    version: int
    classes: list[str]


@api.get("/model")
def describe_model(server: Server) -> ModelSummary | None:
    """What the model knows and stores, as `engram inspect --json` prints it; null if there is no model yet."""
    return inspect(server.folder) if server.folder.exists() else None


@edits.post("/forget")
def forget_classes(body: Forget, server: Server) -> EditResponse:
    """Remove classes and all earlier versions. This cannot be undone."""
    return _response(server, forget(server.folder, body.classes))


@edits.post("/rename")
def rename_class(body: Rename, server: Server) -> EditResponse:
    """Give a class another name."""
    return _response(server, rename(server.folder, body.old, body.new))


@edits.post("/merge")
def merge_classes(body: Merge, server: Server) -> EditResponse:
    """Merge a class into another."""
    return _response(server, merge(server.folder, body.name, body.into))


@edits.post("/rollback")
def roll_back(body: Rollback, server: Server) -> EditResponse:
    """Use an earlier version again."""
    return _response(server, rollback(server.folder, body.to))


def _response(server: Server, edited: EditResult) -> EditResponse:
    """An edit is acknowledged when the edited version answers."""
    server.loader.refresh()
    return EditResponse(**edited.to_json())


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
