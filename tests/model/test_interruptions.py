"""A model's folder holds the old model or the new one after any kill or disk error.

Run as a program, this file executes requests in forks of itself, so that a process to kill needs no second import of
torch.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models_made import copied, entries, network_path
from refusals import STEPS, Failing, always

from engram import storage
from engram.errors import EngramError
from engram.model import ModelFolder
from engram.model.folder import Writer
from engram.model.manifest import Manifest

KILLS = 30
NOBODY = 65534


def publish(writer: Writer, number: int, *, frozen: bool = False, **options: Any) -> Manifest:
    """A version that holds its number in every part, except in a frozen network."""
    fields: dict[str, Any] = {
        "action": "learn",
        "method": "m",
        "settings": {"n": number},
        "classes": [f"class {number}"],
    }
    tensors = {
        "weight": torch.full((50,), number),
        "network.extractor.weight": torch.full((50,), 0 if frozen else number),
    }
    return writer.publish(tensors, **fields, **options)


def made(path: Path, versions: int, *, frozen: bool = False) -> ModelFolder:
    folder = ModelFolder(path)
    with folder.writing() as writer:
        for number in range(1, versions + 1):
            publish(writer, number, frozen=frozen)
    return folder


def whole_number(folder: ModelFolder) -> int:
    """The number of the version in use; all its parts must have it."""
    manifest, tensors = folder.load()
    assert manifest.classes == (f"class {manifest.version}",)
    assert manifest.settings == {"n": manifest.version}
    assert tensors["weight"].tolist() == [manifest.version] * 50
    assert tensors["network.extractor.weight"].tolist() in ([0] * 50, [manifest.version] * 50)
    return manifest.version


def assert_tidy(folder: ModelFolder) -> None:
    """The next writer removes all leftovers; everything else is as it was saved.

    A version that is newer than `current.json` stays: the file might be an older copy.
    """
    assert folder.problems() == []
    left = folder.leftovers()
    with warnings.catch_warnings(record=True) as caught, folder.writing():
        warnings.simplefilter("always")
    assert [all(name in str(each.message) for name in left) for each in caught] == ([True] if left else [])
    assert folder.problems() == folder.leftovers() == []
    files = ("manifest.json", "learner.safetensors")
    manifests = {number: folder.load(number)[0] for number in folder.versions()}
    for number in folder.newer():
        manifests[number] = Manifest.parse(
            (folder.path / "versions" / f"{number:06d}" / "manifest.json").read_bytes(), ""
        )
    places = [f"versions/{number:06d}" for number in manifests]
    expected = {
        ".lock",
        "current.json",
        "versions",
        "networks",
        *places,
        *(f"{place}/{file}" for place in places for file in files),
        *(network_path(manifest) for manifest in manifests.values()),
    }
    assert entries(folder.path).keys() == expected


# Tasks of the other process


def publish_until_killed(path: str) -> None:
    while True:
        with ModelFolder(Path(path)).writing() as writer:
            number = max((*writer.digests(), *writer.newer()), default=0) + 1
            publish(writer, number, keep=2, alone=number % 5 == 0)
        print(f"{number}\n", end="", flush=True)  # in one write, so that no line is cut


def publish_and_die_at(path: str, number: int, step: int, alone: bool, frozen: bool) -> None:
    """Publish, but with SIGKILL before the given one of all steps that open, rename, make or remove something."""
    steps = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal steps
        removal = event in ("os.remove", "os.rmdir")  # by names relative to a folder that is open
        if removal or (event in ("open", "os.rename", "os.mkdir") and str(arguments[0]).startswith(path)):
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    with ModelFolder(Path(path)).writing() as writer:
        sys.addaudithook(hook)
        publish(writer, number, keep=2, alone=alone, frozen=frozen)


def publish_and_die_after_the_network(path: str) -> None:
    """Publish, but with SIGKILL between the renames of the network file and of the version's folder."""
    storage.writing_folder = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    with ModelFolder(Path(path)).writing() as writer:
        publish(writer, 3)


def read_until(path: str, stop: str) -> None:
    reads = 0
    while not Path(stop).exists():
        whole_number(ModelFolder(Path(path)))
        assert ModelFolder(Path(path)).problems() == []
        reads += 1
    print(reads, flush=True)


def publish_with_little_room(path: str, room: int) -> None:
    """Publish where no file can be longer than `room`; prints the error."""
    with ModelFolder(Path(path)).writing() as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        try:
            publish(writer, 2)
        except EngramError as error:
            print(error, flush=True)


def look_without_rights(path: str) -> None:
    """Load and verify without write permission."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    folder = ModelFolder(Path(path))
    try:
        with folder.writing():
            print("writable", flush=True)
    except EngramError as error:
        print(type(error).__name__, "not writable" in str(error), flush=True)
    print(whole_number(folder), folder.problems(), flush=True)


def serve() -> None:
    """Execute each line in a fork, which prints its process id first; print its exit code."""
    with tempfile.TemporaryDirectory() as place:  # a fork that gave up its rights may not be able to import anything
        made(Path(place), 1).load()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            try:
                globals()[name](*arguments)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(0)
        print(f"ended {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)


class Other:
    """The other process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self, task: Callable[..., None], *arguments: Any) -> int:
        """Begin a task; returns the id of its process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([task.__name__, [str(a) if isinstance(a, Path) else a for a in arguments]]))
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> tuple[list[str], int]:
        """Wait for its end; returns what it printed and its exit code."""
        assert self.process.stdout is not None
        lines: list[str] = []
        while not (line := self.process.stdout.readline()).startswith("ended "):
            assert line, "the other process is gone"
            lines.append(line.rstrip("\n"))
        return lines, int(line.split()[1])

    def do(self, task: Callable[..., None], *arguments: Any) -> tuple[list[str], int]:
        self.start(task, *arguments)
        return self.end()


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    modules = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
        yield Other(process)
        process.kill()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model of two versions, each with a network of its own, to copy: that is faster than making one."""
    return made(tmp_path_factory.mktemp("models") / "template", 2)


@pytest.fixture(scope="module")
def frozen_template(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The same with one network for both versions."""
    return made(tmp_path_factory.mktemp("models") / "frozen", 2, frozen=True)


# Kills


def seconds_to_publish(path: Path) -> float:
    start = time.perf_counter()
    made(path, 5)
    return (time.perf_counter() - start) / 5


def test_thirty_kills_at_any_moment_leave_the_old_model_or_the_new_one(other: Other, tmp_path: Path) -> None:
    folder, draws, last, littered = made(tmp_path / "killed", 1), random.Random(0), 1, 0
    pace = seconds_to_publish(tmp_path / "measured")
    for _ in range(KILLS):
        following = max((last, *folder.newer())) + 1  # killed writers may have taken numbers
        process = other.start(publish_until_killed, tmp_path / "killed")
        time.sleep(draws.uniform(0, 4 * pace))
        os.kill(process, signal.SIGKILL)
        printed, code = other.end()
        assert code == -signal.SIGKILL, printed
        last = int(printed[-1]) if printed else last
        pace *= 1 if printed else 1.2  # on a busy machine, another process may take longer than this one did
        littered += any(storage.ASIDE in name for name in entries(folder.path))
        assert whole_number(folder) in (last, last + 1 if printed else following)
        assert_tidy(folder)
        last = whole_number(folder)
    assert littered >= 3, "no kill hit a writer at work"
    assert last > 5, "no writer came to an end"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_kill_before_any_step_leaves_the_old_model_or_the_new_one(
    alone: bool, frozen: bool, other: Other, template: ModelFolder, frozen_template: ModelFolder, tmp_path: Path
) -> None:
    outcomes = []
    for step in range(1, 100):
        path = tmp_path / str(step)
        folder = copied(frozen_template if frozen else template, path)
        printed, code = other.do(publish_and_die_at, path, 3, step, alone, frozen)
        if code == 0:
            break
        assert printed == []
        number = whole_number(folder)  # before leftovers are removed
        assert_tidy(folder)
        assert whole_number(folder) == number
        assert folder.versions() == ([1, 2] if number == 2 else [3] if alone else [2, 3])
        if number == 3 and alone:
            assert not any(b"class 1" in (content or b"") for content in entries(path).values())
        outcomes.append(number)
    assert whole_number(folder) == 3
    assert outcomes == sorted(outcomes)  # old up to a point, new from there on
    assert outcomes.count(2) >= 8 and outcomes.count(3) >= 3


def test_kill_after_writing_the_network_leaves_the_old_model_and_a_leftover(
    other: Other, template: ModelFolder, tmp_path: Path
) -> None:
    folder = copied(template, tmp_path / "model")
    assert other.do(publish_and_die_after_the_network, folder.path) == ([], -signal.SIGKILL)
    assert len(list((folder.path / "networks").iterdir())) == 3
    assert whole_number(folder) == 2
    assert folder.problems() == []
    with folder.writing():
        assert entries(folder.path) == entries(template.path)


def test_kill_in_the_first_publication_leaves_a_usable_folder(other: Other, tmp_path: Path) -> None:
    outcomes = []
    for step in range(1, 100):
        path = tmp_path / str(step)
        folder = ModelFolder(path)
        if other.do(publish_and_die_at, path, 1, step, False, False)[1] == 0:
            break
        outcomes.append(folder.exists())
        before = entries(path)
        assert (folder.problems() == []) == folder.exists()
        assert entries(path) == before
        with folder.writing() as writer:
            publish(writer, 2 if folder.exists() or folder.newer() else 1)
        assert_tidy(folder)
    assert outcomes == sorted(outcomes) and not outcomes[0] and len(outcomes) >= 8


# Readers


def test_readers_see_only_complete_versions_while_fifty_are_published(other: Other, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", 1)
    other.start(read_until, folder.path, tmp_path / "stop")
    with folder.writing() as writer:
        for number in range(2, 52):
            publish(writer, number, keep=2, alone=number % 7 == 0)
    (tmp_path / "stop").touch()
    printed, code = other.end()
    assert code == 0 and len(printed) == 1 and int(printed[0]) > 10, printed


def test_read_only_user_can_load_and_verify(other: Other) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to other users
        os.chmod(place, 0o755)
        path = Path(place) / "model"
        made(path, 2)
        (path / "versions" / f"{storage.ASIDE}left").mkdir()
        (path / "versions" / "000003").mkdir()
        parts = [path, *path.rglob("*")]
        for each in parts:
            each.chmod(0o555 if each.is_dir() else 0o444)
        before = entries(path)
        try:
            assert other.do(look_without_rights, path) == (["EngramError True", "2 []"], 0)
            assert entries(path) == before
        finally:
            for each in parts:
                each.chmod(0o755)


# Disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", STEPS)
def test_disk_error_at_any_step_leaves_the_old_model_and_no_leftovers(
    step: str, code: int, template: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name, concerns = STEPS[step]
    errors = 0
    for number in range(1, 100):
        folder = copied(template, tmp_path / str(number))
        before = entries(folder.path)
        with folder.writing() as writer:
            failing = Failing(getattr(place, name), number, code, concerns)
            with monkeypatch.context() as patched:
                patched.setattr(place, name, failing)
                try:
                    publish(writer, 3, keep=2)
                except EngramError as error:
                    errors += 1
                    assert str(folder.path) in str(error) and os.strerror(code) in str(error)
                    assert entries(folder.path) == before
                else:
                    assert whole_number(folder) == 3  # only the removal of unused files failed
        assert_tidy(folder)
        if failing.left > 0:
            break
    assert whole_number(folder) == 3
    assert errors >= {"sync": 8, "replace": 2, "remove": 0}.get(step, 1)


def test_failed_rollback_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, 2)
    before = entries(tmp_path)
    for number in (1, 2):
        with folder.writing() as writer:
            monkeypatch.setattr(os, "fsync", Failing(os.fsync, number, errno.EIO, always))
            with pytest.raises(EngramError, match=os.strerror(errno.EIO)):
                writer.use(1)
            monkeypatch.undo()
        assert entries(tmp_path) == before


def test_lasting_disk_error_leaves_the_old_or_the_new_model_and_reports_which(
    template: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for number in range(1, 13):
        folder = copied(template, tmp_path / str(number))
        failing = Failing(os.fsync, number, errno.EIO, always, forever=True)
        with folder.writing() as writer:
            monkeypatch.setattr(os, "fsync", failing)
            try:
                publish(writer, 3)
            except EngramError as error:
                seen.append((whole_number(folder), "Nothing was changed." in str(error)))
            monkeypatch.undo()
        assert_tidy(folder)
    assert set(seen) == {(2, True), (3, False)}


@pytest.mark.parametrize("room", [0, 100, 500])
def test_full_disk_leaves_the_old_model_and_no_leftovers(room: int, other: Other, tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    before = entries(tmp_path)
    printed, code = other.do(publish_with_little_room, tmp_path, room)
    assert code == 0 and len(printed) == 1
    assert str(tmp_path) in printed[0] and os.strerror(errno.EFBIG) in printed[0]
    assert entries(tmp_path) == before
    assert_tidy(folder)


def test_failed_first_publication_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 100):
        folder = ModelFolder(tmp_path / str(number))
        with folder.writing() as writer:
            failing = Failing(os.fsync, number, errno.ENOSPC, always)
            monkeypatch.setattr(os, "fsync", failing)
            try:
                publish(writer, 1)
            except EngramError:
                assert not folder.exists()
                publish(writer, 1)
            monkeypatch.undo()
        assert whole_number(folder) == 1
        assert_tidy(folder)
        if failing.left > 0:
            break
    assert number > 8


@pytest.mark.parametrize("made", [False, True])
def test_failed_first_publication_leaves_nothing(made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 14):  # the first fsync is of the parent folder, which makes the new name durable
        folder = ModelFolder(tmp_path / str(number))
        if made:
            folder.path.mkdir()
        with pytest.raises(EngramError, match=str(tmp_path)), folder.writing() as writer:
            monkeypatch.setattr(os, "fsync", Failing(os.fsync, number, errno.EIO, always))
            publish(writer, 1)
        monkeypatch.undo()
        assert folder.path.exists() == made and entries(tmp_path) == ({str(number): None} if made else {})
        if made:
            folder.path.rmdir()


def test_folder_that_cannot_be_locked_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_lock = Failing(os.open, 1, errno.ENOSPC, lambda path, *arguments, **options: Path(path).name == ".lock")
    monkeypatch.setattr(os, "open", to_lock)
    with pytest.raises(EngramError, match="No space left"), ModelFolder(tmp_path / "model").writing():
        pass
    assert entries(tmp_path) == {}


def test_unreadable_disk_is_not_taken_for_a_missing_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "model", 2)
    before = entries(tmp_path)
    with pytest.raises(EngramError, match="Input/output error"), folder.writing() as writer:
        monkeypatch.setattr(Path, "lstat", Failing(Path.lstat, 1, errno.EIO, always, forever=True))
        publish(writer, 3)  # must not be taken for the first version of a new model
    monkeypatch.undo()
    assert entries(tmp_path) == before
    assert_tidy(folder)


def test_error_on_closing_the_lock_does_not_undo_a_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelFolder(tmp_path).writing() as writer:
        publish(writer, 1)
        monkeypatch.setattr(os, "close", Failing(os.close, 1, errno.EIO, always, forever=True))
    monkeypatch.undo()
    assert whole_number(ModelFolder(tmp_path)) == 1


def test_keyboard_interrupt_leaves_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, 1)
    before = entries(tmp_path)

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    with folder.writing() as writer:
        monkeypatch.setattr(storage, "sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publish(writer, 2)
        monkeypatch.undo()
    assert entries(tmp_path) == before


if __name__ == "__main__":
    serve()
