"""Attacks on models, files and servers: what was tried, what failed, and the peak memory.

    python benchmarks/attacks.py [SECTION...] [--again] [--pieces N]    (all sections: some 15 minutes)
    python benchmarks/attacks.py torchrun     (50 runs, 20 minutes; only when named)
    python benchmarks/attacks.py fuzz         (with atheris: 4 × 10^6 executions, an hour; only when named)

A section has steps, and a long step has pieces. What is done is recorded at once in benchmarks/results/attacks.json,
and not done again: an interrupted battery continues with the same command. `--again` begins the named sections anew,
and `--pieces` ends after so many. Each piece runs in a process of its own, so that its peak of memory is its own.

A step counts failures as `bad`, whose goal is 0. The counts of several pieces are added up; of seconds and megabytes
the largest is recorded. `before` is what the first attack found, before the code was hardened.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "attacks.json"
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]  # its models, images and forks to kill are those of the tests

from battery import SECTIONS, WHEN_NAMED, Step  # noqa: E402

from engram.storage import read_json, write_json  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--again", action="store_true", help="forget what was recorded of these sections")
    parser.add_argument("--pieces", type=int, default=sys.maxsize, help="end after so many")
    options = parser.parse_args()
    if unheard := set(options.sections) - set(SECTIONS):
        parser.error(f"there is no section {min(unheard)}")
    chosen = options.sections or [name for name in SECTIONS if name not in WHEN_NAMED]
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come: forks of one thread are killed in a row
    known = recorded()
    if options.again:
        known = {name: rows for name, rows in known.items() if name not in chosen}
        write_json(RESULT, known)
    for section, name in islice(pieces(chosen, known), options.pieces):
        found = piece(section, name)
        known = recorded()  # again: another process may have recorded another section meanwhile
        row = known.setdefault(section, {}).get(name, {})
        known[section][name] = added(row, SECTIONS[section][name], found)
        write_json(RESULT, {each: known[each] for each in SECTIONS if each in known})
        print(section, name, known[section][name]["found"], flush=True)
    bad = [name for section in chosen for name, row in known.get(section, {}).items() if row["found"]["bad"]]
    sys.exit(f"gave way: {', '.join(bad)}" if bad else 0)


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = read_json(RESULT) if RESULT.exists() else {}
    return found


def pieces(chosen: list[str], known: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The steps that are left to do, a piece of each in turn."""
    for section in chosen:
        steps = SECTIONS[section]
        done = {name: row["pieces"] for name, row in known.get(section, {}).items()}
        for number in range(max(step.pieces for step in steps.values())):
            for name, step in steps.items():
                if done.get(name, 0) <= number < step.pieces:
                    yield section, name


def piece(section: str, name: str) -> dict[str, Any]:
    """What a step finds, in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(measured, section, name).result()


def measured(section: str, name: str) -> dict[str, Any]:
    step, begin = SECTIONS[section][name], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="engram-attacks-") as place:
        found = step.run(step.count, Path(place))
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        **found,
        "peak_mb": float(own.ru_maxrss // 1024),
        "peak_mb_of_a_child": float(children.ru_maxrss // 1024),
        "cpu_seconds_in_all": round(own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, 1),
        "seconds": round(time.monotonic() - begin, 1),
    }


def added(row: dict[str, Any], step: Step, found: dict[str, Any]) -> dict[str, Any]:
    """The row of a step with the findings of one more piece."""
    before = row.get("found", {})
    for name, value in before.items():
        if isinstance(value, int):
            found[name] = value + found.get(name, 0)
        elif isinstance(value, float):
            found[name] = max(value, found.get(name, value))
    return {
        "goal": step.goal,
        **({"before": step.before} if step.before else {}),
        "found": found,
        "pieces": row.get("pieces", 0) + 1,
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
