"""One process against two, on the first classes of CIFAR-100: the same tasks, the same global batch, several seeds.

    python benchmarks/distributed.py --data FOLDER [--tasks 2] [--epochs 10] [--seeds 3]

FOLDER is where `engram run --dataset cifar100 --data` finds the data set; a task has ten classes. Runs are
saved in benchmarks/work/distributed; interrupted ones are resumed, and finished ones are not repeated. The result:
benchmarks/results/distributed.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import engram
from engram.storage import load_tensors, write_json

HERE = Path(__file__).parent
PLACE = HERE / "work" / "distributed"
PROCESSES = (1, 2)


def learned(processes: int, seed: int, options: argparse.Namespace) -> Path:
    """The folder of a run by this many processes, each with its share of the cores."""
    folder = PLACE / f"{options.tasks}-tasks-{options.epochs}-epochs" / f"{processes}-processes" / f"seed-{seed}"
    if (folder / "result.json").exists():
        return folder
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    run = ["-m", "engram", "run", "features", "--dataset", "cifar100", "--data", str(options.data), "--device", "cpu"]
    sizes = ["--tasks", str(options.tasks), "--epochs", str(options.epochs), "--seed", str(seed)]
    # Without the variable, torch uses every core for one process, and half of them for each of two.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(
        [sys.executable, *launcher, *run, *sizes, "--out", str(folder), "--resume"], check=True, env=environment
    )
    return folder


def compared(folders: list[Path]) -> dict[str, Any]:
    """The results of one seed with each number of processes, and the distance between the final networks."""
    results = [engram.Result.load(folder / "result.json") for folder in folders]
    states = [load_tensors(next(folder.glob("checkpoint-*")) / "learner.safetensors") for folder in folders]
    weights = [
        torch.cat([state[name].double().flatten() for name in sorted(state) if name.startswith("network.extractor.")])
        for state in states
    ]
    return {
        "seed": results[0].seed,
        "curves": {result.environment["processes"]: result.curve for result in results},
        "seconds": {result.environment["processes"]: result.seconds for result in results},
        "threads": {result.environment["processes"]: result.environment["threads"] for result in results},
        "weights_apart": float((weights[0] - weights[1]).norm() / weights[0].norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "distributed.json")
    options = parser.parse_args()
    rows = [compared([learned(processes, seed, options) for processes in PROCESSES]) for seed in range(options.seeds)]
    final = {str(number): [row["curves"][str(number)][-1] for row in rows] for number in PROCESSES}
    differences = [two - one for one, two in zip(final["1"], final["2"], strict=True)]
    spread = {
        name: {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}
        for name, values in {**final, "difference": differences}.items()
    }
    sizes = {"tasks": options.tasks, "epochs": options.epochs, "cores": os.cpu_count()}
    write_json(options.out, {**sizes, "rows": rows, "final_accuracy": spread})
    for name, values in spread.items():
        print(f"{name}: {values['mean']:.3f} ± {values['deviation']:.3f}")


if __name__ == "__main__":
    main()
