"""Weight averaging in a second update: ten classes of photos, and then two more.

    ENGRAM_DATA=… python benchmarks/holding.py [--draws 3]  (some seven minutes of a core for each draw)

Photos are looked for in $ENGRAM_DATA/photos: train/CLASS/* and test/CLASS/*, twelve classes. Each draw has its own
class order and seed. The first update is learned once, then the second with each share of the old weights. Models are
saved in benchmarks/work/holding, and finished updates are not repeated. The result: benchmarks/results/holding.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
from pathlib import Path

from engram.model import LearnOptions, ModelFolder, evaluate, learn, load

HERE = Path(__file__).parent
PLACE = HERE / "work" / "holding"
FIRST = 10  # classes of the first update
SHARES = (0.0, 0.4, 0.6)


def write_list(name: str, folder: Path, classes: list[str]) -> Path:
    """All photos of these classes in a list."""
    path = PLACE / f"{name}.csv"
    rows = [(str(photo), each) for each in classes for photo in sorted((folder / each).iterdir())]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return path


def taught(folder: Path, source: Path, options: LearnOptions, begin: Path | None = None) -> ModelFolder:
    """The model after an update, starting from the model `begin` or a new one; learned now unless it was before."""
    done = folder.with_name(f"{folder.name}.done")
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if begin is not None:
            shutil.copytree(begin, folder)
        learn(ModelFolder(folder), source, options)
        done.touch()
    return ModelFolder(folder)


def held(photos: Path, draw: int) -> list[dict[str, float]]:
    """Accuracies of one draw, a row for each share."""
    classes = sorted(path.name for path in (photos / "train").iterdir())
    random.Random(draw).shuffle(classes)
    old, new = classes[:FIRST], classes[FIRST:]
    tests = {name: write_list(name, photos / "test", each) for name, each in (("old", old), ("new", new))}
    tests["all"] = write_list("all", photos / "test", classes)
    first = taught(PLACE / f"{draw}-first", write_list("first", photos / "train", old), LearnOptions(seed=draw))
    before = evaluate(load(first), tests["old"]).accuracy
    rows = []
    for share in SHARES:
        options = LearnOptions(settings={"weight_averaging": share, "weight_averaging_from": 0.0})
        second = taught(PLACE / f"{draw}-{share}", write_list("second", photos / "train", new), options, first.path)
        model = load(second)
        accuracies = {name: evaluate(model, test).accuracy for name, test in tests.items()}
        rows.append({"draw": draw, "weight_averaging": share, "old_before": before, **accuracies})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--draws", type=int, default=3)
    photos = Path(os.environ["ENGRAM_DATA"]) / "photos"
    PLACE.mkdir(parents=True, exist_ok=True)
    rows = [row for draw in range(1, arguments.parse_args().draws + 1) for row in held(photos, draw)]
    (HERE / "results" / "holding.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
