"""The commands, and how errors are reported. Heavy imports happen inside commands, so that `--help` is fast."""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import inspect as introspection
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

import engram
from engram.cli import edit, evaluate, export, inspect, learn, listing, predict, report, run, serve, suite, watch
from engram.cli.output import complain
from engram.errors import ElsewhereError, EngramError
from engram.text import printable

PLACES = {"EACCES", "EPERM", "ENAMETOOLONG", "ELOOP", "EROFS", "ENOENT", "ESTALE", "ENOTDIR", "EISDIR"}  # of one file

app = typer.Typer(
    help="Teach an image classifier new classes over time, without keeping the images of the old ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line and exit."""
    # The interpreter's last garbage collection would visit all of torch: a fifth of the time of a short command.
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be any bytes
    try:
        app(prog_name="engram")
    except ElsewhereError as error:  # the rank that failed has reported why
        sys.exit(error.exit_code)
    except EngramError as error:
        complain(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if errno.errorcode.get(error.errno or 0) in PLACES and error.filename is not None:
            complain(f"'{printable(error.filename)}' cannot be used: {error.strerror}.")
            sys.exit(1)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        # Python would flush stdout again at exit, and fail again; a closed stdout is None.
        with suppress(OSError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(f"Writing to the disk failed: {error}. Everything saved before is intact.")
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"engram {engram.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `engram` itself."""


def _expanded(function: Callable[..., None]) -> Callable[..., None]:
    """The function itself; if its only parameter is a dataclass, a function with a parameter for each field of it."""
    options = next(iter(get_type_hints(function).values()))
    if not (isinstance(options, type) and is_dataclass(options)):
        return function

    @functools.wraps(function)
    def called(**values: Any) -> None:
        function(options(**values))

    hints, signature = get_type_hints(options, include_extras=True), introspection.signature(options)
    parameters = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
    called.__annotations__ = {}
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


for function in (
    *(run.run, listing.methods, listing.datasets, listing.networks, listing.suites, suite.suite, report.report),
    *(learn.learn, predict.predict, evaluate.evaluate, export.export, inspect.inspect, inspect.verify),
    *(edit.forget, edit.rename, edit.merge, edit.rollback, serve.serve, watch.watch),
):
    app.command()(_expanded(function))
