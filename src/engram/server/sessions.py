"""Signing in and out with a browser."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from engram.server import shapes
from engram.server.security import Guard, cookie, session_of


class SignIn(BaseModel):
    """The token that the server was started with."""

    model_config = ConfigDict(extra="forbid")
    token: Annotated[str, Field(min_length=1, max_length=1_000)]


def add_sessions(app: FastAPI, guard: Guard) -> None:
    """Let a browser begin a session, look at it, and end it."""

    @app.get("/api/session")
    async def session(request: Request) -> shapes.Session:
        """Whether this browser is signed in, and whether it has to be."""
        return shapes.Session(authenticated=request.state.authenticated, token_required=guard.token_required)

    @app.post("/api/session", status_code=204)
    async def sign_in(order: SignIn, request: Request) -> Response:
        """Begin a session."""
        if not guard.token_required:
            return Response(status_code=204)
        guard.check_token(order.token.strip(), request.client.host if request.client else "")
        header = cookie(guard.begin(), secure=request.url.scheme == "https", seconds=guard.config.session_seconds)
        return Response(status_code=204, headers={"Set-Cookie": header})

    @app.delete("/api/session", status_code=204)
    async def sign_out(request: Request) -> Response:
        """End the session."""
        guard.end(session_of(request.headers))
        header = cookie("", secure=request.url.scheme == "https", seconds=0)
        return Response(status_code=204, headers={"Set-Cookie": header})
