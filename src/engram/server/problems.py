"""What goes wrong, told to whoever asked: a sentence to act on, as application/problem+json; never how we got there."""

from __future__ import annotations

import errno
import http
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from engram.errors import BusyError, DataError, EngramError, UsageError
from engram.text import printable

MEDIA_TYPE = "application/problem+json"
BUSY = "A lesson, or another command, is at work on the model. Try again when it is over."
AGAIN = 5  # seconds after which to try again what another's work is in the way of
LONGEST = 500  # characters of a sentence

SENTENCES = {
    400: "The request cannot be understood. Compare it with /openapi.json.",
    404: "There is nothing at this address. See /openapi.json for what there is.",
    405: "This address does not take such requests. See /openapi.json for those it takes.",
    500: "Something went wrong here that should not have. What was saved is whole. The server's log says more.",
}
STATUS = ((UsageError, 422), (DataError, 409))  # of our own errors; the first that fits counts

log = logging.getLogger("engram.server")


class Problem(HTTPException):
    """An answer that says what is wrong with a request, or with the server."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, sentence, dict(headers or {}))


class NoModel(Problem):
    """There is no model to ask, or none that is whole."""

    def __init__(self, status: int = 503, sentence: str = "There is no model yet. Teach it some pictures.") -> None:
        super().__init__(status, sentence)


def too_many(sentence: str, seconds: float, headers: Mapping[str, str] | None = None) -> Problem:
    """The answer to one more than there is room for."""
    return Problem(429, sentence, {"Retry-After": str(max(1, round(seconds))), **(headers or {})})


def no_room() -> Problem:
    """The answer where the disk is full."""
    return Problem(507, "The server's disk is full. Nothing was taken; whoever runs it has to make room.")


def problem_response(problem: StarletteHTTPException) -> JSONResponse:
    """A problem as an answer."""
    status = problem.status_code
    sentence = problem.detail if isinstance(problem, Problem) else SENTENCES.get(status, SENTENCES[400])
    body = {"type": "about:blank", "title": http.HTTPStatus(status).phrase, "status": status, "detail": sentence}
    return JSONResponse(body, status, headers=problem.headers, media_type=MEDIA_TYPE)


def sentence_of(error: EngramError, folder: Path) -> str:
    """The message of one of our own errors, without where the model lies."""
    message = str(error)
    for place in sorted({shlex.quote(str(folder)), printable(folder), str(folder)}, key=len, reverse=True):
        message = message.replace(place, "MODEL")
    return printable(message)[:LONGEST]


def as_problem(error: Exception, folder: Path) -> StarletteHTTPException:
    """Whatever was raised, as a problem."""
    if isinstance(error, StarletteHTTPException):
        return error
    if isinstance(error, RequestValidationError):
        return Problem(422, _invalid(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        log.error("The disk is full: %s", error)
        return no_room()
    if isinstance(error, BusyError):
        return Problem(409, BUSY, {"Retry-After": str(AGAIN)})
    if isinstance(error, EngramError):
        status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
        return Problem(status, sentence_of(error, folder))
    log.error("A request failed.", exc_info=error)
    return Problem(500, SENTENCES[500])


def handle_problems(app: FastAPI, folder: Path) -> None:
    """Let everything that is raised become a problem."""

    async def handle(_: Request, error: Exception) -> JSONResponse:
        return problem_response(as_problem(error, folder))

    for kind in (StarletteHTTPException, RequestValidationError, EngramError, Exception):
        app.add_exception_handler(kind, handle)


def _invalid(error: RequestValidationError) -> str:
    """What a request has in the wrong place. What it was is not repeated."""
    first: dict[str, Any] = dict(error.errors()[0])
    where = ".".join(printable(part) for part in first["loc"] if part not in ("body", "query", "path"))[:80]
    if first["type"] == "json_invalid":
        return "The body is not JSON. Send an object as /openapi.json describes it."
    return f"{where or 'The body'}: {first['msg']}. See /openapi.json for what is expected."
