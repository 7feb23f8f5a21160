"""The command line: translates options into calls of the package, and results into text."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit."""
    import errno
    import io
    import os
    import sys
    from contextlib import suppress

    from engram.cli.app import app
    from engram.cli.display import complain
    from engram.errors import ElsewhereError, EngramError
    from engram.text import printable

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
        refused = {"EACCES", "EPERM", "ENAMETOOLONG", "ELOOP", "EROFS", "ENOENT", "ESTALE", "ENOTDIR", "EISDIR"}
        if errno.errorcode.get(error.errno or 0) in refused and error.filename is not None:
            complain(f"'{printable(error.filename)}' cannot be used: {error.strerror}.")
            sys.exit(1)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        # Python would flush stdout again at exit, and fail again; a closed stdout is None.
        with suppress(OSError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(f"Writing to the disk failed: {error}. Everything saved before is intact.")
        sys.exit(1)
