"""The command line in a process of its own, as a person uses it."""

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def engram(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `engram` with these arguments in the folder `cwd`."""
    command = [sys.executable, "-m", "engram", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
