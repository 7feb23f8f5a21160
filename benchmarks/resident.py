"""How much memory a run over many files takes: extraction, and an epoch of training, of 50,000 images of 224 × 224.

    python benchmarks/resident.py [--images 50000] [--cache]

The files are made first, a few hundred and links to them, and removed at the end. The network is a small one, since
the memory of a large network does not depend on the data. The result: benchmarks/results/resident.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from made_photos import class_folders

SIDE, CLASSES, DISTINCT = 224, 20, 300
LIMIT = 1536  # MB
RESULT = Path(__file__).parent / "results" / "resident.json"


def peak() -> int:
    """The peak resident memory of this process in MB, mapped file pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--cache", action="store_true", help="pack the images, and read those")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        os.environ["ENGRAM_DATA"] = str(Path(place) / "cache")
        sizes = {"count": options.images, "distinct": DISTINCT, "classes": CLASSES, "width": SIDE, "height": SIDE}
        each = class_folders(Path(place) / "data", **sizes)
        print(f"{options.images:,} files of {each:,} bytes", flush=True)
        found = measure(Path(place) / "data", packed=options.cache)
    print(found)
    assert found["peak_mb"] <= LIMIT
    if options.images >= 50_000:
        from engram.storage import read_json, write_json

        known = read_json(RESULT) if RESULT.exists() else {}
        write_json(RESULT, {**known, "packed" if options.cache else "files": found})


def measure(root: Path, *, packed: bool) -> dict[str, object]:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from engram.data import DecodeOptions, concatenate, load
    from engram.network import Training, extract, make_network

    class Glance(nn.Module):
        """A network that takes next to no time."""

        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 16, stride=16)

        def forward(self, images: Tensor) -> Tensor:
            return self.convolution(images).relu().mean((2, 3))

    found: dict[str, object] = {"peak_mb_at_start": peak()}
    begin = time.perf_counter()
    dataset = load("folder", root, options=DecodeOptions(size=SIDE, cache=2**40 if packed else None))
    samples = concatenate(dataset.train, dataset.test)
    found |= {"images": len(samples), "load_seconds": round(time.perf_counter() - begin, 1), "peak_mb_loaded": peak()}
    network = make_network(Glance(), "linear", samples, seed=0).grown(CLASSES, 0)
    begin = time.perf_counter()
    extract(network, samples)
    found |= {"extract_seconds": round(time.perf_counter() - begin, 1), "peak_mb_extracted": peak()}
    begin = time.perf_counter()

    def loss(inputs: Tensor, columns: Tensor) -> Tensor:
        return F.cross_entropy(network(inputs)[1], columns)

    Training(epochs=1, learning_rate=0.1, pad=0).fit(network, samples, samples.labels, loss, seed=0, task=0)
    found |= {"epoch_seconds": round(time.perf_counter() - begin, 1), "peak_mb": peak()}
    return {**found, "pixel_mb": len(samples) * samples.sample_bytes // 2**20, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    main()
