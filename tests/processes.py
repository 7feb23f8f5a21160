"""Several ranks, started as torchrun would start them but faster."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from commands import SECONDS, Command, warm
from torch.distributed import TCPStore

from engram.network import parallel


@contextmanager
def launched(size: int) -> Iterator[list[dict[str, str]]]:
    """The variables that torchrun sets in each of `size` processes; like torchrun, it serves their store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield [
        {**shared, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        for rank in map(str, range(size))
    ]


def together(work: Callable[..., Any], *arguments: Any, size: int = 2, enters: bool = True) -> list[Any]:
    """The result of `work(*arguments)`, a function of a module in this folder, in each of `size` processes.

    It is called inside a process group, unless it enters one itself.
    """
    with launched(size) as variables:
        pipes = [warm().Pipe(duplex=False) for _ in variables]
        processes = [
            warm().Process(target=_work, args=(there, each, work, arguments, enters))
            for (_, there), each in zip(pipes, variables, strict=True)
        ]
        for process in processes:
            process.start()
        for _, there in pipes:
            there.close()
        try:
            return [_received(here) for here, _ in pipes]
        finally:
            for process in processes:
                process.join(30)
                process.kill()


def _received(pipe: Connection) -> Any:
    if not pipe.poll(SECONDS):
        pytest.fail("a process gave no answer")
    return pickle.loads(pipe.recv_bytes())


def _work(
    pipe: Connection, variables: dict[str, str], work: Callable[..., Any], arguments: Sequence[Any], enters: bool
) -> None:
    os.environ.update(variables)
    with parallel.process_group("cpu") if enters else nullcontext():
        answer = work(*arguments)
    pipe.send_bytes(pickle.dumps(answer))  # by value, where multiprocessing's own would share tensors' memory


@contextmanager
def ranks(*arguments: str, cwd: Sequence[Path]) -> Iterator[list[Command]]:
    """`engram` with these arguments, running in several processes, one in each of the folders."""
    with launched(len(cwd)) as variables:
        started = [Command(*arguments, cwd=place, **each) for place, each in zip(cwd, variables, strict=True)]
        try:
            yield started
        finally:
            for each in started:
                each.process.kill()


def engram_together(*arguments: str, cwd: Sequence[Path]) -> list[subprocess.CompletedProcess[str]]:
    """The exit code and output of `engram` with these arguments in each of several processes."""
    with ranks(*arguments, cwd=cwd) as started:
        return [each.wait() for each in started]
