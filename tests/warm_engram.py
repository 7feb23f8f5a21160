"""A process that has imported engram and runs commands in forks of itself, so that each starts in milliseconds.

`python warm_engram.py SOCKET` listens. The commands that `write_command` writes send their arguments, folder,
environment and standard streams there, and exit as the fork did.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from commands import IMPORTED

# A script that imports nothing heavy. Plugins are imported together with engram, so they need a fresh interpreter.
COMMAND = """#!{python} -SE
import json, os, socket, sys
if os.environ.get("ENGRAM_PLUGINS") or os.environ.get("FRESH"):
    os.execv({python!r}, [{python!r}, "-m", "engram", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    socket.send_fds(connection, [b"streams"], [0, 1, 2])
    request = dict(name=os.path.basename(sys.argv[0]), arguments=sys.argv[1:], cwd=os.getcwd())
    request["environment"] = dict(os.environ)
    connection.sendall(json.dumps(request).encode() + b"\\n")
    sys.exit(int(connection.makefile().readline() or 1))
"""


def write_command(folder: Path, name: str, address: Path) -> None:
    """Write the command `name` (engram or python) that is run by the process at this address."""
    (folder / name).write_text(COMMAND.format(python=sys.executable, address=str(address)), encoding="utf-8")
    (folder / name).chmod(0o755)


def _answer(connection: socket.socket) -> None:
    """Run one command in a fork of this process, and send how it ended."""
    _, streams, _, _ = socket.recv_fds(connection, 7, 3)
    request = json.loads(connection.makefile(encoding="utf-8").readline())
    worker = os.fork()
    if worker == 0:
        connection.close()
        _end(_run(request, streams))
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])}\n".encode())


def _end(exit_code: int) -> NoReturn:
    """Exit without dismantling the interpreter: with all that is imported, that takes a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _run(request: dict[str, object], streams: list[int]) -> int:
    """Run a command with these standard streams; returns its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # new ones, for the kind of file there is now
        setattr(sys, name, os.fdopen(("stdin", "stdout", "stderr").index(name), mode, buffering=1, closefd=False))
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    arguments: list[str] = request["arguments"]  # type: ignore[assignment]
    try:
        if request["name"] == "engram":
            sys.argv = ["engram", *arguments]
            runpy.run_module("engram", run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, "")
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(address: str) -> None:
    """Listen until killed."""
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                _answer(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
