"""What each part of a run on ImageNet-1000 costs, measured here, and an estimate of the whole run.

    python benchmarks/imagenet_costs.py

Steps of `features` with ResNet-18 at 224 x 224, decoding, extraction, adapter and herding at their real sizes, a few of
each; the classifier of 1,000 classes is from benchmarks/speed/svm_1000_classes.py. Nothing of ImageNet is needed. The
result: benchmarks/results/imagenet_costs.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from made_photos import class_folders
from torch.nn import functional as F

from engram.data import Samples, Task
from engram.data.images import decode
from engram.features import MLPAdapter, Pairs, herd
from engram.methods import make
from engram.network import extract

RESULT = Path(__file__).parent / "results" / "imagenet_costs.json"
IMAGES, CLASSES, PER_TASK, EPOCHS, TESTS = 1_281_167, 1_000, 100, 60, 50_000
TASKS = CLASSES // PER_TASK
BATCH = 32


def seconds(work: Callable[[], object], times: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times


def training() -> tuple[float, float]:
    """Seconds an image of a step of the second task, with its teacher, and of extraction."""
    images = torch.randint(0, 256, (2 * BATCH, 256, 256, 3), dtype=torch.uint8)
    samples = Samples.of(images, torch.arange(2 * BATCH) % 4)
    nothing = samples.select(torch.arange(0))
    learner = make("features", network="resnet18", crop=224, epochs=1, batch_size=BATCH, expected_classes=CLASSES)
    first = Task(0, (0, 1, 2, 3), samples, nothing)
    learner.network_ = learner.train(first)
    learner.classes_, learner.task_of_class_, learner.tasks_ = (0, 1, 2, 3), (0,) * 4, 1
    learner.shape_ = samples.shape
    second = Task(1, (4, 5, 6, 7), Samples.of(images, 4 + torch.arange(2 * BATCH) % 4), nothing)
    step = seconds(lambda: learner.train(second), 3) / (2 * BATCH)
    return step, seconds(lambda: extract(learner.frozen_network, samples), 3) / (2 * BATCH)


def decoding(place: Path) -> float:
    """Seconds of one core to make a photo of 500 x 375 a square of 256."""
    class_folders(place / "data", count=60, distinct=60, classes=1, width=500, height=375)
    contents = [path.read_bytes() for path in sorted((place / "data").rglob("*.*"))]
    return seconds(lambda: [decode(content, size=256) for content in contents]) / len(contents)


def adapting(steps: int = 12) -> tuple[float, float]:
    """Seconds of the adapter's start and of a step: d = 512, d' = 8,192."""
    draws = torch.Generator().manual_seed(0)
    old = torch.randn(32_768, 512, generator=draws)
    pairs = Pairs(old, old + 0.5 * torch.randn(old.shape, generator=draws), torch.arange(len(old)) % PER_TASK)

    def fit(count: int) -> float:
        adapter = MLPAdapter(adapter_steps=count)
        return seconds(lambda: adapter.fit(pairs, task=1))

    short, long = fit(1), fit(1 + steps)
    return short, (long - short) / steps


def herding() -> float:
    """Seconds to choose 250 of a class's 1,300 vectors."""
    vectors = F.normalize(torch.randn(1_300, 512))
    return seconds(lambda: herd(vectors, 250), 3)


def main() -> None:
    import tempfile

    torch.manual_seed(0)
    step, extraction = training()
    with tempfile.TemporaryDirectory() as place:
        decode_seconds = decoding(Path(place))
    start, adapter_step = adapting()
    herd_seconds = herding()
    stored = 250 * CLASSES
    seen = IMAGES * EPOCHS
    # Each task: its images twice (old and new network); measuring: all test images and the images of stored features.
    looked_at = 2 * IMAGES + (TESTS + stored) * (TASKS + 1) / 2
    found = {
        "threads": torch.get_num_threads(),
        "train_ms_per_image": round(1e3 * step, 2),
        "extract_ms_per_image": round(1e3 * extraction, 2),
        "decode_ms_per_image_and_core": round(1e3 * decode_seconds, 2),
        "adapter_start_s": round(start, 1),
        "adapter_step_s": round(adapter_step, 3),
        "herd_ms_per_class": round(1e3 * herd_seconds, 1),
        "whole_here_hours": {
            "training": round(seen * step / 3600),
            "decoding, on the same cores": round((seen + looked_at) * decode_seconds / torch.get_num_threads() / 3600),
            "extraction and measuring": round(looked_at * extraction / 3600, 1),
            "adapters": round((TASKS - 1) * (start + MLPAdapter().steps * adapter_step) / 3600, 2),
            "herding": round(CLASSES * herd_seconds / 3600, 3),
        },
        "images_trained_on": seen,
        "images_looked_at": round(looked_at),
    }
    print(json.dumps(found, indent=1))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
