"""`engram learn` killed before any system call or at any moment, and with any system call failing.

The folder always holds the old model or the new one, complete; after a reported error, the old one. The next writer
removes the leftovers of a killed one. The slow tests record their findings in `benchmarks/results/interruptions.json`.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from commands import be_engram
from faults import Call, Ended, Forks, alike, calls_in, engram, learned_before, read_until
from models_made import DAISY, FORMULA, TULIP, draw, network_path

from engram import storage
from engram.model import ModelFolder, load, save, verify
from engram.model.folder import KEEP

QUICK = ("--image-size", "16", "--epochs", "1", "--features-per-class", "3", "--hold-out", "0", "--quiet")
SMALL = ("--set", "adapter_steps=1", "--set", "adapter_width=8")
FAULTS = {"killed": "signal=SIGKILL", "no room": "error=ENOSPC", "broken": "error=EIO"}
REASONS = {"no room": os.strerror(errno.ENOSPC), "broken": os.strerror(errno.EIO)}
UNSURE = "will be known after a restart"  # in the error if the disk refuses to undo a change
UNUSED = f"{'9' * 64}.safetensors"  # a network file that a killed writer left
# Leftovers of killed writers, renamed to be removed.
UNNAMED = (f"versions/{storage.ASIDE}000001-", f"networks/{storage.ASIDE}{UNUSED}-")
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "interruptions.json"
RECORDING = "ENGRAM_RECORD" in os.environ


@dataclass
class Updates:
    """Images to learn, and two places to start from: `first`, where there is no folder, and `again`.

    The latter is a model with as many versions as are kept, and with leftovers of killed writers.
    """

    place: Path
    forks: Forks
    recorded: dict[str, list[Call]] = field(default_factory=dict)
    learned: dict[str, str] = field(default_factory=dict)  # digests of the model after learning, by the start
    resumed: set[tuple[str, ...]] = field(default_factory=set)  # leftovers after which learning was repeated

    def command(self, start: str, folder: ModelFolder) -> tuple[str, ...]:
        source = self.place / ("1" if start == "first" else "2")
        return ("learn", str(folder.path), str(source), *QUICK, *SMALL)

    def copy(self, start: str, home: Path) -> ModelFolder:
        """The model to start from, alone in the folder `home`, which is written to as well."""
        home.mkdir()
        if start == "again":
            shutil.copytree(self.place / "littered", home / "model")
        return ModelFolder(home / "model")

    def learn(self, start: str, folder: ModelFolder, *trace: Any, **options: Any) -> tuple[Ended, list[str]]:
        """How learning ended, and the output of strace, if something is traced."""
        return engram(self.forks, self.command(start, folder), self.place, *trace, **options)

    def calls(self, start: str) -> list[Call]:
        """All system calls that learning makes in the model's folder and the one above it."""
        if start not in self.recorded:
            folder = self.copy(start, self.place / f"recorded {start}")
            ended, lines = self.learn(start, folder, "")
            assert ended.code == 0, ended.err
            self.recorded[start] = calls_in(folder.path.parent, lines)
            self.learned[start] = digest(folder)
            check_tidy(folder)
        return self.recorded[start]


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Updates]:
    place = tmp_path_factory.mktemp("updates")
    draw(place / "1", (TULIP, DAISY), 4)
    draw(place / "2", (FORMULA, TULIP), 4)
    old = ModelFolder(place / "old")
    with Forks(learned_before, ["learn", str(old.path), str(place / "1"), *QUICK, *SMALL], place) as forks:
        model = load(old)
        with old.writing() as writer:
            for _ in range(KEEP):
                save(writer, model, action="learn")
        versions = shutil.copytree(old.path, place / "littered") / "versions"
        (versions / f"{storage.ASIDE}left").mkdir()
        (versions / f"{storage.ASIDE}left" / ".tmp").write_text("half a file")
        (versions / "000001").mkdir()
        (versions.parent / f"{storage.ASIDE}left").write_text("half a file")
        (versions.parent / "networks" / f"{storage.ASIDE}left").write_text("half a file")
        (versions.parent / "networks" / UNUSED).write_text("a file")
        yield Updates(place, forks, learned={"old": digest(old)})


def digest(folder: ModelFolder) -> str:
    manifest = folder.current()
    return f"{manifest.learner.sha256} {network_path(manifest)}"


def names(path: Path) -> set[str]:
    """Every path in a folder."""
    return {str(each.relative_to(path)) for each in path.rglob("*")}


VERIFIED: set[str] = set()  # digests of all files of folders that were found intact, so that each is verified once


def check_tidy(folder: ModelFolder) -> None:
    """Assert that all is as it was saved, and that the next writer leaves nothing else but newer versions."""
    files = sorted(path for path in folder.path.rglob("*") if path.is_file())
    content = "".join(f"{path.relative_to(folder.path)} {storage.checksum(path)}\n" for path in files)
    if content not in VERIFIED:
        assert verify(folder).intact
        VERIFIED.add(content)
    with warnings.catch_warnings(action="ignore"), folder.writing():
        manifests = folder.manifests()
    places = [f"versions/{manifest.version:06d}" for manifest in manifests]
    files = [f"{place}/{file}" for place in places for file in ("manifest.json", "learner.safetensors")]
    files += map(network_path, manifests)
    assert [each.version for each in manifests] == [*folder.versions(), *folder.newer()]
    assert names(folder.path) == {".lock", "current.json", "versions", "networks", *places, *files}


def check_again(
    updates: Updates, folder: ModelFolder, ended: Ended, before: set[str], call: Call, lasting: bool
) -> str:
    """Assert that the folder holds the old model or the new one; returns which."""
    number = folder.current().version  # as a reader sees it, before leftovers are removed
    old = KEEP + 2
    assert digest(folder) == updates.learned[{old: "old", old + 1: "again"}[number]]
    # The record of a version whose manifest cannot be read at that moment is missing from then on.
    assert number - len(folder.history()) in ((0,) if call.changes else (0, 1))
    if ended.code > 0:
        assert lasting or not {name for name in names(folder.path) - before if not name.startswith(UNNAMED)}
        assert number == old or UNSURE in ended.err
    assert ended.code != 0 or number == old + 1
    check_tidy(folder)
    assert folder.current().version == number
    return "old" if number == old else "new"


def check_first(updates: Updates, folder: ModelFolder, ended: Ended, call: Call, lasting: bool) -> str:
    """Assert that there is the new model or none, and that learning works then; returns `new` or `old`."""
    exists = folder.exists()
    if exists:
        assert ended.code <= 0 or UNSURE in ended.err
        assert digest(folder) == updates.learned["first"]
    else:
        assert ended.code != 0
        left = tuple(sorted(alike(name, folder.path) for name in names(folder.path.parent)))
        assert ended.code < 0 or lasting or set(left) <= (set() if call.changes else {"model", "model/.lock"})
        if folder.path.exists():
            assert folder.problems() != []
        if left not in updates.resumed:
            updates.resumed.add(left)
            assert updates.learn("first", folder)[0].code == 0
            assert digest(folder) == updates.learned["first"]
        else:  # the same leftovers as before: without learning, which takes longer
            with folder.writing() as writer:
                save(writer, load(ModelFolder(updates.place / "old")), action="learn")
    check_tidy(folder)
    return "new" if exists else "old"


def check(updates: Updates, start: str, call: Call, fault: str, home: Path, lasting: bool = False) -> str:
    """Learn with a fault at a call, or from it on; gives the model that is in use then, `old` or `new`."""
    folder = updates.copy(start, home)
    before = names(folder.path)
    inject = f"{call.kind}:{FAULTS[fault]}:when={call.number}{'+' if lasting else ''}"
    ended, lines = updates.learn(start, folder, inject)
    met = [line for line in lines if line.startswith(call.kind)][call.number - 1]
    assert alike(met, home) == call.text and ("INJECTED" in met or fault == "killed"), met
    if fault == "killed":
        assert ended.code == -signal.SIGKILL
    else:
        assert "Traceback" not in ended.err, ended.err
        assert ended.code in (0, 1)
    if ended.code == 1:
        errors = [line for line in ended.err.splitlines() if not line.startswith("note: ")]  # what was removed
        assert ended.out == "" and len(errors) == 1 and errors[0].startswith("error: "), ended.err
        assert REASONS[fault] in ended.err
    if start == "first":
        model = check_first(updates, folder, ended, call, lasting)
    else:
        model = check_again(updates, folder, ended, before, call, lasting)
    shutil.rmtree(home)
    return model


def check_all(
    updates: Updates, start: str, calls: Sequence[Call], fault: str, place: Path, lasting: bool = False
) -> list[str]:
    """The model that is in use after a fault at each of the calls."""
    models, problems = [], []
    for number, call in enumerate(calls):
        try:
            models.append(check(updates, start, call, fault, place / str(number), lasting))
        except AssertionError as problem:
            problems.append(f"{call}: {problem}")
    assert not problems, "\n\n".join(problems)
    return models


def test_trace_has_every_write_sync_and_rename(updates: Updates) -> None:
    for start, name in (("first", "000001"), ("again", f"{KEEP + 3:06d}")):
        calls = [call for call in updates.calls(start) if call.changes]
        kinds = Counter(call.kind for call in calls)
        assert kinds["fsync"] >= 8 and kinds["rename"] >= 3 and kinds["mkdir"] >= 1, kinds
        for file in ("/networks/", "learner.safetensors", "manifest.json", "current.json"):
            for kind in ("write", "fsync"):
                assert [call for call in calls if call.kind == kind and file in call.text], (kind, file)
        renamed = [call.text for call in calls if call.kind == "rename"]
        network = updates.learned[start].split()[-1].removeprefix("networks/")
        assert f'rename("/model/networks/.aside-{network}-*", "/model/networks/{network}")' in renamed
        assert f'rename("/model/versions/.aside-{name}-*", "/model/versions/{name}")' in renamed
        assert 'rename("/model/.aside-current.json-*", "/model/current.json")' in renamed


# The code treats a broken disk like a full one, so that is a slow test.
@pytest.mark.parametrize("fault", ["killed", "no room", pytest.param("broken", marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", ["first", "again"])
def test_fault_at_any_changing_call_leaves_the_old_model_or_the_new_one(
    start: str, fault: str, updates: Updates, tmp_path: Path
) -> None:
    calls = [call for call in updates.calls(start) if call.changes]
    models = check_all(updates, start, calls, fault, tmp_path)
    if start == "first" and fault != "killed":
        assert [call for call, model in zip(calls, models, strict=True) if model == "new"] == []
    assert models.count("old") >= 20
    if fault == "killed":
        assert models == sorted(models, reverse=True)  # old up to a point, new from there on
    record(f"{fault} at a call that changes something", start, calls, models)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["first", "again"])
def test_fault_at_any_reading_call_leaves_the_old_model_or_the_new_one(
    start: str, updates: Updates, tmp_path: Path
) -> None:
    calls = [call for call in updates.calls(start) if not call.changes]
    models = check_all(updates, start, calls, "broken", tmp_path)
    record("broken at a call that looks", start, calls, models)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no room", "broken"])
@pytest.mark.parametrize("start", ["first", "again"])
def test_lasting_fault_leaves_the_old_model_or_the_new_one(
    start: str, fault: str, updates: Updates, tmp_path: Path
) -> None:
    # Not of writes: the error message is written too.
    calls = [call for call in updates.calls(start) if call.changes and call.kind not in ("write", "openat")]
    models = check_all(updates, start, calls, fault, tmp_path, lasting=True)
    record(f"{fault} from a call on", start, calls, models)


def test_unprintable_result_is_one_error_line_and_the_model_is_the_new_one(updates: Updates, tmp_path: Path) -> None:
    folder = updates.copy("again", tmp_path / "home")
    written = [call for call in updates.calls("again") if call.kind == "write"]
    ended, _ = updates.learn("again", folder, f"write:error=ENOSPC:when={written[-1].number + 1}")
    assert (ended.code, ended.out) == (1, "")
    problem = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
    assert ended.err.endswith(f"error: Writing to the disk failed: {problem}. Everything saved before is intact.\n")
    assert digest(folder) == updates.learned["again"]
    check_tidy(folder)


def record(what: str, start: str, calls: Sequence[Call], models: Sequence[str]) -> None:
    kinds = dict(sorted(Counter(call.kind for call in calls).items()))
    keep(f"{what}, {start}", {"calls": len(calls), **kinds, "ended with": dict(Counter(models))})


def keep(what: str, found: dict[str, Any]) -> None:
    """Record the findings, if ENGRAM_RECORD is set."""
    if RECORDING and RECORD.parent.is_dir():
        known = storage.read_json(RECORD) if RECORD.exists() else {}
        today = datetime.now(UTC).date().isoformat()
        storage.write_json(RECORD, dict(sorted({**known, what: {"date": today, **found}}.items())))


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_any_moment_leave_the_old_model_or_the_new_one_and_readers_see_no_other(
    kills: int, updates: Updates, tmp_path: Path
) -> None:
    folder, draws = updates.copy("again", tmp_path / "home"), random.Random(0)
    command = (updates.command("again", folder), updates.place, tmp_path, False)
    seconds = min(timed(updates.forks, *command) for _ in range(3))
    found: Counter[str] = Counter()
    with Forks() as other:
        other.start(read_until, folder.path, tmp_path / "stop", tmp_path / "reads")
        other.go()
        while found["kills"] < kills:
            before, digest_before = folder.current().version, digest(folder)
            following = max((before, *folder.newer())) + 1  # a killed writer may have taken a number
            process = updates.forks.start(be_engram, *command)
            updates.forks.go()
            if found["kills"] % 2:
                wait_for_a_save(folder, 2 * seconds)
            time.sleep(draws.uniform(0, (0.1 if found["kills"] % 2 else 1.2) * seconds))
            with suppress(ProcessLookupError):  # it was quicker
                os.kill(process, signal.SIGKILL)
            code = updates.forks.end()
            after = folder.current()
            found["kills" if code else "not killed in time"] += 1
            found["littered"] += any(storage.ASIDE in name for name in names(folder.path))
            assert after.version in ((before, following) if code else (following,))
            assert after.version > before or digest(folder) == digest_before
            assert (len(after.history), after.history[-1].action) == (after.version, "learn")
            found["killed, but learned"] += bool(code) and after.version > before
            check_tidy(folder)
        (tmp_path / "stop").touch()
        assert other.end() == 0
    found["reads"] = int((tmp_path / "reads").read_text())
    assert found["reads"] > kills
    assert kills < 50 or found["littered"] >= 5, "hardly any kill hit a save"
    assert updates.learn("again", folder)[0].code == 0
    check_tidy(folder)
    keep(f"{kills} kills at any moment", dict(found))


def wait_for_a_save(folder: ModelFolder, seconds: float) -> None:
    """Wait until a new version is being written: half of the kills should hit a save, which is short."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and not list(folder.path.glob(f"versions/{storage.ASIDE}*")):
        time.sleep(0.0005)


def timed(forks: Forks, *command: Any) -> float:
    """The seconds that a command takes."""
    begin = time.perf_counter()
    assert forks.do(be_engram, *command) == 0
    return time.perf_counter() - begin
