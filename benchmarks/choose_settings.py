"""Choose settings on the validation split: several settings of one method, each over the same seeds.

    python benchmarks/choose_settings.py digits -o benchmarks/results/choices-digits.json \
        learning_rate=0.5 learning_rate=0.2,alpha=10

Seeds start at 100; reported ones start at 0. Runs that differ only after training share it through `work/`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import engram
from engram.experiments import Plan
from engram.network import Cache
from engram.storage import write_json

HERE = Path(__file__).parent
FIRST = 100  # seeds from here up are for choosing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("settings", nargs="+", help="key=value,key=value")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--method", default="features")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validation", type=float, default=0.2)
    options = parser.parse_args()
    dataset, seeds = engram.load(options.dataset, options.data), range(FIRST, FIRST + options.seeds)
    cache = Cache(HERE / "work" / "trained")
    rows: list[dict[str, Any]] = []
    for text in options.settings:
        settings = dict(pair.split("=") for pair in text.split(","))
        plan = Plan(method=options.method, settings=settings, tasks=options.tasks, validation=options.validation)
        results = [plan.with_seed(seed).run(dataset, cache=cache) for seed in seeds]
        row: dict[str, Any] = {"settings": settings, "accuracy": _mean(results, "curve")}
        row |= {"head": _mean(results, "head_curve"), "ceiling": _mean(results, "ceiling_curve")}
        rows.append(row)
        print(row, flush=True)
    command = {"method": options.method, "dataset": options.dataset, "validation": options.validation}
    write_json(options.out, {**command, "tasks": options.tasks, "seeds": list(seeds), "rows": rows})


def _mean(results: list[engram.Result], curve: str) -> float | None:
    """The mean over seeds of the mean of a curve."""
    curves = [getattr(result, curve) for result in results]
    return None if None in curves else statistics.fmean(statistics.fmean(each) for each in curves)


if __name__ == "__main__":
    main()
