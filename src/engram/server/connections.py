"""Connections: so many, and none that is held open by saying nothing, or by saying it slowly."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engram.server.config import Config
from engram.server.problems import SENTENCES, Problem, problem_response


def protocol(limits: Config) -> type[H11Protocol]:
    """How the server speaks HTTP, to be given to uvicorn, which has no such limits of its own."""

    class Impatient(H11Protocol):
        """Ends a connection whose next request does not begin in time, or whose answers are not taken."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.head: asyncio.TimerHandle | None = None  # until the next request's first lines are here
            self.unread: asyncio.TimerHandle | None = None  # until what was said is taken

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)  # which resumes writing

        def pause_writing(self) -> None:
            super().pause_writing()
            self.unread = self.loop.call_later(limits.answer_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.unread is not None:
                self.unread.cancel()

        def send_400_response(self, msg: str) -> None:
            answer = problem_response(Problem(400, SENTENCES[400]))
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _watch(self) -> None:
            """A clock runs from the first byte that could begin a request until its head is whole."""
            begun = self.cycle is not None and not self.cycle.response_complete
            if begun:
                self._unwatch()
            elif self.head is None and self.timeout_keep_alive_task is None:
                self.head = self.loop.call_later(limits.head_seconds, self.transport.abort)

        def _unwatch(self) -> None:
            if self.head is not None:
                self.head.cancel()
                self.head = None

    return Impatient
