"""Errors as `application/problem+json` (RFC 9457): a message to act on, never a traceback or a path."""

from __future__ import annotations

import errno
import http
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from engram.errors import BusyError, DataError, EngramError, UsageError
from engram.text import printable

MEDIA_TYPE = "application/problem+json"
LONGEST_MESSAGE = 500  # characters
NO_MODEL = "There is no model yet. Teach it some images."
MESSAGES = {
    400: "The request is malformed. See /openapi.json.",
    404: "There is nothing at this address. See /openapi.json.",
    405: "This address does not support this method. See /openapi.json.",
    500: "Internal error. Saved models are intact. See the server's log.",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}

log = logging.getLogger("engram.server")


class Problem(HTTPException):
    """An error response whose `detail` is written for the client."""


def too_many(detail: str, seconds: float, headers: Mapping[str, str] | None = None) -> Problem:
    """A 429 response that asks the client to retry after some seconds."""
    return Problem(429, detail, {"Retry-After": str(max(1, round(seconds))), **(headers or {})})


def problem_response(error: StarletteHTTPException) -> JSONResponse:
    """The response for an HTTP exception; only a `Problem` may word its own detail."""
    status = error.status_code
    detail = error.detail if isinstance(error, Problem) else MESSAGES.get(status, MESSAGES[400])
    body = {"type": "about:blank", "title": http.HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(body, status, headers={**HEADERS, **(error.headers or {})}, media_type=MEDIA_TYPE)


def as_problem(error: Exception, folder: Path) -> StarletteHTTPException:
    """Any exception as an HTTP exception. The path of the model is replaced by MODEL."""
    match error:
        case StarletteHTTPException():
            return error
        case RequestValidationError():
            return Problem(422, _invalid(error))
        case _ if _is_disk_full(error):
            log.error("The disk is full: %s", error)
            return Problem(507, "The server's disk is full. Nothing was changed. Its operator has to free space.")
        case MemoryError():
            return Problem(503, "The server has too little memory for this. Send fewer images at a time.")
        case BusyError():
            return Problem(409, "Another process is changing the model. Try again later.", {"Retry-After": "5"})
        case EngramError():
            status = 422 if isinstance(error, UsageError) else 409 if isinstance(error, DataError) else 500
            return Problem(status, _public_message(error, folder))
    log.error("Internal error.", exc_info=error)
    return Problem(500, MESSAGES[500])


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def _public_message(error: EngramError, folder: Path) -> str:
    message = str(error)
    for path in sorted({shlex.quote(str(folder)), printable(folder), str(folder)}, key=len, reverse=True):
        message = message.replace(path, "MODEL")
    return printable(message)[:LONGEST_MESSAGE]


def _invalid(error: RequestValidationError) -> str:
    """The first invalid field of a request, without its value."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return "The body is not JSON. See /openapi.json."
    field = ".".join(printable(part) for part in first["loc"] if part not in ("body", "query", "path"))[:80]
    return f"{field or 'The body'}: {first['msg']}. See /openapi.json."
