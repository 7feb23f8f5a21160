"""Reading files: images a second of the loader against decoding alone; a ResNet-18 step from files against memory.

    python benchmarks/loading.py [--images 512] [--batch 64] [--steps 4] [--rounds 5]

The photos, 500 × 375 as ImageNet's are on average, are made first and removed at the end. Both sides of a comparison
are measured in turns in one process. The result, with --write: benchmarks/results/loading.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch
from made_photos import class_folders
from torch import Tensor
from torch.nn import functional as F

from engram.data import DecodeOptions, Samples, load
from engram.data.files import ImageFiles
from engram.data.images import decode
from engram.network import Training, make_network
from engram.storage import write_json

sys.path.append(str(Path(__file__).parent / "speed"))
from side_by_side import in_turns, ratio

WIDTH, HEIGHT, STORED, SEEN = 500, 375, 256, 224
CLASSES = 4
MOST = 1.2  # times a step from memory that a step from files may take
RESULT = Path(__file__).parent / "results" / "loading.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["ENGRAM_DATA"] = str(Path(place) / "cache")
        count = max(options.images, options.batch * options.steps)
        sizes = {"count": count, "distinct": min(count, 200), "classes": CLASSES, "width": WIDTH, "height": HEIGHT}
        each = class_folders(Path(place) / "data", **sizes)
        print(f"{count:,} files of {each:,} bytes, {torch.get_num_threads()} threads", flush=True)
        samples = load("folder", Path(place) / "data", options=DecodeOptions(size=STORED, fit="stretch")).train
        found = {
            "files_bytes_mean": each,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            **loading(samples, options.images, options.batch, options.rounds),
            **stepping(samples, options.batch, options.steps, options.rounds),
        }
    print(found)
    if options.write:
        write_json(RESULT, found)


def loading(samples: Samples, images: int, batch: int, rounds: int) -> dict[str, float]:
    """Images a second: decoding one after another, by as many threads as torch has, and through the loader."""
    assert isinstance(samples.inputs, ImageFiles)
    images = min(images, len(samples))
    paths = [samples.inputs.index.path(row) for row in samples.rows[:images].tolist()]
    threads = torch.get_num_threads()

    def alone() -> None:
        for path in paths:
            decode(path, size=STORED, fit="stretch")

    def threaded() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda path: decode(path, size=STORED, fit="stretch"), paths))

    def loader() -> None:
        with closing(samples.batches(torch.arange(images).split(batch))) as batches:
            for _ in batches:
                pass

    one, several, whole = in_turns(alone, threaded, loader, rounds=rounds)
    return {
        "decoding_alone_one_thread_per_second": round(images / statistics.median(one), 1),
        "decoding_alone_all_threads_per_second": round(images / statistics.median(several), 1),
        "loader_per_second": round(images / statistics.median(whole), 1),
        "loader_over_decoding_alone": round(ratio(several, whole), 3),
        "threads_over_one": round(ratio(one, several), 3),
    }


def stepping(samples: Samples, batch: int, steps: int, rounds: int) -> dict[str, float | bool]:
    """Seconds of a ResNet-18 training step at 224 × 224 from files and from the same images in memory."""
    chosen = samples.select(torch.arange(batch * steps))
    resident = Samples.of(chosen.batch(torch.arange(len(chosen))), chosen.labels)
    network = make_network("resnet18", "cosine", resident, seed=0, crop=SEEN).grown(CLASSES, 0)
    training = Training(epochs=1, batch_size=batch, learning_rate=0.01, pad=0, crop=SEEN)

    def loss(inputs: Tensor, columns: Tensor) -> Tensor:
        return F.cross_entropy(network(inputs)[1], columns)

    def train(of: Samples) -> None:
        training.fit(network, of, of.labels, loss, seed=0, task=0)

    memory, files = in_turns(lambda: train(resident), lambda: train(chosen), rounds=rounds)
    found = ratio(files, memory)
    return {
        "step_batch": batch,
        "step_seconds_from_memory": round(statistics.median(memory) / steps, 3),
        "step_seconds_from_files": round(statistics.median(files) / steps, 3),
        "step_files_over_memory": round(found, 3),
        "step_goal_met": found <= MOST,
    }


if __name__ == "__main__":
    main()
