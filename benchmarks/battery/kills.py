"""SIGKILL before the n-th system call of a command: the old model or the new one, and nothing that stays behind.

Commands are forks of a process that has imported everything (`tests/faults.py`), with a small network on 16 × 16
images: a fifth of a second each. strace kills them, as native code writes files too, which no hook in Python would
notice. A command is traced once as a whole. Every call that may change the disk is then a moment to die before, and as
many others as the count allows, at equal distances.

A model is bad if it is neither the old one nor the new one to the bit, if `verify` finds anything, if it does not
answer, if the next writer leaves more or less than the files of the model, or if the same command, run again, does not
succeed. After a `forget` that has changed `current.json`, no reader may find the class, and after the next writer no
file in the folder may contain its name or one of its stored features.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from commands import be_engram
from faults import Call, Ended, Forks, alike, calls_in, learned_before, traced
from models_made import DAISY, FORMULA, SIDE, TULIP, draw, network_path
from PIL import Image

from battery.step import Step
from engram import storage
from engram.errors import EngramError
from engram.model import LearnOptions, ModelFolder, forget, load, merge, rename, save, verify
from engram.model.folder import KEEP
from engram.server.updating import UpdateRequest, run_update

SMALL = ("--epochs", "1", "--features-per-class", "3", "--hold-out", "0", "--quiet", "--image-size", str(SIDE))
SMALL += ("--set", "adapter_steps=1", "--set", "adapter_width=8")
EXEMPLARS = ("--images-per-class", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "first": ("learn", "MODEL", "1", *SMALL),
    "first, with exemplars": ("learn", "MODEL", "1", *SMALL, *EXEMPLARS),
    "learn": ("learn", "MODEL", "2", *SMALL),
    "learn, with exemplars": ("learn", "MODEL", "2", *SMALL),
    "forget": ("forget", "MODEL", DAISY, "--yes"),
    "forget, with exemplars": ("forget", "MODEL", DAISY, "--yes"),
    "merge": ("merge", "MODEL", DAISY, TULIP),
    "rename": ("rename", "MODEL", DAISY, "bellis"),
    "update": (),  # the process that a server starts
}
EMPTY = {".lock", "current.json", "versions", "networks"}  # of a model to come
UNUSED = f"{'9' * 64}.safetensors"  # a network file that a killed writer left
REPORTED = 5  # problems
PIPES: list[Connection] = []  # left open: when the server's end is closed, the process of an update exits with 1


class Scene:
    """What a command begins with: a model that killed writers have littered, or no folder, and what may come of it."""

    secrets: list[bytes]  # what no file may have once the command has succeeded

    def __init__(self, place: Path, name: str, forks: Forks) -> None:
        self.place, self.name, self.forks = place, name, forks
        self.secrets = []
        self.begin = ModelFolder(place / "begin" / "model")
        (place / "begin").mkdir()
        if "first" not in name:
            first = "first, with exemplars" if "exemplars" in name else "first"
            ended, _ = traced(self.forks, None, _command, first, self.begin.path, place)
            assert ended.code == 0, ended.err
            with self.begin.writing() as writer:
                model = load(self.begin)
                for _ in range(KEEP):
                    save(writer, model, action="learn")
            _litter(self.begin.path)
        if "forget" in name:
            self.secrets = [DAISY.encode(), *_rows(self.begin)]
        self.old = self.begin.current().version if self.begin.exists() else 0
        self.digests = {self.old: _digest(self.begin)}
        whole = self.copy(0)
        ended, lines = self.run(whole, "")
        assert ended.code == 0, ended.err
        self.calls = calls_in(whole.path.parent, lines)
        self.digests[self.old + 1] = _digest(whole)
        self.resumed: set[tuple[str, ...]] = set()

    def copy(self, number: int) -> ModelFolder:
        return ModelFolder(shutil.copytree(self.place / "begin", self.place / f"home-{number}") / "model")

    def run(self, folder: ModelFolder, inject: str | None) -> tuple[Ended, list[str]]:
        task = _update if self.name == "update" else _command
        return traced(self.forks, inject, task, self.name, folder.path, self.place)

    def moments(self, count: int) -> list[Call]:
        """The calls to be killed at: those that change something first."""
        changes = [call for call in self.calls if call.changes]
        others = [call for call in self.calls if not call.changes]
        step = max(1.0, len(others) / max(1, count - len(changes)))
        return (changes + [others[int(number * step)] for number in range(int(len(others) / step))])[:count]

    def problems(self, folder: ModelFolder) -> list[str]:
        """What is bad about the model that a killed command has left, or that a later one makes of it."""
        exists = folder.exists()
        number = folder.current().version if exists else 0
        if number not in self.digests or _digest(folder) != self.digests[number]:
            return [f"version {number} is neither the old model nor the new one"]
        found = readable(folder) if exists else []
        if self.secrets and number > self.old:
            found += [f"a reader finds '{DAISY}'"] if _finds(folder, DAISY) else []
        found += self.untidy(folder, exists)
        if self.secrets and number > self.old:
            contents = [path.read_bytes() for path in folder.path.rglob("*") if path.is_file()]
            found += ["a file has what was forgotten" for secret in self.secrets for each in contents if secret in each]
        return found + (self.unfinished(folder) if number == self.old else [])

    def untidy(self, folder: ModelFolder, exists: bool) -> list[str]:
        """What is there after the next writer, and should not be, or the other way round."""
        number = folder.number_in_use()
        with warnings.catch_warnings(action="ignore"), folder.writing() as writer:
            manifests = writer.manifests()  # versions that are newer than all that `current.json` names stay
        places = [f"versions/{manifest.version:06d}" for manifest in manifests]
        expected = {f"{place}/{file}" for place in places for file in ("manifest.json", "learner.safetensors")}
        expected |= {*EMPTY, *places, *map(network_path, manifests)}
        names = {str(path.relative_to(folder.path)) for path in folder.path.rglob("*")}
        stays = sorted(names ^ expected if exists else names - expected)
        stays += sorted(path.name for path in folder.path.parent.iterdir() if path != folder.path)
        found = [f"stays or is missing: {name}" for name in stays]
        return found + (["the next writer changed the model"] if folder.number_in_use() != number else [])

    def unfinished(self, folder: ModelFolder) -> list[str]:
        """What keeps the same command from succeeding; tried once for each kind of leftovers."""
        left = tuple(sorted(alike(str(path), folder.path.parent) for path in folder.path.rglob("*")))
        if left in self.resumed:
            return []
        self.resumed.add(left)
        ended, _ = self.run(folder, None)
        if ended.code or _digest(folder) != self.digests[self.old + 1]:
            return [f"the same command again ended with {ended.code}: {ended.err[-300:]}"]
        return readable(folder)


def _forks(place: Path) -> Forks:
    """Commands to be, and photos for them."""
    draw(place / "1", (TULIP, DAISY, FORMULA), 4)
    draw(place / "2", ("new", TULIP), 4)
    return Forks(_warmed, place)


def _warmed(place: Path) -> None:
    """Everything once, in the process that is forked: what is imported late is imported."""
    folder = ModelFolder(place / "warm")
    learned_before(["learn", str(folder.path), *COMMANDS["first"][2:]], place)
    merge(folder, DAISY, TULIP)
    rename(folder, TULIP, "tulip")
    forget(folder, ["tulip"])
    assert verify(folder).intact
    shutil.rmtree(folder.path)


def _command(name: str, model: Path, source: Path, place: Path) -> None:
    arguments = (str(model) if each == "MODEL" else each for each in COMMANDS[name])
    be_engram(tuple(arguments), source, place, False)


def _update(name: str, model: Path, source: Path, place: Path) -> None:
    """What a server starts in a process of its own, which gets the images through a pipe."""
    for stream, path in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place / path, os.O_WRONLY | os.O_CREAT), stream)
    ours, theirs = Pipe()
    PIPES.append(ours)
    files = sorted((source / "2").rglob("*.png"))
    for file in files:
        ours.send_bytes(np.asarray(Image.open(file)).tobytes())
    names = tuple(sorted({file.parent.name for file in files}))
    request = UpdateRequest(
        folder=ModelFolder(model),
        options=LearnOptions(epochs=1, device="cpu", image_size=SIDE),
        class_names=names,
        labels=tuple(names.index(file.parent.name) for file in files),
        paths=tuple(files),
        seen_bytes=0,
        lock_seconds=0,
        nice=0,
    )
    run_update(theirs, request)
    messages: dict[str, Any] = {}
    while ours.poll():
        messages |= json.loads(ours.recv_bytes())
    if "done" not in messages:
        raise EngramError(messages.get("failed", "it ended early"))


def _litter(model: Path) -> None:
    """What killed writers leave."""
    aside = model / "versions" / f"{storage.ASIDE}left"
    aside.mkdir()
    (aside / "learner.safetensors").write_text("half a file")
    (model / "versions" / "000001").mkdir()
    for path in (model / f"{storage.ASIDE}left", model / "networks" / UNUSED):
        path.write_text("half a file")


def _digest(folder: ModelFolder) -> str:
    """What the version in use consists of."""
    if not folder.exists():
        return ""
    manifest = folder.current()
    return f"{manifest.learner.sha256} {network_path(manifest)} {manifest.classes}"


def _rows(folder: ModelFolder) -> list[bytes]:
    """The stored features and exemplars of the class to forget, as they are in a file."""
    class_index, tensors = load(folder, device="cpu").class_index(DAISY), folder.load()[1]
    found = []
    for stored in ("features.rows", "features.codes", "images.rows"):
        counts = tensors[f"memory.{stored.partition('.')[0]}.counts"]
        if counts.any() and (rows := tensors.get(f"memory.{stored}")) is not None:
            found += [row.numpy().tobytes() for row in rows.split(counts.tolist())[class_index]]
    return found


def readable(folder: ModelFolder) -> list[str]:
    """What `verify` finds, and whether the model answers."""
    found = list(verify(folder).problems)
    model = load(folder, device="cpu")
    probabilities = model.probabilities(torch.full((2, SIDE, SIDE, 3), 99, dtype=torch.uint8))
    whole = probabilities.shape == (2, len(model.names)) and bool(probabilities.isfinite().all())
    return found if whole else [*found, "it does not answer"]


def _finds(folder: ModelFolder, name: str) -> bool:
    """Whether a reader comes to a version that has the class, or to a record of it."""
    numbers = {*folder.versions(), *folder.newer()}
    known = {each for number in numbers for each in folder.load(number)[0].classes}
    records = str([change.details for change in folder.history()])
    return name in known or name in records or len(numbers) > 1


def kill(name: str, count: int, place: Path) -> dict[str, Any]:
    """Die before `count` of the calls of a command."""
    with _forks(place) as forks:
        scene = Scene(place, name, forks)
        return struck(scene, scene.moments(count), "signal=SIGKILL")


def struck(scene: Scene, calls: Sequence[Call], fault: str) -> dict[str, Any]:
    """What is bad after a fault at each of the calls."""
    found: Counter[str] = Counter({"attempts": 0, "old": 0, "new": 0, "bad": 0})
    kinds: Counter[str] = Counter()
    output: list[str] = []
    for number, call in enumerate(calls, 1):
        folder = scene.copy(number)
        ended, lines = scene.run(folder, f"{call.kind}:{fault}:when={call.number}")
        if ended.code == -signal.SIGKILL or any("INJECTED" in line for line in lines):
            found["attempts"] += 1
            kinds[call.kind] += 1
            found["left something"] += bool(folder.leftovers())
            found["new" if folder.exists() and folder.current().version > scene.old else "old"] += 1
            problems = scene.problems(folder) + (["a traceback"] if "Traceback" in ended.err else [])
            found["bad"] += bool(problems)
            output += [f"{call.text}: {each}" for each in problems]
        else:
            found["not reached"] += 1
        shutil.rmtree(folder.path.parent)
    rest = {"calls there are": len(scene.calls), "at": dict(sorted(kinds.items()))}
    return {**found, **rest, **({"problems": output[:REPORTED]} if output else {})}


def no_room(name: str, count: int, place: Path) -> dict[str, Any]:
    """A full disk at `count` of the calls of a command that change something."""
    with _forks(place) as forks:
        scene = Scene(place, name, forks)
        calls = [call for call in scene.moments(count) if call.changes]
        return struck(scene, calls, "error=ENOSPC")


GOAL = "the old model or the new one; the next writer removes what is left"
FORGOTTEN = "the same; after the switch no reader finds the class, after the next writer no file has it"
KILLS = {
    name: Step(partial(kill, name), 120, FORGOTTEN if "forget" in name else GOAL)
    for name in COMMANDS
    if name != "first, with exemplars"
}
DISK = {
    name: Step(partial(no_room, name), 60, "the old model or the new one; an error in words")
    for name in ("learn", "forget", "rename")
}
