"""Teach a model your own photos, folder by folder, and ask it about others.

python examples/own_photos.py MODEL FOLDER... [--ask PHOTO...]

Each folder has one sub-folder of photos per class. They are learned in the order given, as if they arrived over months.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engram.model import LearnOptions, ModelFolder, Prediction, UpdateRejected, learn, load, predict


def teach(model: ModelFolder, folders: list[Path]) -> None:
    """Learn each folder as one update, and report accuracy and bytes."""
    for folder in folders:
        try:
            update = learn(model, folder, LearnOptions(budget=50 * 2**20))  # at most 50 MB, for all classes together
        except UpdateRejected as rejected:  # it would have harmed the old classes; the model is as it was
            print(f"{folder}: {rejected}")
            continue
        accuracy = "not measured" if update.accuracy is None else f"{update.accuracy:.3f}"
        print(f"{folder}: {update.classes} classes, {update.memory_bytes:,} bytes, accuracy {accuracy}")


def ask(model: ModelFolder, photos: list[Path]) -> None:
    """Print the most probable classes of each photo."""
    for answer in predict(load(model), photos, top=3):
        if isinstance(answer, Prediction):
            print(f"{answer.path}: " + ", ".join(f"{each.name} {each.probability:.2f}" for each in answer.top))
        else:
            print(f"{answer.path}: {answer.reason}")


def main(arguments: list[str] | None = None) -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Teach a model your own photos, folder by folder.")
    parser.add_argument("model", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--ask", type=Path, nargs="*", default=[])
    given = parser.parse_args(arguments)
    model = ModelFolder(given.model)
    teach(model, given.folders)
    ask(model, given.ask)


if __name__ == "__main__":
    main()
