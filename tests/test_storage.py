"""Files are complete or absent, whenever a writer is killed; damaged files are named."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import warm

from engram import storage
from engram.errors import DataError, EngramError


def write_half(folder: Path, ready: Event) -> None:
    with storage.writing(folder / "a.txt") as aside:
        aside.write_text("half")
        ready.set()
        time.sleep(60)


def hold(lock: Callable[[Path], AbstractContextManager[None]], path: Path, ready: Event) -> None:
    with lock(path):
        ready.set()
        time.sleep(60)


@contextmanager
def process(work: Callable[..., None], *arguments: object) -> Iterator[BaseProcess]:
    """Another process, which works until it is killed; inside, it is ready."""
    ready = warm().Event()
    other: BaseProcess = warm().Process(target=work, args=(*arguments, ready))  # type: ignore[attr-defined]
    other.start()
    try:
        assert ready.wait(60)
        yield other
    finally:
        other.kill()
        other.join()


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# Files


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with storage.writing(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
        assert aside.name.startswith(storage.ASIDE)
    assert path.read_text() == "new"
    assert names(tmp_path) == {"a.txt"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_writer_that_fails_midway_leaves_the_old_file_and_no_litter(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), storage.writing(path) as aside:
        aside.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == {"a.txt"}


def test_content_reaches_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        events.append("sync folder" if os.path.samestat(found, tmp_path.stat()) else f"sync {found.st_size} bytes")
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    with storage.writing(tmp_path / "a.txt") as aside:
        aside.write_text("all of it")
    assert events == ["sync 9 bytes", "rename", "sync folder"]


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_removes_its_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with process(write_half, tmp_path):
        pass
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    with storage.locked(tmp_path):
        assert names(tmp_path) == {"a.txt", ".lock"}


# Folders


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with storage.writing_folder(path) as folder:
        (folder / "a").write_text("1")
        assert not path.exists()
        (folder / "b").write_text("2")
    assert names(tmp_path) == {"model"}
    assert names(path) == {"a", "b"}


def test_a_folder_that_cannot_be_filled_never_appears(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space left"), storage.writing_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("1")
        raise OSError("no space left")
    assert names(tmp_path) == set()


def test_a_folder_that_exists_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with storage.writing_folder(path) as folder:
        (folder / "a").write_text("1")
    with pytest.raises(OSError), storage.writing_folder(path) as folder:
        (folder / "b").write_text("2")
    assert names(path) == {"a"}
    assert names(tmp_path) == {"model"}


def test_remove_takes_files_folders_and_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "file").write_text("1")
    for name in ("file", "folder", "absent"):
        storage.remove(tmp_path / name)
    assert names(tmp_path) == set()


def test_an_interrupted_removal_leaves_nothing_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("1")

    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        storage.remove(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    monkeypatch.undo()
    storage.sweep(tmp_path)
    assert names(tmp_path) == set()


def test_sweep_removes_only_temporary_files(tmp_path: Path) -> None:
    (tmp_path / f"{storage.ASIDE}file").write_text("1")
    (tmp_path / f"{storage.ASIDE}folder").mkdir()
    (tmp_path / f"{storage.ASIDE}folder" / "a").write_text("1")
    (tmp_path / "kept").write_text("1")
    (tmp_path / ".hidden").write_text("1")
    storage.sweep(tmp_path)
    assert names(tmp_path) == {"kept", ".hidden"}


def test_sweep_removes_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("1")
    for name, target in (("folder", "elsewhere"), ("nothing", "absent")):
        (tmp_path / f"{storage.ASIDE}{name}").symlink_to(target)
    storage.sweep(tmp_path)
    assert names(tmp_path) == {"elsewhere"}
    assert names(tmp_path / "elsewhere") == {"a"}


# Locks


def test_a_locked_folder_is_refused_until_its_holder_ends_even_if_killed(tmp_path: Path) -> None:
    with process(hold, storage.locked, tmp_path):
        (tmp_path / f"{storage.ASIDE}of-the-holder").write_text("half")
        with pytest.raises(EngramError, match=str(tmp_path)), storage.locked(tmp_path):
            pytest.fail("both hold the lock")
        assert f"{storage.ASIDE}of-the-holder" in names(tmp_path)  # only the holder sweeps
    with storage.locked(tmp_path):
        pass


def test_a_process_that_waits_for_a_lock_gets_it_when_its_holder_is_killed_and_not_before(tmp_path: Path) -> None:
    acquired = threading.Event()

    def wait() -> None:
        with storage.waiting(tmp_path / "lock"):
            acquired.set()

    waiter = threading.Thread(target=wait)
    with process(hold, storage.waiting, tmp_path / "lock"):
        waiter.start()
        assert not acquired.wait(0.5)
    assert acquired.wait(10)
    waiter.join(10)
    with storage.waiting(tmp_path / "lock"):  # it was released
        pass


def test_a_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), storage.locked(tmp_path):
        raise KeyError
    with storage.locked(tmp_path):
        pass


def test_a_folder_in_which_no_lock_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngramError, match=r"file .*Not a directory"), storage.locked(tmp_path / "file"):
        pass


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".lock").symlink_to(tmp_path / "outside")
    with pytest.raises(EngramError, match="folder"), storage.locked(tmp_path / "folder"):
        pass
    assert names(tmp_path) == {"folder"}


# Files from outside


def test_a_file_inside_a_folder_is_read_up_to_the_length_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    assert storage.read_inside(tmp_path, "a/b/file", 5) == b"12345"
    assert storage.read_inside(tmp_path, "a/b/file", 1000) == b"12345"
    with pytest.raises(DataError, match=r"^a/b/file .* 4 bytes"):
        storage.read_inside(tmp_path, "a/b/file", 4)


@pytest.mark.parametrize("name", ["absent", "absent/file", "a/absent"])
def test_a_file_that_is_missing_inside_a_folder_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=f"^{name} is missing.$"):
        storage.read_inside(tmp_path, name, 5)


@pytest.mark.parametrize("link", ["a", "a/b", "a/b/file"])
def test_no_link_inside_a_folder_is_followed(link: str, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    (tmp_path / link).rename(tmp_path / "elsewhere")
    (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"^a/b/file .*link"):
        storage.read_inside(tmp_path, "a/b/file", 5)


def test_a_folder_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("folder")
    assert storage.read_inside(tmp_path / "link", "file", 1) == b"1"


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(DataError, match=f"^{name} "):
            storage.read_inside(tmp_path, name, 5)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"^file/inside .*Not a directory"):
        storage.read_inside(tmp_path, "file/inside", 5)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs a list of what is open")
def test_reading_inside_a_folder_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"1")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a/file", "a/absent", "a", "absent/file"):
        with contextlib.suppress(DataError):
            storage.read_inside(tmp_path, name, 5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_valid_untrusted_json_is_parsed() -> None:
    value = {"name": "Σ", "numbers": [0, -1.5, 1e300, 2**70], "none": None, "deep": {"list": [[True]]}}
    assert storage.parse_json(json.dumps(value).encode(), "a.json") == value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting"),
        (b"\xff\xfe{}", "codec can't decode"),
        ('{"a": 1}'.encode("utf-16"), "codec can't decode"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"[1e999]", "1e999 is not a JSON number"),
        (b"[" + b"9" * 5000 + b"]", "digits"),
        (b'{"a": 1, "b": 2, "a": 1}', "a name is given twice"),
        (b'["\\ud800"]', "surrogates not allowed"),
        (b"[" * 33 + b"]" * 33, "it is nested 33 deep, which is more than 32"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "it is nested 41 deep"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "it is nested too deeply"),
    ],
)
def test_invalid_untrusted_json_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=rf"^a\.json cannot be read as JSON: .*{reason}"):
        storage.parse_json(content, "a.json")


def test_sweep_old_removes_only_old_temporary_files(tmp_path: Path) -> None:
    for name, age in (("old", 2 * storage.STALE), ("new", 0)):
        file = tmp_path / f"{storage.ASIDE}{name}"
        file.write_bytes(b"half of it")
        os.utime(file, (time.time() - age,) * 2)
    storage.sweep_old(tmp_path)
    assert names(tmp_path) == {f"{storage.ASIDE}new"}


# JSON


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"name": "Σ façade", "curve": [0.1, 1 / 3], "none": None}
    storage.write_json(tmp_path / "a.json", value)
    assert storage.read_json(tmp_path / "a.json") == value
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "Σ façade" in text
    assert text.endswith("}\n")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_invalid_json_number_is_refused_and_the_old_file_stays(number: float, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    storage.write_json(path, {"accuracy": 0.5})
    with pytest.raises(ValueError):
        storage.write_json(path, {"accuracy": number})
    assert json.loads(path.read_text()) == {"accuracy": 0.5}
    assert names(tmp_path) == {"a.json"}


def test_a_name_that_is_not_unicode_survives(tmp_path: Path) -> None:
    value = {"data": os.fsdecode(b"caf\xe9.npz")}
    storage.write_json(tmp_path / "a.json", value)
    assert storage.read_json(tmp_path / "a.json") == value


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"\xff\xfe{}", b"[" * 100_000, b"1" * 5_000])
def test_damaged_json_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"result\.json"):
        storage.read_json(path)


def test_json_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json"):
        storage.read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("read", [storage.read_json, storage.load_tensors, storage.checksum])
def test_reading_a_pipe_is_refused(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe"):
        read(tmp_path / "pipe")


# Tensors

TENSORS = {
    "weight": torch.arange(24.0).reshape(2, 3, 4).to(torch.float32) / 7,
    "counts": torch.tensor([3, 1, 4]),
    "images": torch.arange(12, dtype=torch.uint8).reshape(1, 2, 2, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 5),
}


def test_tensors_round_trip_bit_for_bit(tmp_path: Path) -> None:
    storage.save_tensors(tmp_path / "a.safetensors", TENSORS)
    loaded = storage.load_tensors(tmp_path / "a.safetensors")
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert names(tmp_path) == {"a.safetensors"}


def test_the_same_tensors_give_the_same_bytes_whatever_their_order_and_layout(tmp_path: Path) -> None:
    other = dict(reversed([(name, tensor.clone()) for name, tensor in TENSORS.items()]))
    other["weight"] = other["weight"].permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    assert not other["weight"].is_contiguous()
    for name, tensors in (("a", TENSORS), ("b", other)):
        storage.save_tensors(tmp_path / name, tensors)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert storage.checksum(tmp_path / "a") == storage.checksum(tmp_path / "b")


def test_tensors_that_share_memory_are_saved_separately(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    storage.save_tensors(tmp_path / "a", {"whole": whole, "part": whole[2:4]})
    assert storage.load_tensors(tmp_path / "a")["part"].tolist() == [2.0, 3.0]


def test_a_file_of_tensors_has_the_usual_permissions(tmp_path: Path) -> None:
    storage.write_json(tmp_path / "a.json", 1)
    storage.save_tensors(tmp_path / "a.safetensors", TENSORS)
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a.json").stat().st_mode


@pytest.mark.parametrize("keep", [0, 4, 100, -3])
def test_a_damaged_file_of_tensors_is_named(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "learner.safetensors"
    storage.save_tensors(path, TENSORS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"learner\.safetensors"):
        storage.load_tensors(path)


@pytest.mark.parametrize(
    ("header", "content"),
    [
        ({"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}, b"abc"),
        ({"dtype": "F32", "shape": [2**64 - 1, 0], "data_offsets": [0, 0]}, b""),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, b"1234"),
    ],
)
def test_tensors_that_torch_cannot_hold_are_refused(header: dict[str, Any], content: bytes, tmp_path: Path) -> None:
    text = json.dumps({"a": header}).encode()
    path = tmp_path / "learner.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    with pytest.raises(DataError, match=r"learner\.safetensors"):
        storage.load_tensors(path)
    with pytest.raises(DataError, match="content"):
        storage.parse_tensors(path.read_bytes(), "content")


def test_a_missing_file_of_tensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file"):
        storage.load_tensors(tmp_path / "absent.safetensors")


def test_tensors_are_read_from_content_as_from_a_file(tmp_path: Path) -> None:
    storage.save_tensors(tmp_path / "a", TENSORS)
    loaded = storage.parse_tensors((tmp_path / "a").read_bytes(), "a")
    assert set(loaded) == set(TENSORS)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    with pytest.raises(DataError, match=r"^a "):
        storage.parse_tensors(b"{}", "a")


def test_a_full_disk_is_an_error_and_leaves_no_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        assert len(names(tmp_path)) == 1 and path.name.startswith(storage.ASIDE)  # nothing else is written beside it
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device"):
        storage.save_tensors(tmp_path / "a", TENSORS)
    assert names(tmp_path) == set()


def test_a_checksum_is_the_digest_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"engram")
    assert storage.checksum(tmp_path / "a") == hashlib.sha256(b"engram").hexdigest()
    assert storage.checksum(tmp_path / "a", "md5") == hashlib.md5(b"engram").hexdigest()


# Folders to write to


def test_a_folder_is_made_with_its_parents_and_may_exist(tmp_path: Path) -> None:
    for _ in range(2):
        storage.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_made_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngramError, match=r"file/runs .*Not a directory"):
        storage.make_folder(tmp_path / "file" / "runs")
    with pytest.raises(EngramError, match=r"file .*File exists"):
        storage.make_folder(tmp_path / "file")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system in which nobody can make a folder")
def test_a_folder_where_none_can_be_made_is_refused_to_root_too() -> None:
    with pytest.raises(EngramError, match="/proc/engram-runs"):
        storage.make_folder(Path("/proc/engram-runs"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write whatever the permissions say")
def test_a_folder_one_may_not_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(EngramError, match="is not writable"):
            storage.make_folder(tmp_path)
        with pytest.raises(EngramError, match="Permission denied"), storage.locked(tmp_path):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_the_system_calls_read_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only file system, for root as well
    with pytest.raises(EngramError, match=str(tmp_path)):
        storage.make_folder(tmp_path)


def test_the_umask_restricts_the_lock_file(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with storage.locked(tmp_path):
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_the_memory_of_this_machine_is_known() -> None:
    assert 2**28 < storage.machine_memory() < 2**50
