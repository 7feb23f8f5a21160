"""An index finds the same files as `learn`, is cached, and is rebuilt after a change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from folders_made import class_folders, imagenet, settle
from progress_made import Recorder

from engram.data import scanning
from engram.data.labelled import scan
from engram.data.scanning import ImageIndex, build_index, folder_cache, open_index
from engram.errors import DataError, EngramWarning
from engram.storage import load_tensors, save_tensors


@pytest.fixture
def tree(tmp_path: Path, cache: Path) -> Path:
    return settle(imagenet(tmp_path / "data", classes=3, train=3, test=1))


def paths(index: ImageIndex) -> list[Path]:
    return [index.path(row) for row in range(len(index))]


def test_all_images_are_found_in_order_with_their_sizes(tree: Path) -> None:
    index = build_index(tree, ("train", "val"))
    expected = sorted(path for path in tree.rglob("*.JPEG"))
    assert paths(index) == expected and len(index) == 12
    assert index.sizes.tolist() == [path.stat().st_size for path in expected]
    assert index.relative(0) == b"train/n00000000/n00000000_0.JPEG"


def test_only_the_requested_parts_are_scanned(tree: Path) -> None:
    assert paths(build_index(tree, ("val",))) == sorted((tree / "val").rglob("*.JPEG"))
    assert len(build_index(tree, ())) == 12


def test_the_number_of_threads_makes_no_difference(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = build_index(tree, ())
    monkeypatch.setattr(scanning, "THREADS", 1)
    one = build_index(tree, ())
    assert (one.folders, one.names) == (many.folders, many.names)
    for field in ("changed", "folder_of", "ends", "sizes", "times"):
        assert torch.equal(getattr(one, field), getattr(many, field))


def test_the_same_is_found_and_skipped_as_by_learn(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", classes=2, per_class=2)
    first = root / "n00000000"
    for name in ("Thumbs.db", ".hidden.jpg", "notes.txt", "CAPITALS.JPG"):
        (first / name).write_bytes(b"something")
    (first / "deeper" / "still").mkdir(parents=True)
    (first / "deeper" / "still" / "x.png").write_bytes(b"something")
    (first / os.fsdecode(b"not-utf-8-\xff.jpg")).write_bytes(b"something")
    (first / "gone.jpg").symlink_to("nowhere")
    (first / "link.jpg").symlink_to("CAPITALS.JPG")
    (first / "around").symlink_to(root)
    (first / "itself").symlink_to("itself")
    os.mkfifo(first / "pipe.jpg")
    index, found = build_index(root, ()), scan(root)
    assert sorted(paths(index)) == sorted(found.paths)
    assert {(left.path, left.reason) for left in index.skipped} == {(left.path, left.reason) for left in found.skipped}


def test_progress_is_reported(tree: Path) -> None:
    recorder = Recorder()
    build_index(tree, (), recorder)
    assert recorder.phases == [["scan", None, 12]]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="elsewhere"):
        build_index(tmp_path / "elsewhere", ())


def test_thousands_of_skipped_files_are_counted_and_not_all_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "MAX_SKIPPED", 3)
    for number in range(5):
        (tree / "val" / f"{number}.txt").touch()
        (tree / "train" / f"{number}.txt").touch()
    skipped = build_index(tree, ()).skipped
    assert [left.path.name for left in skipped[:3]] == ["0.txt", "1.txt", "2.txt"]
    assert skipped[3].path == tree and "7 more" in skipped[3].reason
    assert len(skipped) == 4


# Keeping


def test_a_cached_index_is_loaded_completely(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "train" / "notes.txt").touch()
    settle(tree)
    made = open_index(tree, ("train", "val"))
    assert made.place.parent == folder_cache(tree) and made.place.is_file()
    monkeypatch.setattr(scanning, "build_index", None)  # it is not scanned again
    cached = open_index(tree, ("train", "val"))
    for field in ("root", "folders", "names", "skipped"):
        assert getattr(cached, field) == getattr(made, field)
    for field in ("changed", "folder_of", "ends", "sizes", "times"):
        assert torch.equal(getattr(cached, field), getattr(made, field))
    assert cached.skipped and list(cached.identity(torch.arange(12))) == list(made.identity(torch.arange(12)))
    assert not [path for path in tree.rglob("*") if path.name.startswith((".aside", ".lock", "index"))]


def test_other_parts_have_an_index_of_their_own(tree: Path) -> None:
    assert len(open_index(tree, ("train",))) == 9
    assert len(open_index(tree, ("val",))) == 3
    assert len(open_index(tree, ())) == 12


CHANGES: dict[str, Callable[[Path], object]] = {
    "file added": lambda tree: (tree / "train/n00000001/more.JPEG").write_bytes(b"more"),
    "file removed": lambda tree: (tree / "train/n00000001/n00000001_0.JPEG").unlink(),
    "file renamed": lambda tree: (tree / "val/n00000002/n00000002_3.JPEG").rename(tree / "val/n00000002/other.JPEG"),
    "class added": lambda tree: (tree / "train/n00000009").mkdir(),
    "class removed": lambda tree: shutil.rmtree(tree / "val/n00000002"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_scanned_again(change: str, tree: Path) -> None:
    before = open_index(tree, ("train", "val"))
    CHANGES[change](tree)
    after = open_index(tree, ("train", "val"))
    assert paths(after) == sorted(tree.rglob("*.JPEG"))
    assert (after.folders, after.names) != (before.folders, before.names)


def test_a_folder_modified_just_before_the_scan_is_scanned_again(tree: Path) -> None:
    (tree / "val" / "new").mkdir()  # this second: a change in the next millisecond might leave the time as it is
    index = open_index(tree, ("train", "val"))
    changed = dict(zip(index.folders, index.changed.tolist(), strict=True))
    assert changed[b"val"] == changed[b"val/new"] == 0 < changed[b"train"]


@pytest.mark.parametrize("damage", ["cut short", "another schema", "a part missing", "nonsense inside"])
def test_a_damaged_index_is_rebuilt(damage: str, tree: Path) -> None:
    place = open_index(tree, ()).place
    content, tensors = place.read_bytes(), load_tensors(place)
    if damage == "cut short":
        place.write_bytes(content[: len(content) // 2])
    elif damage == "another schema":
        save_tensors(place, {**tensors, "schema": torch.tensor([99])})
    elif damage == "a part missing":
        save_tensors(place, {name: tensor for name, tensor in tensors.items() if name != "changed"})
    else:
        save_tensors(place, {**tensors, "text": torch.tensor([1, 2], dtype=torch.uint8)})
    assert len(open_index(tree, ())) == 12
    assert place.read_bytes() == content


def test_an_index_that_cannot_be_cached_is_rebuilt_with_a_warning(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGRAM_DATA", str(tmp_path / "file"))
    for _ in range(2):
        with pytest.warns(EngramWarning, match="data "):
            assert len(open_index(tree, ())) == 12


def test_the_identity_of_images_does_not_depend_on_the_folders_location(tree: Path, tmp_path: Path) -> None:
    one = build_index(tree, ())
    moved = tree.rename(tmp_path / "moved")
    assert list(build_index(moved, ()).identity(torch.arange(12))) == list(one.identity(torch.arange(12)))
