"""Run every benchmark of this folder, each in a process of its own, and write the table `benchmarks/RESULTS.md`.

    python benchmarks/speed/all.py [NAME ...]

Outcomes are kept in `benchmarks/results/speed.json`; naming benchmarks runs those alone and keeps the others' outcomes.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from side_by_side import Outcome

from engram.storage import write_json, writing

HERE = Path(__file__).parent
OUTCOMES = HERE.parent / "results" / "speed.json"
TABLE = HERE.parent / "RESULTS.md"
USUAL = (
    *("training_step", "training_loop", "precision", "other_networks", "svm", "herding"),
    *("adapter", "extraction", "after_training", "growth"),
)
EXTRA = ("svm_1000_classes",)  # python benchmarks/speed/all.py svm_1000_classes
INTRODUCTION = """`make bench` runs the scripts of `benchmarks/speed/` and writes this file; `python
benchmarks/speed/all.py NAME` runs one of them. Both sides of a line run in one process, in turns, on
the same data; the measurement is the median over rounds of their ratio. `ENGRAM_DATA` is the folder of
CIFAR-100."""


def main() -> None:
    names = sys.argv[1:] or list(USUAL)
    found = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    for name in names:
        print(f"==> {name}", flush=True)
        done = subprocess.run([sys.executable, HERE / f"{name}.py"], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name} ended with {done.returncode}; its line stays as it was. {done.stdout}", file=sys.stderr)
            continue
        *told, outcomes = done.stdout.splitlines()
        print("\n".join(told), flush=True)
        found[name] = {"date": datetime.now(UTC).date().isoformat(), "outcomes": json.loads(outcomes)}
        write_json(OUTCOMES, found)
    with writing(TABLE) as aside:
        aside.write_text(table(found))
    print(f"==> {TABLE}")


def table(found: dict[str, dict[str, object]]) -> str:
    lines = ["| phase | against | goal | measured | | script, date |", "|---|---|---|---|---|---|"]
    for name in (*USUAL, *EXTRA):
        for each in found.get(name, {}).get("outcomes", []):
            outcome = Outcome(**each)
            verdict = "met" if outcome.met else "**not met**"
            where = f"`{name}.py`, {found[name]['date']}"
            measured = f"**{outcome.say(outcome.ratio)}**"
            cells = [outcome.phase, outcome.against, outcome.wanted, measured, f"{verdict}. {outcome.detail}", where]
            lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scikit-learn"))
    machine = f"{torch.get_num_threads()} threads, Python {platform.python_version()}, {versions}"
    notes = (HERE / "notes.md").read_text()
    return "\n".join(["# Speed", "", INTRODUCTION, f"{machine}.", "", *lines, "", notes])


if __name__ == "__main__":
    main()
