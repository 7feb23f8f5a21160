"""Commands with text on stdin, with a given width, or on a terminal; forked as in `commands`."""

from __future__ import annotations

import os
import pty
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import ENVIRONMENT, SECONDS, warm


class Watched:
    """`engram` with these arguments, with stderr on a terminal, and stdout there too or in a file."""

    def __init__(
        self, *arguments: str, cwd: Path, stdout_too: bool = False, columns: int = 100, stdin: Path | None = None
    ) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.ours, self.theirs = pty.openpty()
        terminal = os.ttyname(self.theirs)
        outputs = (terminal if stdout_too else f"{self.place.name}/stdout", terminal)
        self.seen = ""
        self.process = _start(arguments, cwd, str(stdin or os.devnull), outputs, columns)

    def wait_for(self, text: str) -> None:
        """Wait until the terminal has shown `text`."""
        end = time.monotonic() + SECONDS
        while text not in self.seen:
            if (not self._read() and self.process.exitcode is not None) or time.monotonic() > end:
                pytest.fail(f"{text!r} was never shown, but {self.seen!r}")

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        os.kill(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
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
        return Path(self.place.name, "stdout").read_text(encoding="utf-8")

    def _read(self) -> bool:
        ready = bool(select.select([self.ours], [], [], 0.05)[0])
        if ready:
            self.seen += os.read(self.ours, 65536).decode("utf-8", "replace")
        return ready


def run(
    *arguments: str, cwd: Path, stdin: bytes = b"", columns: int = 200, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    """Run `engram` with these arguments in the folder `cwd`, its output in files."""
    with tempfile.TemporaryDirectory() as place:
        given, *outputs = (Path(place) / name for name in ("stdin", "stdout", "stderr"))
        given.write_bytes(stdin)
        process = _start(arguments, cwd, str(given), tuple(map(str, outputs)), columns, encoding)
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            pytest.fail(f"{arguments} did not end within {SECONDS} seconds")
        stdout, stderr = (path.read_text(encoding=encoding) for path in outputs)
    assert "Traceback" not in stderr, stderr
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def _start(arguments, cwd, stdin, outputs, columns, encoding="utf-8"):  # type: ignore[no-untyped-def]
    raw = tuple(map(os.fsencode, arguments))  # text that is not UTF-8 cannot be pickled
    process = warm().Process(target=_be_engram, args=(raw, cwd, stdin, outputs, columns, encoding))
    process.start()
    return process


def _be_engram(
    raw: tuple[bytes, ...], cwd: Path, stdin: str, outputs: tuple[str, str], columns: int, encoding: str
) -> None:
    """Run `python -m engram` in this process."""
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    for stream, name in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY, 0o644), stream)
    # Python opened its streams for other files. As in a new interpreter, text that is not UTF-8 is an error.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.update(ENVIRONMENT, COLUMNS=str(columns), TERM="xterm")
    sys.argv = ["engram", *map(os.fsdecode, raw)]
    runpy.run_module("engram", run_name="__main__", alter_sys=True)


def tree(path: Path) -> dict[str, tuple[int, bytes | None]]:
    """The modification time and content of everything below a folder."""
    return {
        os.fsencode(each.relative_to(path)).decode("latin1"): (
            each.lstat().st_mtime_ns,
            each.read_bytes() if each.is_file() else None,
        )
        for each in (path, *path.rglob("*"))
    }
