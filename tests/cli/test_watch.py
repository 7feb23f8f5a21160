"""`engram watch` as a process: it learns what arrives until it is stopped, and continues after a restart."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command, engram
from folders_made import write

from engram.model import ModelFolder, load, verify


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        for number in range(3):
            write(tmp_path / "incoming" / name / f"{number}.jpg", label, number)
    return tmp_path


def seen(place: Path) -> dict[str, int]:
    model = load(ModelFolder(place / "model"))
    return dict(zip(model.names, model.metadata.seen, strict=True))


def wait_until(condition: Callable[[], bool], command: Command) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end and command.poll() is None
        time.sleep(0.05)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_images_are_learned_as_they_arrive_and_after_a_restart(place: Path, end: signal.Signals) -> None:
    arguments = ("watch", "model", "incoming", "--settle", "0.3", "--every", "0.1", "--json")
    folder = ModelFolder(place / "model")
    command = Command(*arguments, cwd=place)
    wait_until(folder.exists, command)
    write(place / "incoming" / "emu" / "0.jpg", 2, 0)
    wait_until(lambda: folder.number_in_use() == 2, command)
    time.sleep(0.5)
    command.send_signal(end)
    done = command.wait()
    assert (done.returncode, done.stderr) == (0, "")
    found = events(done.stdout)
    assert [each["event"] for each in found] == ["watching", "learned", "learned"]
    assert found[2]["update"]["new"] == {"emu": 1}
    write(place / "incoming" / "emu" / "1.jpg", 2, 1)
    again = engram(*arguments, "--once", cwd=place)
    assert [each["event"] for each in events(again.stdout)] == ["watching", "learned"]
    assert seen(place) == {"cat": 3, "dog": 3, "emu": 2}
    assert verify(folder).intact and not verify(folder).leftovers


def test_killed_at_any_moment_each_image_is_learned_once(place: Path) -> None:
    for delay in (0.2, 0.6, 1.0, 1.4):
        command = Command("watch", "model", "incoming", "--settle", "0", "--every", "0.1", cwd=place)
        time.sleep(delay)
        command.send_signal(signal.SIGKILL)
        command.process.join()
    engram("watch", "model", "incoming", "--settle", "0", "--once", cwd=place)
    assert seen(place) == {"cat": 3, "dog": 3}
    assert verify(ModelFolder(place / "model")).intact


def test_a_pass_prints_what_it_did_and_fails_if_the_model_is_locked(place: Path) -> None:
    (place / "incoming" / "cat" / "broken.jpg").write_bytes(b"no image")
    done = engram("watch", "model", "incoming", "--settle", "0", "--once", cwd=place)
    _, skipped, learned = done.stdout.splitlines()
    assert done.returncode == 0 and "broken.jpg" in skipped and "cat 3, dog 3" in learned
    assert "95 % interval" in learned and "6 held-out images" in learned
    write(place / "incoming" / "cat" / "new.jpg", 0, 8)
    with ModelFolder(place / "model").writing():
        done = engram("watch", "model", "incoming", "--settle", "0", "--once", cwd=place)
    assert done.returncode == 1 and "busy" in done.stdout


def test_a_folder_that_is_missing_is_wrong_usage(tmp_path: Path) -> None:
    done = engram("watch", "model", "absent", cwd=tmp_path)
    assert done.returncode == 2 and "absent" in done.stderr
    assert os.listdir(tmp_path) == []
