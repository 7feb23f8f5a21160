"""The command-line front door: it translates and nothing more."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit."""
    import sys

    from engram.cli.app import app
    from engram.cli.display import complain
    from engram.errors import EngramError

    try:
        app(prog_name="engram")
    except EngramError as error:
        complain(str(error))
        sys.exit(error.exit_code)
