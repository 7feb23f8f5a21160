"""A model of photos that grows: four classes, four more, four more, then more photos of the first ones.

    ENGRAM_DATA=… python benchmarks/photos.py [--weights FILE.safetensors] [--draw N]

Photos are looked for in $ENGRAM_DATA/photos: train/CLASS/* and test/CLASS/*, twelve classes. Draw 0 takes classes and
photos by name; any other draws their order, and the models' seed, from its number.

Beside it, on the same photos: `features`, the paper's method; `finetune`, which learns the same updates; `joint`,
which learns everything at once; all are trained on the same number of photos. Each model is saved in
benchmarks/work/photos, and finished updates are not repeated. The result: benchmarks/results/photos.json,
photos-weights.json or photos-draw-N.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import time
from pathlib import Path

from engram.model import LearnOptions, ModelFolder, evaluate, learn, load

HERE = Path(__file__).parent
PLACE = HERE / "work" / "photos"
LATER = 20  # photos of each of the first four classes that come last


def updates(photos: Path, draw: int) -> list[list[tuple[Path, str]]]:
    """The photos of each update, with their classes."""
    names = sorted(path.name for path in (photos / "train").iterdir())
    files = {name: sorted((photos / "train" / name).iterdir()) for name in names}
    if draw:
        draws = random.Random(draw)
        draws.shuffle(names)
        for each in files.values():
            draws.shuffle(each)

    def of(some: list[str], part: slice) -> list[tuple[Path, str]]:
        return [(path, name) for name in some for path in files[name][part]]

    everything = slice(None)
    return [
        of(names[:4], slice(None, -LATER)),
        of(names[4:8], everything),
        of(names[8:], everything),
        of(names[:4], slice(-LATER, None)),
    ]


def write_list(path: Path, rows: list[tuple[Path, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *((str(image), name) for image, name in rows)])
    return path


def teach(
    name: str, parts: list[list[tuple[Path, str]]], options: list[LearnOptions], photos: Path
) -> list[dict[str, object]]:
    """Teach a model part by part, and evaluate it on all test photos of what it then knows."""
    folder, record = ModelFolder(PLACE / name), PLACE / f"{name}.json"
    steps: list[dict[str, object]] = json.loads(record.read_text()) if record.exists() else []
    for number in range(len(steps), len(parts)):
        begin = time.process_time()
        learned = learn(folder, write_list(PLACE / f"{name}-{number}.csv", parts[number]), options[number])
        model = load(folder)
        test = [(path, known) for known in sorted(model.names) for path in sorted((photos / "test" / known).iterdir())]
        evaluation = evaluate(model, write_list(PLACE / f"{name}-test.csv", test))
        steps.append(
            {
                "classes": learned.classes,
                "accuracy": evaluation.accuracy,
                "held_out_accuracy": learned.accuracy,
                "calibration_error": evaluation.error_calibrated,
                "calibration_error_uncalibrated": evaluation.error_uncalibrated,
                "omega": None if learned.adaptation is None else learned.adaptation.omega,
                "memory_bytes": learned.memory_bytes,
                "seen_bytes": learned.seen_bytes,
                "cpu_seconds": round(time.process_time() - begin, 1),
            }
        )
        record.write_text(json.dumps(steps, indent=2) + "\n")
        print(name, json.dumps(steps[-1]), flush=True)
    return steps


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--weights", type=Path, help="start every model from these")
    arguments.add_argument("--draw", type=int, default=0, help="another order of classes and photos, another seed")
    given = arguments.parse_args()
    weights, draw = given.weights, given.draw
    photos = Path(os.environ["ENGRAM_DATA"]) / "photos"
    parts = updates(photos, draw)
    suffix = ("" if weights is None else "-weights") + (f"-draw-{draw}" if draw else "")
    later, results = LearnOptions(), {}
    for method in ("engram", "features", "finetune"):
        network = None if weights else "resnet32"  # from scratch, as these results were made
        options = [LearnOptions(method=method, network=network, weights=weights, seed=draw), later, later, later]
        results[method] = teach(f"{method}{suffix}", parts, options, photos)
    trained = sum(len(part) * load_epochs(f"engram{suffix}", number + 1) for number, part in enumerate(parts[:3]))
    everything = [row for part in parts for row in part]
    once = LearnOptions(
        method="joint", network=network, weights=weights, seed=draw, epochs=max(1, round(trained / len(everything)))
    )
    results["joint"] = teach(f"joint{suffix}", [everything], [once], photos)
    (HERE / "results" / f"photos{suffix}.json").write_text(json.dumps(results, indent=2) + "\n")
    last = {name: float(steps[-1]["accuracy"]) for name, steps in results.items()}  # type: ignore[arg-type]
    print(f"{last['engram'] / last['finetune']:.2f} x finetune, {last['engram'] / last['joint']:.0%} of joint")


def load_epochs(name: str, version: int) -> int:
    """How many epochs a version was trained for."""
    manifest, _ = ModelFolder(PLACE / name).load(version)
    return int(manifest.settings["epochs"])  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
