"""The command-line front door: it translates and nothing more."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit."""
    import io
    import sys

    from engram.cli.app import app
    from engram.cli.display import complain
    from engram.errors import EngramError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes, a terminal's letters few
    try:
        app(prog_name="engram")
    except EngramError as error:
        complain(str(error))
        sys.exit(error.exit_code)
