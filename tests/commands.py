"""The command line in a process of its own, or in this one.

A fresh interpreter needs two seconds to import torch, so only tests of the start ask for one. Other commands are forked
from one process that has imported everything, or run in the process of the test.
"""

from __future__ import annotations

import functools
import importlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
IMPORTED = ["pytest", "torch._dynamo"]
IMPORTED += ["engram.cli.app", "engram.model", "engram.experiments.workers"]
SECONDS = 180  # that a command may take


@functools.cache
def warm() -> BaseContext:
    """A context whose processes are forks of a process that has imported everything."""
    if sys.platform != "linux":  # elsewhere libraries that were loaded before a fork may not work after it
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT):  # of one thread: a fork would lose a second
        forkserver.ensure_running()
    return context


class Command:
    """`engram` with these arguments, running in the folder `cwd`; if it leads, in a process group of its own."""

    def __init__(self, *arguments: str, cwd: Path, leads: bool = False, **environment: str) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.arguments = arguments
        self.process = warm().Process(
            target=be_engram, args=(arguments, cwd, Path(self.place.name), leads, environment)
        )
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """Its exit code, as `subprocess.Popen` gives it; None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Wait for its end; its exit code and output."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            pytest.fail(f"the command did not end within {seconds} seconds")
        stdout, stderr = (_written(Path(self.place.name) / name) for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, stdout, stderr)


def _written(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def be_engram(
    arguments: tuple[str, ...], cwd: Path, place: Path, leads: bool, environment: dict[str, str] | None = None
) -> None:
    """Run `python -m engram` in this process, with its output in files in `place`."""
    if leads:
        os.setsid()
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.update(ENVIRONMENT, **(environment or {}))
    if environment and "ENGRAM_PLUGINS" in environment:  # as engram.methods does, which is imported already
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        for plugin in environment["ENGRAM_PLUGINS"].split(","):
            importlib.import_module(plugin)
    sys.argv = ["engram", *arguments]
    runpy.run_module("engram", run_name="__main__", alter_sys=True)


def engram(*arguments: str, cwd: Path, fresh: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `engram` with these arguments in the folder `cwd`; `fresh`: in a new interpreter."""
    if not fresh:
        return Command(*arguments, cwd=cwd, **environment).wait()
    command, variables = [sys.executable, "-m", "engram", *arguments], {**ENVIRONMENT, **environment}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=SECONDS)


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def engram_here(*arguments: object, cwd: Path | None = None, columns: int = 200) -> Ended:
    """Run `engram` in this process: fast, where no signal, terminal, stdin or name that is not text is tested."""
    from engram.cli import main

    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        chdir(cwd or "."),
        mock.patch.dict(os.environ, COLUMNS=str(columns)),
        mock.patch.object(sys, "argv", ["engram", *map(str, arguments)]),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return Ended(int(end.value.code or 0), stdout.getvalue(), stderr.getvalue())


def wait_for_the_end_of_all(group: int) -> None:
    """Wait until the process group is empty: no worker is left behind."""
    for _ in range(750):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("a process was left behind")
