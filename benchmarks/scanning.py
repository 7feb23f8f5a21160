"""A scan of as many files as ImageNet has, made empty: how long it takes and how much memory.

    python benchmarks/scanning.py [--files 1300000] [--folder /tmp]

The files are made first and removed at the end. The result: benchmarks/results/scanning.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

CLASSES = 1000
RESULT = Path(__file__).parent / "results" / "scanning.json"


def make(root: Path, files: int) -> None:
    for label in range(CLASSES):
        folder = root / "train" / f"n{label:08d}"
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY)
        for number in range(files // CLASSES):
            os.close(os.open(f"n{label:08d}_{number}.JPEG", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        os.close(descriptor)
    (root / "val").mkdir()


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=1_300_000)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        root = Path(place) / "data"
        begin = time.perf_counter()
        make(root, options.files)
        print(f"{options.files:,} files made in {time.perf_counter() - begin:.0f} s", flush=True)
        time.sleep(2.5)  # a folder that has just changed is scanned anew
        os.environ["ENGRAM_DATA"] = str(Path(place) / "cache")
        from engram.data.scanning import open_index
        from engram.storage import write_json

        before = peak()
        begin = time.perf_counter()
        index = open_index(root, ("train", "val"))
        scanned, after = time.perf_counter() - begin, peak()
        begin = time.perf_counter()
        again = open_index(root, ("train", "val"))
        found = {
            "files": len(index),
            "folders": len(index.folders),
            "scan_seconds": round(scanned, 2),
            "open_again_seconds": round(time.perf_counter() - begin, 3),
            "index_bytes": index.place.stat().st_size,
            "peak_mb_before": round(before),
            "peak_mb": round(after),
            "cores": os.cpu_count(),
        }
        assert again.names == index.names and len(index) == CLASSES * (options.files // CLASSES)
    print(found)
    if options.files >= 1_300_000:
        write_json(RESULT, found)


if __name__ == "__main__":
    main()
