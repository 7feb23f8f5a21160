"""The application, and the uvicorn server that runs it."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import engram
from engram.errors import EngramError
from engram.model import ModelFolder
from engram.server.api import api, edits, health
from engram.server.classifying import classifying
from engram.server.config import Config
from engram.server.connections import CLOSE, HTTPServer, address_of
from engram.server.evidence import measures
from engram.server.problems import HEADERS, MEDIA_TYPE, as_problem, problem_response
from engram.server.services import Services
from engram.text import printable

PAGE = Path(__file__).parent / "page"
PRELOADED = ["engram.server.decoding", "engram.server.updating"]  # by the fork server
TOKEN = "ENGRAM_TOKEN"  # environment variable
SPOOLED = 1 << 20  # bytes from which an uploaded file is on disk, and stays open until its request ends
OTHER_FILES = 512  # that the server may have open: libraries, pipes to processes, uploads of jobs
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": "What is wrong.", "content": {MEDIA_TYPE: {}}}
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 422, 429, 500, 503, 507)
}


@dataclass(frozen=True)
class RequestMiddleware:
    """Checks, limits and measures every request, and adds security headers to every response."""

    app: ASGIApp
    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self.services.authenticator.check(scope)
            if scope["state"]["authenticated"]:
                self.services.connections.authenticated(address_of(scope))
            with self.services.limits.admit(scope, receive) as limited_receive:
                await self.app(scope, limited_receive, send_with_headers)
        except Exception as error:  # Starlette's own handler of any exception is outside of this middleware
            if status:
                raise
            problem = as_problem(error, self.services.folder.path)
            problem.headers = {**(problem.headers or {}), **CLOSE}
            await problem_response(problem)(scope, receive, send_with_headers)
        finally:
            self.services.metrics.record(scope, status or 500, time.perf_counter() - begin)


def make_app(folder: ModelFolder, config: Config | None = None) -> FastAPI:
    """The ASGI application for a model's folder, which need not exist yet."""
    config = config or Config()
    folder = ModelFolder(folder.path.absolute())  # error messages must not contain it: a relative path is too short
    forkserver.set_forkserver_preload(PRELOADED)
    services = Services(folder, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(services.loader.watch())
        yield
        watching.cancel()
        await run_in_threadpool(services.close)

    async def handle(_: Request, error: Exception) -> JSONResponse:
        return problem_response(as_problem(error, folder.path))

    app = FastAPI(
        title="engram",
        version=engram.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=PROBLEMS,
        exception_handlers=dict.fromkeys((HTTPException, RequestValidationError, EngramError), handle),
        middleware=[Middleware(RequestMiddleware, services=services)],
    )
    app.state.services = services
    for router in (health, classifying, api, edits, measures):
        app.include_router(router)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/static", StaticFiles(directory=PAGE), name="static")
    return app


def make_server(folder: ModelFolder, config: Config) -> HTTPServer:
    """A server to `run()`. SIGINT and SIGTERM end it after the responses in progress."""
    _allow_open_files(config.connections + config.all_body_bytes // SPOOLED + OTHER_FILES)
    os.environ.pop(TOKEN, None)  # decoders inherit the environment, and decode untrusted images
    app = make_app(folder, config)
    try:
        forkserver.ensure_running()  # now, so that the first image does not wait for it
    except OSError as error:  # the path of its socket may have a hundred characters
        place = printable(tempfile.gettempdir())
        raise EngramError(
            f"The temporary folder {place} cannot be used: {error}. Name a shorter path in TMPDIR."
        ) from error
    return HTTPServer(app, config, app.state.services.connections)


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files, usually 1,024: with all of them open, no connection could be accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
