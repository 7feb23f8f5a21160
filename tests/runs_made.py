"""What runs with the same outcome have in common: results without times, and the bytes of their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engram import storage
from engram.experiments import Result

TIMED = ("seconds.json", "result.json", "events.jsonl")


def comparable(result: Result | Mapping[str, Any], *ignored: str) -> dict[str, Any]:
    """A result without what depends on how the run went, and without `ignored` fields."""
    values = result.to_json() if isinstance(result, Result) else result
    return {name: value for name, value in values.items() if name not in ("seconds", "networks_reused", *ignored)}


def results_in(folder: Path, *ignored: str) -> dict[str, dict[str, Any]]:
    """The comparable results of all runs in a folder, by their paths in it."""
    paths = sorted(folder.rglob("result.json"))
    return {str(path.relative_to(folder)): comparable(json.loads(path.read_text()), *ignored) for path in paths}


def final_bytes(folder: Path) -> dict[str, bytes]:
    """Every file that must not depend on how runs went, by its path.

    Incomplete files in a shared cache are not among them: no lock says that their writer is gone.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in TIMED]
    files = [path for path in files if "trained" not in path.parts or not path.name.startswith(storage.ASIDE)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class AfterTask:
    """A listener that calls `act` after each task, with its number from 1 up and what was measured."""

    def __init__(self, act: Callable[[int, dict[str, Any]], None]) -> None:
        self.act = act

    def on_event(self, event: str, values: dict[str, Any]) -> None:
        if event == "task":
            self.act(values["task"], values)
