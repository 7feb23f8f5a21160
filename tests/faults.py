"""`engram` in forks of a process that has learned already, to be killed, or traced so that a system call fails.

Native code (safetensors) writes without Python's knowledge, so strace kills a process before its n-th call of a kind,
or lets that call fail. With nothing left to import, a small `engram learn` takes a sixth of a second.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest
import torch
from commands import be_engram, warm

from engram.model import ModelFolder, load

CHANGES = (
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "copy_file_range", "sendfile", "splice"),
    *("ftruncate", "truncate", "fallocate", "fsync", "fdatasync", "sync_file_range", "msync"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("mkdir", "mkdirat", "unlink", "unlinkat", "rmdir", "chmod", "fchmod", "fchmodat"),
)
OPENS = ("open", "openat", "openat2", "creat")
LOOKS = (
    *("read", "pread64", "readv", "lseek", "getdents64", "flock", "close"),
    *("stat", "lstat", "fstat", "newfstatat", "statx", "readlink"),
)
CALLS = (*CHANGES, *OPENS, *LOOKS)


class Call(NamedTuple):
    """One system call of a process, which is the `number`-th of its kind there."""

    kind: str
    number: int
    text: str  # the line of strace, without what differs between runs

    @property
    def changes(self) -> bool:
        """Whether it may change what is on the disk."""
        return self.kind in CHANGES or (self.kind in OPENS and "O_CREAT" in self.text)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Forks:
    """A process that does things in forks of itself, one at a time."""

    def __init__(self, prepare: Callable[..., None] | None = None, *arguments: Any) -> None:
        self.connection, theirs = warm().Pipe()
        self.process = warm().Process(target=_serve, args=(theirs, prepare, arguments))
        self.process.start()
        theirs.close()
        if problem := self.connection.recv():
            raise RuntimeError(problem)

    def start(self, task: Callable[..., None], *arguments: Any) -> int:
        """Start a fork that waits for `go` to do the task; returns its process id."""
        self.connection.send((task, arguments))
        return int(self.connection.recv())

    def go(self) -> None:
        """Let it begin. From here on it may be killed: it sends nothing more until it ends."""
        self.connection.send("go")
        assert self.connection.recv() == "gone"

    def end(self) -> int:
        """Wait for its end; returns its exit code, or minus the signal."""
        return int(self.connection.recv())

    def do(self, task: Callable[..., None], *arguments: Any) -> int:
        self.start(task, *arguments)
        self.go()
        return self.end()

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()
        self.process.join(10)
        self.process.kill()


def _serve(connection: Connection, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    try:
        if prepare is not None:
            prepare(*arguments)
    except BaseException:
        connection.send(traceback.format_exc())
        return
    connection.send("")
    while True:
        try:
            task, arguments = connection.recv()
        except EOFError:
            return
        fork = os.fork()
        if fork == 0:
            connection.send(os.getpid())
            connection.recv()
            connection.send("gone")
            os._exit(_exit_code(task, *arguments))
        connection.send(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))


def _exit_code(task: Callable[..., None], *arguments: Any) -> int:
    """The exit code of an interpreter that does the task and ends."""
    try:
        task(*arguments)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def learned_before(arguments: Sequence[str], cwd: Path) -> None:
    """A preparation: run `engram` with these arguments twice, so that late imports are done."""
    with tempfile.TemporaryDirectory() as place:
        for _ in range(2):
            code = _exit_code(be_engram, tuple(arguments), cwd, Path(place), False)
            assert code == 0, Path(place, "stderr").read_text(encoding="utf-8")


def read_until(path: Path, stop: Path, result: Path) -> None:
    """Load a model and classify, again and again; at the end write how often."""
    reads = 0
    while not stop.exists():
        model = load(ModelFolder(path))
        side = model.image_size
        assert side is not None
        scores = model.scores(torch.zeros(1, side, side, 3, dtype=torch.uint8))
        assert scores.shape == (1, len(model.names)) and scores.isfinite().all()
        reads += 1
    result.write_text(str(reads))


def engram(forks: Forks, arguments: Sequence[str], cwd: Path, inject: str | None = None) -> tuple[Ended, list[str]]:
    """How `engram` with these arguments ended in a fork, and the output of strace; see `traced`."""
    return traced(forks, inject, _be_engram, tuple(arguments), cwd)


def _be_engram(arguments: tuple[str, ...], cwd: Path, place: Path) -> None:
    be_engram(arguments, cwd, place, False)


def traced(forks: Forks, inject: str | None, task: Callable[..., None], *arguments: Any) -> tuple[Ended, list[str]]:
    """How a task ended in a fork, and the output of strace. The task also gets a folder for its output.

    It is traced if there is something to `inject`: a call of its first thread and a fault, in the syntax of strace. An
    empty text is no fault: then all calls are listed, those of other threads with a number before them.
    """
    with tempfile.TemporaryDirectory() as place:
        process = forks.start(task, *arguments, Path(place))
        strace = None if inject is None else _attached(process, Path(place) / "log", inject)
        forks.go()
        code = forks.end()
        lines: list[str] = []
        if strace is not None:
            strace.communicate(timeout=60)
            lines = Path(place, "log").read_text(encoding="utf-8", errors="replace").splitlines()
            lines = [re.sub(rf"^{process} +", "", line) for line in lines]
        out, err = (Path(place, name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return Ended(code, out, err), lines


def _attached(process: int, log: Path, inject: str) -> subprocess.Popen[str]:
    program = shutil.which("strace")
    status = "it is not installed"
    if program is not None:
        calls = [inject.partition(":")[0]] if inject else CALLS
        command = [program, "-y", "-s", "8", "-o", str(log), "-p", str(process)]
        command += ["-e", "trace=" + ",".join(f"?{call}" for call in calls)]  # not every machine has every call
        command += ["-e", f"inject={inject}"] if inject else ["-f"]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert strace.stderr is not None
        status = strace.stderr.readline().strip()
        if status.endswith("attached"):
            return strace
        strace.communicate()
    os.kill(process, signal.SIGKILL)
    pytest.skip(f"strace cannot trace: {status}")


def calls_in(place: Path, lines: Sequence[str]) -> list[Call]:
    """The calls about paths in a folder, in order, each numbered among all of its kind."""
    counts: Counter[str] = Counter()
    found = []
    for line in lines:
        kind = line.partition("(")[0].strip()
        counts[kind] += 1
        if str(place) in line and not line.startswith("<"):  # which is the rest of a call that was written before
            assert kind in CALLS, f"another thread does this, or it is no call: {line}"
            found.append(Call(kind, counts[kind], alike(line, place)))
    return found


def alike(line: str, place: Path) -> str:
    """A call, or a name, without what differs between runs: numbers, contents, random names."""
    text = line.rpartition(" = ")[0].rstrip() or line
    text = re.sub(r"0x\w+( /\*.*?\*/)?|\{st_.*?\}", "*", text)
    text = re.sub(r"^(p?read|p?write|getdents)(64)?(\(.*?>).*", r"\1\2\3", text)  # what is read or written
    text = text.replace(str(place), "")
    text = re.sub(r"-[0-9a-f]{8}\b", "-*", text)
    text = re.sub(r"\.tmp\w{6}", ".tmp*", text)
    return re.sub(r"\b\d+<", "<", text)
