"""Models that were damaged or made by an attacker: errors in words, no other model, and little memory.

Damage is found by checksums. A forger writes the checksums too, so values that fit no model have to be found by what
they are. In both cases only the project's own errors may come out of `verify`, of loading and of an answer, and
`verify` may not change a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import random
import resource
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models_made import draw
from torch import Tensor

from battery.servers import NAMES, SMALL, small_model
from battery.step import Step
from engram import storage
from engram.errors import EngramError
from engram.model import LearnOptions, ModelFolder, inspect, learn, load, rename, rollback, verify
from engram.model.manifest import File, Pointer, seal, unseal

REPORTED = 5  # problems
BLANK = torch.zeros(1, SMALL["image_size"], SMALL["image_size"], 3, dtype=torch.uint8)


def entries(path: Path) -> dict[str, bytes | None]:
    """Every file with its content, every other entry without."""
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() and not each.is_symlink() else None
        for each in path.rglob("*")
    }


class Findings(Counter[str]):
    """Counts, with the texts of what was bad."""

    def __init__(self) -> None:
        super().__init__(attempts=0, bad=0)
        self.problems: list[str] = []

    def bad(self, what: str) -> None:
        self["bad"] += 1
        self.problems.append(what[:2000])

    def outcome(self, what: str, attempt: Callable[[], Any]) -> Any:
        """The result of an attempt; None after an error. Any but the project's own is bad."""
        try:
            return attempt()
        except EngramError:
            self["refused"] += 1
        except Exception:
            self["tracebacks"] += 1
            self.bad(f"{what}: {traceback.format_exc(-2)}")
        return None

    def output(self) -> dict[str, Any]:
        return {**self, **({"problems": self.problems[:REPORTED]} if self.problems else {})}


def damage(path: Path, other: Path, draws: random.Random) -> str:
    """Damage a file in one of ten ways."""
    content = path.read_bytes()
    place = draws.randrange(len(content))
    ways: dict[str, Callable[[], object]] = {
        "a bit": lambda: path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << draws.randrange(8)]) + content[place + 1 :]
        ),
        "cut short": lambda: path.write_bytes(content[:place]),
        "zeros": lambda: path.write_bytes(content[:place] + bytes(len(content) - place)),
        "longer": lambda: path.write_bytes(content + content[place:]),
        "another file": lambda: path.write_bytes(other.read_bytes()),
        "empty": lambda: path.write_bytes(b""),
        "gone": path.unlink,
        "a link": lambda: (path.unlink(), path.symlink_to("/etc/passwd")),
        "a pipe": lambda: (path.unlink(), os.mkfifo(path)),
        "a folder": lambda: (path.unlink(), path.mkdir()),
    }
    way = draws.choice(sorted(ways))
    ways[way]()
    return f"{path.name}: {way}"


def damages(count: int, place: Path) -> dict[str, Any]:
    """Is all damage found, by a `verify` that changes nothing, and is the model the same or an error?"""
    folder, draws, found = small_model(place), random.Random(0), Findings()
    files = [path for path in sorted(folder.path.rglob("*")) if path.is_file() and path.stat().st_size]
    expected = load(folder).probabilities(BLANK)
    for _ in range(count):
        path, other = draws.sample(files, 2)
        content = path.read_bytes()
        what = damage(path, other, draws)
        before = entries(folder.path)
        found["attempts"] += 1
        verified = found.outcome(what, lambda: verify(folder))
        if verified is None or (
            verified.intact and entries(folder.path)[str(path.relative_to(folder.path))] != content
        ):
            found.bad(f"{what}: not found by verify")
        if entries(folder.path) != before:
            found.bad(f"{what}: verify changed files")
        model = found.outcome(what, lambda: load(folder))
        if model is not None and not torch.equal(model.probabilities(BLANK), expected):
            found.bad(f"{what}: another model was loaded")
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(content)
    if not verify(folder).intact:
        found.bad("the model was not left as it was")
    return found.output()


def older_pointers(count: int, place: Path) -> dict[str, Any]:
    """`current.json` is an older copy, or the folder is none of a model: `verify` removes nothing."""
    folder, found = small_model(place), Findings()
    pointers = [(folder.path / "current.json").read_bytes()]
    for number in range(count):
        rename(folder, f"{number}" if number else NAMES[0], f"{number + 1}")
        pointers.append((folder.path / "current.json").read_bytes())
    stranger = place / "stranger"
    stranger.mkdir()
    (stranger / f"{storage.ASIDE}theirs").write_text("not ours")
    for older in pointers[-4:-1]:  # the rest names versions that were removed since
        (folder.path / "current.json").write_bytes(older)
        for path in (folder.path, stranger):
            before = entries(path)
            found["attempts"] += 1
            found.outcome("verify", lambda path=path: verify(ModelFolder(path)))
            if entries(path) != before:
                found.bad("verify changed files")
    newest = max(folder.newer())
    found.outcome("rollback", lambda: rollback(folder, newest))
    if folder.current().version != newest:
        found.bad("the newest version was lost")
    return found.output()


# Forgery


def forge(folder: ModelFolder, change: Callable[[dict[str, Any], dict[str, Tensor]], object], at: Path) -> ModelFolder:
    """A copy of a model whose manifest and tensors were changed, with every checksum right."""
    shutil.rmtree(at, ignore_errors=True)
    forged = ModelFolder(shutil.copytree(folder.path, at))
    number = forged.current().version
    place = forged.path / "versions" / f"{number:06d}"
    manifest = unseal((place / "manifest.json").read_bytes(), "")
    tensors = storage.load_tensors(place / "learner.safetensors")
    change(manifest, tensors)
    content = storage.serialise_tensors(tensors)
    if content != (place / "learner.safetensors").read_bytes():
        (place / "learner.safetensors").write_bytes(content)
        manifest["learner"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    write_manifest(forged, number, seal(manifest))
    return forged


def write_manifest(folder: ModelFolder, number: int, content: bytes) -> None:
    (folder.path / "versions" / f"{number:06d}" / "manifest.json").write_bytes(content)
    digests = {**folder.pointer().versions, number: hashlib.sha256(content).hexdigest()}
    (folder.path / "current.json").write_bytes(Pointer(current=number, versions=digests).serialise())


ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 2**31, 2**63, 10**30, 0.5, 1e308, "", "a", "\u3164", "/etc/passwd")
ODD += ([], [1], [[]], ["a", "b", "c"], {}, {"a": 1}, {"a": {"b": []}})


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside a JSON value."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*way, key)
            yield from places(value[key], (*way, key))


def manifest_change(way: tuple[Any, ...], odd: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    def change(manifest: dict[str, Any], _: dict[str, Tensor]) -> None:
        inner: Any = manifest
        for key in way[:-1]:
            inner = inner[key]
        inner[way[-1]] = odd

    return change


def tensor_changes(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of another type, another shape, or with other numbers."""
    changed = {str(kind): tensor.to(kind) for kind in (torch.float64, torch.float32, torch.int64, torch.int32)}
    changed |= {str(kind): tensor.to(kind) for kind in (torch.float16, torch.bfloat16, torch.uint8, torch.bool)}
    changed |= {"flat": tensor.flatten(), "a scalar": torch.zeros((), dtype=tensor.dtype), "deeper": tensor[None]}
    changed |= {"empty": tensor.new_zeros(0), "none": tensor.new_zeros(0, *tensor.shape[1:])}
    if tensor.ndim:
        changed |= {"shorter": tensor[:-1], "twice": torch.cat([tensor, tensor])}
    changed |= {"zeros": torch.zeros_like(tensor), "ones": torch.ones_like(tensor)}
    if tensor.dtype == torch.int64:
        changed |= {"huge": torch.full_like(tensor, 2**62), "negative": torch.full_like(tensor, -1)}
        changed |= {"4,000": torch.full_like(tensor, 4000)}
    if tensor.is_floating_point():
        changed |= {"NaN": torch.full_like(tensor, float("nan")), "infinite": torch.full_like(tensor, float("inf"))}
    return {what: each for what, each in changed.items() if each.dtype != tensor.dtype or not torch.equal(each, tensor)}


def use(found: Findings, what: str, folder: ModelFolder) -> None:
    """Look at a forged model in every way; count what comes out."""
    found["attempts"] += 1
    verified = found.outcome(what, lambda: verify(folder))
    found.outcome(what, lambda: inspect(folder))
    model = found.outcome(what, lambda: load(folder))
    if model is not None:
        found["loaded"] += 1
        found.outcome(what, lambda: model.probabilities(model.blank_input))
    elif verified is not None and verified.intact:
        found.bad(f"{what}: verify calls it intact, and it cannot be loaded")
    found["intact"] += verified is not None and verified.intact


def forged_manifests(count: int, place: Path) -> dict[str, Any]:
    folder, found = small_model(place), Findings()
    number = folder.current().version
    path = folder.path / "versions" / f"{number:06d}" / "manifest.json"
    value = unseal(path.read_bytes(), "")
    every = [(way, odd) for way in places(value) for odd in ODD]
    for way, odd in random.Random(0).sample(every, min(count, len(every))):
        forged = forge(folder, manifest_change(way, odd), place / "forged")
        use(found, f"{'.'.join(map(str, way))} = {odd!r}", forged)
    return found.output()


def forged_tensors(count: int, place: Path) -> dict[str, Any]:
    folder, found = small_model(place), Findings()
    number = folder.current().version
    tensors = storage.load_tensors(folder.path / "versions" / f"{number:06d}" / "learner.safetensors")
    every = [(name, *each) for name, tensor in tensors.items() for each in tensor_changes(name, tensor).items()]
    every += [(name, "missing", None) for name in tensors]
    for name, what, tensor in random.Random(0).sample(every, min(count, len(every))):

        def change(_: Any, state: dict[str, Tensor], name: str = name, tensor: Tensor | None = tensor) -> None:
            state.pop(name) if tensor is None else state.update({name: tensor.contiguous()})

        use(found, f"{name}: {what}", forge(folder, change, place / "forged"))
    return found.output()


MOST = 1000  # MB, torch and a small model included


def huge_files(count: int, place: Path) -> dict[str, Any]:
    """A manifest that names a sparse file of 3 GB, with a wrong checksum and with the right one."""
    folder, found = small_model(place), Findings()
    manifest = folder.current()
    learner = folder.path / "versions" / f"{manifest.version:06d}" / "learner.safetensors"
    size = 3 * 2**30
    os.truncate(learner, size)
    with learner.open("rb") as file:
        right = hashlib.file_digest(file, "sha256").hexdigest()
    for sha256 in itertools.islice(("0" * 64, right), count):
        forged = dataclasses.replace(manifest, learner=File(sha256, size)).serialise()
        write_manifest(folder, manifest.version, forged)
        use(found, "3 GB", folder)
        found["bytes"] = size
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 > MOST:
        found.bad(f"more than {MOST} MB")
    return found.output()


def unusable(count: int, place: Path) -> dict[str, Any]:
    """Training that gives infinite numbers: nothing is published that `verify` would reject."""
    found = Findings()
    source = draw(place / "images", NAMES, 4)
    for number in range(count):
        folder = ModelFolder(place / f"model-{number}")
        options = LearnOptions(**{**SMALL, "epochs": 2}, settings={"learning_rate": 10.0 ** (6 + number)})
        found["attempts"] += 1
        found.outcome("learn", lambda folder=folder, options=options: learn(folder, source, options))
        if folder.exists() and not verify(folder).intact:
            found.bad("a model was published that verify rejects")
        found["published"] += folder.exists()
    return found.output()


DAMAGE = {
    "any file": Step(damages, 400, "all is found; an error or the same model; verify changes no file"),
    "older current.json": Step(
        older_pointers,
        6,
        "verify changes no file, here and where there is no model; every version can be used again",
        "verify removed newer versions and other programs' files, and called the rest whole",
    ),
}
FORGED = "no tracebacks; what verify calls intact can be loaded"
FORGERY = {
    "manifests": Step(forged_manifests, 400, FORGED, "36 tracebacks of 379"),
    "tensors": Step(forged_tensors, 300, FORGED, "36 tracebacks of 379"),
    "a sparse file of 3 GB": Step(huge_files, 2, f"less than {MOST} MB", "6,300 MB"),
    "a learning rate of a million": Step(
        unusable, 3, "nothing is published that verify rejects", "published with infinite numbers, exit code 0"
    ),
}
