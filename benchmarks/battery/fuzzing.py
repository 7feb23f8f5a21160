"""The parsers of foreign bytes, fuzzed by `benchmarks/fuzz.py` with atheris."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from battery.step import Step

FUZZ = Path(__file__).parents[1] / "fuzz.py"


def fuzz(parser: str, count: int, place: Path) -> dict[str, Any]:
    command = [sys.executable, str(FUZZ), parser, "--runs", str(count)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode or not ended.stdout:  # native code crashed, or it took too long or too much memory
        return {"crashed": 1, "bad": 1, "stderr": ended.stderr[-2000:]}
    found = json.loads(ended.stdout.splitlines()[-1])
    return {**found, "crashed": 0, "bad": found["escaped"]}


GOAL = "only the project's own errors come out; no crash, no input that takes 25 s or 4 GB"
STEPS = {name: Step(partial(fuzz, name), 100_000, GOAL, pieces=10) for name in ("manifest", "tensors", "form", "image")}
