"""Runs of several processes: do good ones say so?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from battery.step import Step

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "engram"]
# What happens at exit is the same after a short run, in which every kind of work is done in both processes.
SHORT = ["run", "features", "--preset", "short", "--quiet", "--classes-per-task", "5"]
SHORT += ["--epochs", "1", "--set", "adapter_steps=20"]


def torchrun(count: int, place: Path) -> dict[str, Any]:
    codes: Counter[int] = Counter()
    aborted = written = 0
    for number in range(count):
        out = place / str(number)
        ended = subprocess.run([*TORCHRUN, *SHORT, "--out", str(out)], capture_output=True, text=True)
        codes[ended.returncode] += 1
        aborted += "terminate called" in ended.stderr
        written += len(json.loads((out / "result.json").read_text())["curve"]) == 2
    return {"runs": count, "exit 0": codes[0], "aborted": aborted, "written": written, "bad": count - codes[0]}


STEPS = {
    "runs": Step(
        torchrun,
        2,
        "every run that writes its result exits with 0",
        "5 of 12 runs ended with SIGABRT after they had written a correct result",
        pieces=25,
    ),
}
