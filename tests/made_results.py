"""Results made by hand, for tests of what is made of results."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engram.experiments.results import Result

# Methods, and the MB that each stores of a hundred classes.
METHODS = {
    "features": 12.2,
    "hybrid": 18.1,
    "features-unadapted": 12.2,
    "gamma-lwf": 0.0,
    "lwf": 0.0,
    "gamma-icarl": 5.86,
    "icarl": 5.86,
    "eeil": 5.86,
    "lucir": 5.86,
    "bic": 5.86,
    "bic-uncorrected": 5.86,
    "finetune": 0.0,
    "joint": 146.5,
}


def result(method: str = "features", seed: int = 0, curve: Sequence[float] = (0.9, 0.7, 0.5), **values: Any) -> Result:
    """A complete result with this curve and two classes per task; `values` override its fields."""
    tasks = len(curve)
    stores = "features" in method or method == "hybrid"
    order = [f"class {number}" for number in range(2 * tasks)]
    random.Random(seed).shuffle(order)
    along = [1 - 0.02 * task for task in range(tasks)]
    made: dict[str, Any] = {
        "method": method,
        "dataset": "made",
        "seed": seed,
        "classes_per_task": 2,
        "class_order": order,
        "classes_seen": [2 * (task + 1) for task in range(tasks)],
        "settings": {"seed": seed, "learning_rate": 0.2, "adapter": "mlp" if method == "features" else "identity"},
        "curve": list(curve),
        "average_incremental_accuracy": sum(curve) / tasks,
        "curve_top5": [1.0] * tasks,
        "average_incremental_accuracy_top5": 1.0,
        "head_curve": None,
        "accuracy_matrix": [[value] * (task + 1) for task, value in enumerate(curve)],
        "forgetting": 0.25,
        "omega": along if stores else None,
        "omega_previous": [None, *along[1:]] if stores else None,
        "omega_first": [None, *along[1:]] if stores else None,
        "ceiling_curve": [min(1.0, value + 0.01 * task) for task, value in enumerate(curve)] if stores else None,
        "drift_gap": [0.01 * task for task in range(tasks)] if stores else None,
        "memory_bytes": round(METHODS.get(method, 1.0) * 2**20),
        "memory_mb": METHODS.get(method, 1.0),
        "seconds": {"train": 100.0, "measure": 10.0},
        "environment": {"engram": "0.1.0", "python": "3.11"},
        "split": {"first_task": None, "class_order": "seed", "validation": 0.0},
        "networks_reused": None,
    }
    return Result(**{**made, **values})


def save(folder: Path, *results: Result) -> Path:
    """Write results under a folder, one folder each, and give the folder."""
    for number, each in enumerate(results):
        place = folder / f"run-{number:03}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "result.json").write_text(json.dumps(each.to_json()), encoding="utf-8")
    return folder


def every_method(tasks: int = 10, seeds: int = 5, suffix: str = "") -> list[Result]:
    """Results of thirteen methods that differ a little from seed to seed; `suffix` makes their names longer."""
    made = []
    for rank, method in enumerate(METHODS):
        for seed in range(seeds):
            draw = random.Random(100 * rank + seed)
            fall = 0.03 + 0.006 * rank
            curve = [max(0.05, 0.9 - fall * task + draw.uniform(-0.03, 0.03)) for task in range(tasks)]
            each = result(method, seed, curve, forgetting=0.1 + 0.05 * rank)
            each.seconds.update(extract=9.0, adapt=22.0, herd=1.0, classify=4.0)
            made.append(Result(**{**each.to_json(), "method": method + suffix}))
    return made


def save_suite(folder: Path, values: Sequence[float], **more: Any) -> Path:
    """A suite that varies alpha, with two series and three seeds."""
    variants = []
    for series in ("features", "hybrid"):
        for place, value in enumerate(values):
            runs = []
            for seed in range(3):
                level = 0.6 + 0.03 * place - (0.05 if series == "hybrid" else 0) + 0.01 * seed
                run = folder / "runs" / f"{series}-{value:g}" / f"seed-{seed}"
                run.mkdir(parents=True)
                settings = {"seed": seed, "alpha": value}
                result(series, seed, [level + 0.2, level, level - 0.1], settings=settings).save(run / "result.json")
                runs.append(str(run.relative_to(folder)))
            variants.append({"label": f"{series}, α = {value:g}", "series": series, "value": value, "runs": runs})
    suite = {
        "schema": 1,
        "suite": "alpha",
        "dataset": "made",
        "summary": "The weight of similarity in the adapter's loss.",
        "finding": "Accuracy and ω rise with α.",
        "varies": "alpha",
        "command": "engram suite alpha --dataset made",
        "variants": variants,
        **more,
    }
    (folder / "suite.json").write_text(json.dumps(suite), encoding="utf-8")
    return folder
