"""Run every benchmark of this folder, each in a process of its own; write `benchmarks/RESULTS.md` and its figure.

    python benchmarks/speed/all.py [NAME ...]

Outcomes are kept in `benchmarks/results/speed.json`; naming benchmarks runs those alone and keeps the others' outcomes.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from side_by_side import Outcome

from engram.storage import write_json, writing

HERE = Path(__file__).parent
OUTCOMES = HERE.parent / "results" / "speed.json"
TABLE = HERE.parent / "RESULTS.md"
FIGURE = HERE.parent.parent / "docs" / "figures" / "speed.svg"
USUAL = (
    *("start_up", "pretrained", "training_step", "training_loop", "precision", "other_networks", "svm", "herding"),
    *("adapter", "extraction", "after_training", "growth"),
)
LIMIT = 15 * 60  # seconds for the usual ones together: one that would take longer is ended, and its line stays
EXTRA = ("svm_1000_classes", "classifiers_1000_classes")  # python benchmarks/speed/all.py svm_1000_classes
INTRODUCTION = """`make bench` runs the scripts of `benchmarks/speed/` and writes this file; `python
benchmarks/speed/all.py NAME` runs one of them. Both sides of a line run in one process, in turns, on
the same data; the measurement is the median over rounds of their ratio. `ENGRAM_DATA` is the folder of
CIFAR-100 and of the photos. With `OMP_NUM_THREADS=1`, times are processor time, which other programs on
the machine hardly change.

![Each line of the table relative to its goal](../docs/figures/speed.svg)
"""


def main() -> None:
    names = sys.argv[1:] or list(USUAL)
    end = time.monotonic() + (LIMIT if names == list(USUAL) else 10**6)
    found = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    for name in names:
        print(f"==> {name}", flush=True)
        command, left = [sys.executable, str(HERE / f"{name}.py")], end - time.monotonic()
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=left)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{error} Its line stays as it was.", file=sys.stderr)
            continue
        *output, last = done.stdout.splitlines()
        print("\n".join(output), flush=True)
        threads, date = torch.get_num_threads(), datetime.now(UTC).date().isoformat()
        found[name] = {"date": date, "threads": threads, "outcomes": json.loads(last)}
        write_json(OUTCOMES, found)
    with writing(TABLE) as aside:
        aside.write_text(table(found))
    with writing(FIGURE) as aside:
        draw(found, aside)
    print(f"==> {TABLE}, {FIGURE}")


def outcomes(found: dict[str, dict[str, Any]]) -> list[tuple[str, Outcome]]:
    """Every line of the table: the benchmark and the outcome."""
    names = (*USUAL, *EXTRA)
    return [(name, Outcome(**each)) for name in names for each in found.get(name, {}).get("outcomes", [])]


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A bar per line: how far it is above or below its goal, as a factor; the goal is 1."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = [outcome for _, outcome in outcomes(found)][::-1]
    factors = [each.ratio / each.goal if each.at_least else each.goal / each.ratio for each in lines]
    with rc_context({"svg.hashsalt": "speed", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 0.3 * len(lines) + 1), layout="constrained")
        axes = figure.subplots()
        colours = ["#2a7f62" if each.met else "#c0562f" for each in lines]
        axes.barh([each.phase.replace("`", "") for each in lines], [f - 1 for f in factors], left=1, color=colours)
        for row, (each, factor) in enumerate(zip(lines, factors, strict=True)):
            axes.text(1.05 * max(1, factor), row, f"{each.say(each.ratio)} (goal {each.wanted})", size=7, va="center")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.5 * min(1, *factors), 8 * max(factors))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("better than its goal, as a factor")
        axes.tick_params(labelsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| phase | against | goal | measured | | script, date, threads |", "|---|---|---|---|---|---|"]
    for name, outcome in outcomes(found):
        verdict = "met" if outcome.met else "**not met**"
        threads = "1 thread" if found[name]["threads"] == 1 else f"{found[name]['threads']} threads"
        where = f"`{name}.py`, {found[name]['date']}, {threads}"
        measured = f"**{outcome.say(outcome.ratio)}**"
        cells = [outcome.phase, outcome.against, outcome.wanted, measured, f"{verdict}. {outcome.detail}", where]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scikit-learn"))
    machine = f"Python {platform.python_version()}, {versions}"
    notes = (HERE / "notes.md").read_text()
    return "\n".join(["# Speed", "", INTRODUCTION, f"{machine}.", "", *lines, "", notes])


if __name__ == "__main__":
    main()
