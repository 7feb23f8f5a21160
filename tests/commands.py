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
import pty
import runpy
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
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
    """`engram` with these arguments, running in the folder `cwd`; if it leads, in a process group of its own.

    Its standard streams are files, or those that `streams` names.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        stdin: bytes = b"",
        streams: Mapping[str, str | Path] = MappingProxyType({}),
        encoding: str = "utf-8",
        leads: bool = False,
        **environment: str,
    ) -> None:
        self.arguments, self.encoding, self.folder = arguments, encoding, tempfile.TemporaryDirectory()
        self.place = Path(self.folder.name)
        for name, path in streams.items():
            (self.place / name).symlink_to(path)
        if "stdin" not in streams:
            (self.place / "stdin").write_bytes(stdin)
        command = (arguments, cwd, self.place, leads, environment, encoding)
        self.process = warm().Process(target=be_engram, args=command)
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
        paths = (self.place / "stdout", self.place / "stderr")
        stdout, stderr = (path.read_text(encoding=self.encoding) if path.exists() else "" for path in paths)
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, stdout, stderr)


class Watched(Command):
    """`engram` with these arguments, with stderr on a terminal, and stdout there too or in a file."""

    def __init__(
        self, *arguments: str, cwd: Path, stdout_too: bool = False, columns: int = 100, stdin: Path | None = None
    ) -> None:
        self.ours, self.theirs = pty.openpty()
        terminal = os.ttyname(self.theirs)
        streams = {"stdin": stdin or os.devnull, "stderr": terminal, **({"stdout": terminal} if stdout_too else {})}
        self.seen = ""
        super().__init__(*arguments, cwd=cwd, streams=streams, COLUMNS=str(columns), TERM="xterm")

    def wait_for(self, text: str) -> None:
        """Wait until the terminal has shown `text`."""
        end = time.monotonic() + SECONDS
        while text not in self.seen:
            if (not self._read() and self.process.exitcode is not None) or time.monotonic() > end:
                pytest.fail(f"{text!r} was never shown, but {self.seen!r}")

    def exit_code(self) -> int:
        """Wait for its end and return its exit code; `seen` and `printed` are then complete."""
        end = time.monotonic() + SECONDS
        while self._read() or self.process.exitcode is None:
            if time.monotonic() > end:
                self.process.kill()
                pytest.fail(f"the command did not end; it showed {self.seen!r}")
        self.process.join()
        os.close(self.ours)
        os.close(self.theirs)
        return self.process.exitcode

    @property
    def printed(self) -> str:
        return (self.place / "stdout").read_text(encoding="utf-8")

    def _read(self) -> bool:
        ready = bool(select.select([self.ours], [], [], 0.05)[0])
        if ready:
            self.seen += os.read(self.ours, 65536).decode("utf-8", "replace")
        return ready


def be_engram(
    arguments: tuple[str, ...],
    cwd: Path,
    place: Path,
    leads: bool,
    environment: dict[str, str] | None = None,
    encoding: str | None = None,
) -> None:
    """Run `python -m engram` in this process; its streams are in `place`, stdin only if an encoding is given."""
    if leads:
        os.setsid()
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY), stream)
    if encoding is not None:
        os.dup2(os.open(place / "stdin", os.O_RDONLY), 0)
        # Python opened its streams for other files. As in a new interpreter, text that is not UTF-8 is an error.
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.update(ENVIRONMENT, **(environment or {}))
    if environment and "ENGRAM_PLUGINS" in environment:  # as engram.methods does, which is imported already
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        for plugin in environment["ENGRAM_PLUGINS"].split(","):
            importlib.import_module(plugin)
    sys.argv = ["engram", *arguments]
    runpy.run_module("engram", run_name="__main__", alter_sys=True)


def engram(*arguments: str, cwd: Path, fresh: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `engram` with these arguments in the folder `cwd`; `fresh`: in a new interpreter."""
    if not fresh:
        return Command(*arguments, cwd=cwd, **options).wait()
    command, variables = [sys.executable, "-m", "engram", *arguments], {**ENVIRONMENT, **options}
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


def tree(path: Path) -> dict[str, tuple[int, bytes | None]]:
    """The modification time and content of everything below a folder."""
    return {
        os.fsencode(each.relative_to(path)).decode("latin1"): (
            each.lstat().st_mtime_ns,
            each.read_bytes() if each.is_file() else None,
        )
        for each in (path, *path.rglob("*"))
    }


def wait_for_the_end_of_all(group: int) -> None:
    """Wait until the process group is empty: no worker is left behind."""
    for _ in range(750):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("a process was left behind")
