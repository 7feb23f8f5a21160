"""The command line in a process of its own, as a person uses it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def engram(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `engram` with these arguments in the folder `cwd`."""
    command = [sys.executable, "-m", "engram", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)


def wait_for_the_end_of_all(group: int) -> None:
    """Until no process of the group is there: no worker is left behind."""
    for _ in range(750):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("a process was left behind")
