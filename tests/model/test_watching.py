"""`watch`: images are learned once, when they have settled, whatever happens in between."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders_made import write

from engram.errors import BusyError, DataError, UsageError
from engram.model import LearnOptions, ModelFolder, WatchEvent, inspect, load, verify, watch
from engram.model import watching as watching_module

# A network that learns in a moment, and publishes whatever it has learned.
QUICK = LearnOptions(
    network="small", image_size=8, epochs=1, hold_out=0, force=True, settings={"adapter_steps": 1, "adapter_width": 8}
)


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return ModelFolder(tmp_path / "model")


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    """Two classes of three images."""
    for label, name in enumerate(("cat", "dog")):
        for number in range(3):
            write(tmp_path / "incoming" / name / f"{number}.jpg", label, number)
    return tmp_path / "incoming"


def once(folder: ModelFolder, incoming: Path, settle: float = 0.0) -> list[WatchEvent]:
    return list(watch(folder, incoming, QUICK, settle=settle, once=True))[1:]  # after "watching"


def kinds(events: list[WatchEvent]) -> list[str]:
    return [each.event for each in events]


def seen(folder: ModelFolder) -> dict[str, int]:
    model = load(folder)
    return dict(zip(model.names, model.metadata.seen, strict=True))


def test_each_image_is_learned_once(folder: ModelFolder, incoming: Path) -> None:
    (learned,) = once(folder, incoming)
    assert learned.event == "learned" and learned.update is not None and learned.update.version == 1
    assert seen(folder) == {"cat": 3, "dog": 3}
    assert once(folder, incoming) == []
    write(incoming / "cat" / "new.jpg", 0, 9)
    write(incoming / "emu" / "0.jpg", 2, 0)
    assert kinds(once(folder, incoming)) == ["learned"]
    assert seen(folder) == {"cat": 4, "dog": 3, "emu": 1}
    assert [each.version for each in inspect(folder).history] == [1, 2]
    assert verify(folder).intact and not verify(folder).leftovers


def test_a_file_that_changes_is_learned_again_and_one_that_moves_to_another_class_too(
    folder: ModelFolder, incoming: Path
) -> None:
    once(folder, incoming)
    write(incoming / "cat" / "0.jpg", 0, 77)
    (incoming / "cat" / "1.jpg").rename(incoming / "dog" / "moved.jpg")
    once(folder, incoming)
    assert seen(folder) == {"cat": 4, "dog": 4}


def test_the_state_contains_no_names(folder: ModelFolder, incoming: Path) -> None:
    once(folder, incoming)
    (state,) = (folder.path / "watch").rglob("state.json")
    assert "cat" not in state.read_text() and "jpg" not in state.read_text()


def test_an_unreadable_file_is_reported_once_and_again_when_it_has_changed(folder: ModelFolder, incoming: Path) -> None:
    broken = incoming / "emu" / "broken.jpg"
    broken.parent.mkdir()
    broken.write_bytes(b"not an image")
    (incoming / "notes.txt").write_text("beside the classes")
    events = once(folder, incoming)
    assert kinds(events) == ["skipped", "skipped", "learned"]
    assert {each.path for each in events[:2]} == {broken, incoming / "notes.txt"}
    assert seen(folder) == {"cat": 3, "dog": 3}
    assert broken not in [each.path for each in once(folder, incoming)]
    broken.write_bytes(b"still no image")
    assert broken in [each.path for each in once(folder, incoming)]
    write(broken, 2, 0)
    assert "learned" in kinds(once(folder, incoming)) and seen(folder)["emu"] == 1


def test_a_file_that_still_grows_is_not_learned(
    folder: ModelFolder, incoming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = incoming / "cat" / "0.jpg"
    content = growing.read_bytes()
    growing.write_bytes(content[: len(content) // 2])

    def grow(seconds: float) -> None:
        growing.write_bytes(content)

    monkeypatch.setattr(watching_module.time, "sleep", grow)
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(watching_module.time, "monotonic", lambda: float(next(clock)))
    assert kinds(once(folder, incoming, settle=5.0)) == ["learned"]
    assert seen(folder) == {"cat": 2, "dog": 3}
    assert kinds(once(folder, incoming)) == ["learned"]
    assert seen(folder) == {"cat": 3, "dog": 3}


def test_a_copy_in_progress_becomes_one_update(
    folder: ModelFolder, incoming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving: Iterator[int] = iter(range(10, 14))

    def arrive(seconds: float) -> None:
        if (number := next(arriving, None)) is not None:
            write(incoming / "cat" / f"{number}.jpg", 0, number)

    monkeypatch.setattr(watching_module.time, "sleep", arrive)
    clock = iter(range(0, 100_000, 3))
    monkeypatch.setattr(watching_module.time, "monotonic", lambda: float(next(clock)))
    events = watch(folder, incoming, QUICK, settle=5.0, interval=2.0)
    assert [next(events).event for _ in range(2)] == ["watching", "learned"]
    events.close()  # type: ignore[attr-defined]
    assert seen(folder) == {"cat": 7, "dog": 3}


def test_an_update_that_was_published_before_a_kill_is_not_repeated(
    folder: ModelFolder, incoming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(state: watching_module.WatchState) -> watching_module.WatchState:
        raise Killed  # after the update, before the state is written

    with monkeypatch.context() as patched:
        patched.setattr(watching_module.WatchState, "finished", killed)
        with pytest.raises(Killed):
            once(folder, incoming)
    assert seen(folder) == {"cat": 3, "dog": 3}
    assert once(folder, incoming) == [] and seen(folder) == {"cat": 3, "dog": 3}


def test_an_update_that_was_killed_before_it_was_published_is_repeated(
    folder: ModelFolder, incoming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(watching_module, "learn_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            once(folder, incoming)
    assert not folder.exists()
    assert kinds(once(folder, incoming)) == ["learned"] and seen(folder) == {"cat": 3, "dog": 3}


def test_while_another_process_writes_it_waits(folder: ModelFolder, incoming: Path) -> None:
    once(folder, incoming)
    write(incoming / "cat" / "new.jpg", 0, 9)
    with folder.writing():
        assert kinds(once(folder, incoming)) == ["busy"]
    assert kinds(once(folder, incoming)) == ["learned"]


def test_a_second_watcher_of_the_same_folder_is_refused(folder: ModelFolder, incoming: Path) -> None:
    first = watch(folder, incoming, QUICK, settle=0)
    next(first)
    with pytest.raises(BusyError):
        once(folder, incoming)
    first.close()  # type: ignore[attr-defined]
    assert kinds(once(folder, incoming)) == ["learned"]


def test_a_failed_update_is_reported_and_keeps_its_images(
    folder: ModelFolder, incoming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object, **options: object) -> None:
        raise DataError("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr(watching_module, "learn_files", failing)
        (failed,) = once(folder, incoming)
    assert failed.event == "failed" and "full" in failed.reason
    assert kinds(once(folder, incoming)) == ["learned"]


def test_an_empty_folder_is_waited_for_and_a_missing_one_is_refused(folder: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert kinds(once(folder, tmp_path / "empty")) == ["waiting"]
    with pytest.raises(UsageError, match="absent"):
        once(folder, tmp_path / "absent")


def test_a_damaged_state_is_named(folder: ModelFolder, incoming: Path) -> None:
    once(folder, incoming)
    (state,) = (folder.path / "watch").rglob("state.json")
    for content in (b"{", b'{"done": {"x": [1]}}', b"[]"):
        state.write_bytes(content)
        with pytest.raises(DataError, match=r"state\.json"):
            once(folder, incoming)


def test_a_copy_of_the_model_has_the_state_of_the_watched_folder(
    folder: ModelFolder, incoming: Path, tmp_path: Path
) -> None:
    once(folder, incoming)
    shutil.copytree(folder.path, tmp_path / "copy")
    assert once(ModelFolder(tmp_path / "copy"), incoming) == []
    assert os.path.exists(tmp_path / "copy" / "watch")
