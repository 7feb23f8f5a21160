"""A cold `engram predict` of one photo, by phase, against `import torch` alone: processor time of fresh processes."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from side_by_side import Outcome, ratio, show

from engram.model import ModelFolder, learn

ROUNDS = 5
PHASES = """
import json, sys, time
marks = [("python", time.process_time())]
def mark(name): marks.append((name, time.process_time()))
import torch; mark("torch")
import engram.cli.app, engram.model; mark("the rest of the imports")
from pathlib import Path
from engram.model import ModelFolder, load, predict
model = load(ModelFolder(Path(sys.argv[1]))); mark("model")
from engram.data.images import decode
image = decode(Path(sys.argv[2]), size=224); mark("picture")
model.probabilities(image[None]); mark("network")
print(json.dumps([(name, now - before) for (_, before), (name, now) in zip(marks, marks[1:])]))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, photo = Path(temporary, "model"), Path(temporary, "photos", "a", "0.jpg")
        noise = np.random.default_rng(0)
        for name in ("a", "b"):
            (photo.parent.parent / name).mkdir(parents=True)
            for number in range(3):
                pixels = noise.integers(0, 256, (300, 400, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(photo.parent.parent / name / f"{number}.jpg")
        learn(ModelFolder(folder), photo.parent.parent)
        predict = ["-m", "engram", "predict", str(folder), str(photo)]
        took: list[list[float]] = [[], []]
        phases: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for each, arguments in zip(took, (predict, ["-c", "import torch"]), strict=True):
                each.append(processor_seconds(*arguments)[0])
            for name, seconds in json.loads(processor_seconds("-c", PHASES, str(folder), str(photo))[1]):
                phases.setdefault(name, []).append(seconds)
    detail = ", ".join(f"{name} {1000 * statistics.median(each):.0f} ms" for name, each in phases.items())
    show(
        Outcome(
            "start-up: predict, one photo, cold",
            "`import torch` alone",
            ratio(*took),
            1.5,
            at_least=False,
            detail=f"{statistics.median(took[0]):.2f} s against {statistics.median(took[1]):.2f} s; {detail}.",
        )
    )


def processor_seconds(*arguments: str) -> tuple[float, str]:
    """The processor time of a Python process, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


if __name__ == "__main__":
    main()
