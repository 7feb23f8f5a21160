"""A model's folder: publishing, loading, rollback, and finding damage."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_made import files_of
from safetensors.torch import save

from engram import storage
from engram.errors import BusyError, DataError, EngramError, EngramWarning, UsageError
from engram.model import ModelFolder
from engram.model.folder import Writer
from engram.model.manifest import MAX_BYTES, File, Manifest, NewerError, Pointer, seal

FROZEN = {"network.extractor.weight": torch.tensor([0.5])}
NETWORK = f"networks/{hashlib.sha256(save(FROZEN)).hexdigest()}.safetensors"


def publish(writer: Writer, number: int = 1, **options: Any) -> Manifest:
    """A version that holds its number in every part except the network, which all share."""
    fields: dict[str, Any] = {"action": "learn", "method": "m", "settings": {}, "classes": [f"class {number}"]}
    return writer.publish({"weight": torch.tensor([number]), **FROZEN}, **fields | options)


def made(path: Path, versions: int = 1, **options: Any) -> ModelFolder:
    """A model with so many versions."""
    folder = ModelFolder(path)
    with folder.writing() as writer:
        for number in range(1, versions + 1):
            publish(writer, number, **options)
    return folder


def weight(folder: ModelFolder, version: int | None = None) -> int:
    return int(folder.load(version)[1]["weight"])


def folders(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "versions").iterdir())


# Publishing and loading


def test_published_version_is_loaded_unchanged(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.arange(6.0).reshape(2, 3) / 7,
        "counts": torch.tensor([3, 1]),
        "mask": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
    }
    folder = ModelFolder(tmp_path / "models" / "flowers")
    assert not folder.exists()
    with folder.writing() as writer:
        published = writer.publish(
            tensors,
            action="learn",
            method="features",
            settings={"learning_rate": 0.1, "weights": None, "milestones": [1, 2]},
            classes=["Σ", "façade"],
            details={"size": [32, 32]},
            record={"images": 40},
        )
    assert folder.exists()
    manifest, loaded = folder.load()
    assert manifest == published == folder.current()
    assert (manifest.version, manifest.parent, manifest.action, manifest.method) == (1, None, "learn", "features")
    assert manifest.settings == {"learning_rate": 0.1, "weights": None, "milestones": [1, 2]}
    assert manifest.classes == ("Σ", "façade")
    assert manifest.details == {"size": [32, 32]}
    assert [(change.version, change.action, change.details) for change in folder.history()] == [
        (1, "learn", {"images": 40})
    ]
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert folder.problems() == []


def test_folder_holds_exactly_the_documented_files(tmp_path: Path) -> None:
    made(tmp_path, 2)
    assert files_of(tmp_path).keys() == {
        ".lock",
        "current.json",
        "versions/000001/manifest.json",
        "versions/000001/learner.safetensors",
        "versions/000002/manifest.json",
        "versions/000002/learner.safetensors",
        NETWORK,
    }


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.arange(2)}
    for name, each in (("one", tensors), ("two", dict(reversed(tensors.items())))):
        with ModelFolder(tmp_path / name).writing() as writer:
            writer.publish(each, action="learn", method="m", settings={}, classes=[])
    one, two = (files_of(tmp_path / name)["versions/000001/learner.safetensors"] for name in ("one", "two"))
    assert one == two


def test_every_version_has_the_full_history_and_its_parent(tmp_path: Path) -> None:
    folder = made(tmp_path, 4, keep=2)
    assert [change.version for change in folder.history()] == [1, 2, 3, 4]
    assert folder.current().parent == 3
    assert folder.current().history == folder.history()


def test_the_last_versions_are_kept(tmp_path: Path) -> None:
    folder = made(tmp_path, 8)
    assert folder.versions() == [4, 5, 6, 7, 8]
    assert folders(tmp_path) == ["000004", "000005", "000006", "000007", "000008"]
    assert [weight(folder, number) for number in (4, 8)] == [4, 8]
    with folder.writing() as writer:
        publish(writer, 9, keep=1)
    assert folders(tmp_path) == ["000009"]


def test_rollback_and_further_updates(tmp_path: Path) -> None:
    folder = made(tmp_path, 5)
    with folder.writing() as writer:
        assert writer.use(2).version == 2
        assert weight(folder) == 2
        assert folder.versions() == [1, 2, 3, 4, 5]
        assert [change.version for change in folder.history()] == [1, 2, 3, 4, 5]
        assert folder.problems() == []
        on = publish(writer, 6, keep=3)
    assert (on.version, on.parent) == (6, 2)
    assert [change.version for change in on.history] == [1, 2, 3, 4, 5, 6]
    assert folder.versions() == [1, 2, 6]  # ancestors are worth more than versions that were left
    assert folder.problems() == []


def test_ancestors_of_the_version_in_use_are_kept(tmp_path: Path) -> None:
    folder = made(tmp_path, 5)
    with folder.writing() as writer:
        writer.use(1)
        for number in (6, 7):
            publish(writer, number, keep=5)
    assert folder.versions() == [1, 4, 5, 6, 7]


def test_missing_version_cannot_be_loaded_or_used(tmp_path: Path) -> None:
    folder = made(tmp_path, 3, keep=2)
    for number in (0, 1, 4, -1):
        with pytest.raises(UsageError, match=f"{number} .*{tmp_path}.* 2, 3"):
            folder.load(number)
        with folder.writing() as writer, pytest.raises(UsageError, match=f"{number} .*{tmp_path}"):
            writer.use(number)


def test_missing_model_is_reported(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "my flowers")
    for read in (folder.load, folder.current, folder.history, folder.versions):
        with pytest.raises(DataError, match=r"engram learn '.*my flowers'"):
            read()
    assert [str(folder.path) in problem for problem in folder.problems()] == [True]
    assert not folder.path.exists()
    with folder.writing() as writer, pytest.raises(DataError, match="my flowers"):
        writer.use(1)


def test_folder_with_other_content_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("")
    with (
        pytest.raises(UsageError, match=r"holiday\.jpg"),
        ModelFolder(tmp_path).writing(),
    ):
        pass
    assert [str(tmp_path) in problem for problem in ModelFolder(tmp_path).problems()] == [True]
    assert files_of(tmp_path).keys() == {"holiday.jpg"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": {"learning_rate": float("nan")}},
        {"settings": {"group": {"learning_rate": 1}}},
        {"details": {"tensor": torch.ones(1)}},
        {"details": {"half a character": "\ud800"}},
        {"record": {"deep": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}},
        {"details": {"long": "x" * MAX_BYTES}},
        {"classes": ["a", "a"]},
        {"classes": [1]},
        {"action": None},
    ],
)
def test_unreadable_content_is_not_written(wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = made(tmp_path)
    before = files_of(tmp_path)
    with folder.writing() as writer, pytest.raises(UsageError, match="cannot be saved"):
        publish(writer, 2, **wrong)
    assert files_of(tmp_path) == before


# Forgetting


def test_publishing_alone_removes_every_byte_of_other_versions(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path)
    secret = torch.arange(100, 164, dtype=torch.uint8)
    with folder.writing() as writer:
        for name in ("anna", "berta"):
            fields: dict[str, Any] = {"classes": [name], "details": {"of": name}, "record": {"learned": [name]}}
            writer.publish({name: secret}, action="learn", method="m", settings={"for": name}, **fields)
        writer.use(1)
        kept = {"rest": torch.zeros(3)}
        writer.publish(kept, action="forget", method="m", settings={}, classes=["carla"], record={"n": 1}, alone=True)
        publish(writer, 4)
    assert folder.versions() == [3, 4]
    for name, content in files_of(tmp_path).items():
        for trace in (b"anna", b"berta", secret.numpy().tobytes()[:8]):
            assert trace not in content, name
    entries = [(change.version, change.action, change.details) for change in folder.history()]
    assert entries == [(1, "learn", {}), (2, "learn", {}), (3, "forget", {"n": 1}), (4, "learn", {})]
    assert folder.problems() == []


def test_failed_removal_is_reported_and_completed_by_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, 2)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with folder.writing() as writer:
        monkeypatch.setattr(storage, "remove", refuse)
        with pytest.raises(EngramError, match=r"Permission denied.*engram rollback .* --to 3"):
            publish(writer, 3, alone=True)
    assert weight(folder) == 3
    assert folder.leftovers()[:2] == ["versions/000001", "versions/000002"]
    monkeypatch.undo()
    with folder.writing() as writer:
        writer.use(3)  # the command in the message
    assert folder.problems() == folder.leftovers() == []
    assert folders(tmp_path) == ["000003"]


@pytest.mark.parametrize("damage", ["removed", "emptied", "a pipe"])
def test_forgotten_version_is_not_recovered_with_a_damaged_pointer(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, 2)
    with folder.writing() as writer:
        monkeypatch.setattr(Writer, "_remove_unused", lambda self, essential: None)  # as if killed before
        assert publish(writer, 3, alone=True).parent is None
        monkeypatch.undo()
    assert folders(tmp_path) == ["000001", "000002", "000003"]
    DAMAGES[damage](tmp_path / "current.json")
    for number in (1, 2):
        with folder.writing() as writer, pytest.raises(UsageError, match=rf"{number} .* 3"):
            writer.use(number)
    with folder.writing() as writer:
        assert writer.use(3).version == 3
        assert folders(tmp_path) == ["000003"]
    assert folder.problems() == []


def test_forgotten_version_is_not_offered_even_if_it_is_the_only_intact_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, 2)
    with folder.writing() as writer:
        monkeypatch.setattr(Writer, "_remove_unused", lambda self, essential: None)
        publish(writer, 3, alone=True)
        monkeypatch.undo()
    (tmp_path / "current.json").unlink()
    (tmp_path / "versions" / "000003" / "learner.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="No version"):
        folder.load()


# Two at once


def test_second_writer_is_refused_while_readers_are_not(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with folder.writing():
        with pytest.raises(BusyError, match=str(tmp_path)), folder.writing():
            pytest.fail("both write")
        assert weight(folder) == 1
        (tmp_path / f"{storage.ASIDE}of-the-writer").write_text("half")
        (tmp_path / "versions" / "000002").mkdir()
        assert folder.problems() == []  # files of a writer at work are no damage
        assert (tmp_path / f"{storage.ASIDE}of-the-writer").exists()
        assert folders(tmp_path) == ["000001", "000002"]


def test_the_next_writer_removes_what_a_killed_writer_left_and_reading_does_not(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with folder.writing() as writer:
        publish(writer, 2, keep=1)
    whole = files_of(tmp_path)

    def litter() -> None:
        for place in (tmp_path, tmp_path / "versions", tmp_path / "networks"):
            (place / f"{storage.ASIDE}half").mkdir()
            (place / f"{storage.ASIDE}half" / "learner.safetensors").write_text("half")
        shutil.copytree(tmp_path / "versions" / "000002", tmp_path / "versions" / "000001")

    def unused_network() -> None:
        (tmp_path / "networks" / f"{'0' * 64}.safetensors").write_text("")

    for left in (litter, unused_network):
        left()
        littered = files_of(tmp_path)
        assert folder.problems() == [] and folder.leftovers()
        assert files_of(tmp_path) == littered
        with pytest.warns(EngramWarning, match=str(tmp_path)), folder.writing():
            assert files_of(tmp_path) == whole and folders(tmp_path) == ["000002"]


@pytest.mark.parametrize("file", ["learner.safetensors", "networks"])
def test_reader_retries_when_a_writer_removes_what_it_reads(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path)
    open_inside, overtaken = storage.open_inside, []

    def overtake(path: Path, name: str, most: int) -> Any:
        if file in name and len(overtaken) < 3:
            overtaken.append(name)
            with monkeypatch.context() as plain, folder.writing() as writer:
                plain.setattr(storage, "open_inside", open_inside)
                plain.setitem(FROZEN, "network.extractor.weight", torch.tensor([len(overtaken)]))
                publish(writer, len(overtaken) + 1, alone=True)
        return open_inside(path, name, most)

    monkeypatch.setattr(storage, "open_inside", overtake)
    assert weight(folder) == 4
    assert len(set(overtaken)) == 3


def test_reader_gives_up_after_many_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path)
    changes = iter(range(1000))
    monkeypatch.setattr(folder, "_content", lambda: str(next(changes)))
    (tmp_path / "versions" / "000001" / "learner.safetensors").unlink()
    with pytest.raises(BusyError, match=str(tmp_path)):
        folder.load()


# Damage

FILES = ("current.json", "versions/000002/manifest.json", "versions/000002/learner.safetensors", NETWORK)


def refused(folder: ModelFolder, name: str) -> None:
    """Assert that the damaged file is reported and the version in use cannot be loaded."""
    problems = folder.problems()
    assert any(problem.startswith(name) for problem in problems), problems
    with pytest.raises(DataError, match=f"{folder.path} .*{name}"):
        folder.load()


def test_every_changed_byte_is_found_and_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    whole = files_of(tmp_path)
    for name in sorted(whole.keys() - {".lock"}):
        path, content = tmp_path / name, whole[name]
        for position, byte in enumerate(content):
            path.write_bytes(content[:position] + bytes([byte ^ 1]) + content[position + 1 :])
            assert folder.problems(), (name, position)
            with pytest.raises(DataError):
                folder.load()
        path.write_bytes(content)
    assert folder.problems() == []
    assert files_of(tmp_path) == whole


def cut(length: float) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(length * path.stat().st_size)])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": cut(0),
    "cut in the middle": cut(0.5),
    "cut at the end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "doubled": lambda path: path.write_bytes(2 * path.read_bytes()),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("absent")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_every_damaged_file_is_found_and_refused(name: str, damage: str, tmp_path: Path) -> None:
    folder = made(tmp_path, 2)
    DAMAGES[damage](tmp_path / name)
    refused(folder, name)
    assert folders(tmp_path) == ["000001", "000002"]  # nothing is removed that may be needed
    assert name == NETWORK or (tmp_path / NETWORK).exists()


@pytest.mark.parametrize("name", [*FILES, "versions/000002", "versions", "networks"])
def test_link_to_the_same_content_is_refused(name: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", 2)
    (folder.path / name).rename(tmp_path / "elsewhere")
    (folder.path / name).symlink_to(tmp_path / "elsewhere")
    assert any("a link leads there" in problem for problem in folder.problems())
    with pytest.raises(DataError, match="a link leads there"):
        folder.load()


def test_model_can_be_reached_by_a_link(tmp_path: Path) -> None:
    made(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    assert weight(ModelFolder(tmp_path / "link")) == 1
    assert ModelFolder(tmp_path / "link").problems() == []


@pytest.mark.parametrize("name", ["versions", "networks"])
def test_no_writer_follows_a_link_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", 2)
    (folder.path / name).rename(tmp_path / "elsewhere")
    (folder.path / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / f"{storage.ASIDE}theirs").mkdir()
    (tmp_path / "elsewhere" / "000007").mkdir()
    (tmp_path / "elsewhere" / f"{'0' * 64}.safetensors").write_text("")
    before = sorted(tmp_path.rglob("*"))
    folder.problems()
    with folder.writing() as writer:
        with pytest.raises(DataError, match=f"{name} is a link"):
            publish(writer, 3)
        with pytest.raises(DataError):
            writer.use(1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["manifest.json", "learner.safetensors"])
def test_swapped_files_of_two_versions_are_found(name: str, tmp_path: Path) -> None:
    folder = made(tmp_path, 2)
    one, two = (tmp_path / "versions" / number / name for number in ("000001", "000002"))
    os.rename(one, tmp_path / "third")
    os.rename(two, one)
    os.rename(tmp_path / "third", two)
    refused(folder, f"versions/000002/{name}")
    assert len(folder.problems()) == 2
    with pytest.raises(DataError, match="No version"):
        folder.load(1)


def test_version_of_another_model_is_found(tmp_path: Path) -> None:
    folder, another = made(tmp_path / "model", 2), made(tmp_path / "another", 2, method="another")
    shutil.rmtree(folder.path / "versions" / "000002")
    shutil.copytree(another.path / "versions" / "000002", folder.path / "versions" / "000002")
    refused(folder, "versions/000002/manifest.json was changed: it is not the manifest that was saved")


def test_version_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    folder = made(tmp_path, 2)
    shutil.rmtree(tmp_path / "versions" / "000002")
    shutil.copytree(tmp_path / "versions" / "000001", tmp_path / "versions" / "000002")
    refused(folder, "versions/000002/manifest.json")
    (tmp_path / "current.json").unlink()  # without the pointer it is found by its own number
    assert any("000002/manifest.json" in each and "version 1" in each for each in folder.problems())


@pytest.mark.parametrize(
    "name",
    [
        *("notes.txt", "networks/notes.txt", "networks/1.safetensors", f"{NETWORK}.1"),
        *("versions/notes.txt", "versions/1", "versions/0000003", "versions/000002/.hidden"),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_foreign_files_are_named(name: str, folder: bool, tmp_path: Path) -> None:
    model = made(tmp_path, 2)
    (tmp_path / name).mkdir() if folder else (tmp_path / name).write_text("")
    assert [name in problem for problem in model.problems()] == [True]
    if name.startswith("versions/000002"):
        with pytest.raises(DataError, match=name):
            model.load()
    assert weight(model, 1) == 1
    assert (tmp_path / name).exists()


def test_invalid_lock_file_is_named_and_not_followed(tmp_path: Path) -> None:
    folder = made(tmp_path / "model")
    (folder.path / ".lock").write_text("hidden")
    assert [".lock" in problem for problem in folder.problems()] == [True]
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").symlink_to(tmp_path / "outside")
    assert [".lock" in problem for problem in folder.problems()] == [True]
    with pytest.raises(EngramError, match=str(folder.path)), folder.writing():
        pass
    assert not (tmp_path / "outside").exists()


def test_several_problems_are_all_named(tmp_path: Path) -> None:
    folder = made(tmp_path, 3)
    (tmp_path / "versions" / "000001" / "manifest.json").unlink()
    (tmp_path / "versions" / "000002" / "learner.safetensors").unlink()
    (tmp_path / "versions" / "000002" / "extra").write_text("")
    shutil.rmtree(tmp_path / "versions" / "000003")
    named = [problem.split()[0] for problem in folder.problems()]
    assert named == [
        "versions/000001/manifest.json",
        "versions/000002/learner.safetensors",
        "versions/000002/extra",
        "versions/000003/manifest.json",
    ]


def test_damage_is_reported_with_the_rollback_command(tmp_path: Path) -> None:
    folder = made(tmp_path / "my model", 3)
    (folder.path / "versions" / "000003" / "learner.safetensors").write_bytes(b"")
    command = f"engram rollback '{folder.path}' --to 2"
    with pytest.raises(DataError, match=r"000003/learner\.safetensors") as raised:
        folder.load()
    assert str(raised.value).endswith(command)
    with folder.writing() as writer:
        with pytest.raises(DataError, match="--to 2"):
            writer.use(3)
        assert folder.pointer().current == 3
        writer.use(2)
    assert weight(folder) == 2
    assert ["000003/learner.safetensors" in problem for problem in folder.problems()] == [True]
    with folder.writing() as writer:
        assert publish(writer, 4, keep=2).version == 4
    assert folder.versions() == [2, 4]
    assert folder.problems() == []


@pytest.mark.parametrize("damage", ["removed", "emptied", "doubled", "a pipe", "a link to nothing"])
def test_rollback_repairs_a_damaged_pointer(damage: str, tmp_path: Path) -> None:
    folder = made(tmp_path, 4)
    (tmp_path / "versions" / "000004" / "learner.safetensors").write_bytes(b"")
    (tmp_path / "versions" / "000002" / "manifest.json").write_bytes(b"")
    DAMAGES[damage](tmp_path / "current.json")
    assert folder.exists()
    with pytest.raises(DataError, match=r"engram rollback .* --to 3"):
        folder.load()
    with folder.writing() as writer:
        with pytest.raises(DataError, match=r"current\.json"):
            publish(writer, 5)
        assert folders(tmp_path) == ["000001", "000002", "000003", "000004"]
        writer.use(3)
    assert weight(folder) == 3
    assert folder.versions() == [1, 3, 4]
    assert [change.version for change in folder.history()] == [1, 2, 3, 4]
    assert ["000004/learner.safetensors" in problem for problem in folder.problems()] == [True]


def test_history_continues_from_the_newest_readable_manifest(tmp_path: Path) -> None:
    folder = made(tmp_path, 3)
    (tmp_path / "versions" / "000003" / "manifest.json").write_bytes(b"")
    assert [change.version for change in folder.history()] == [1, 2]
    for number in ("000001", "000002"):
        (tmp_path / "versions" / number / "manifest.json").write_bytes(b"")
    with pytest.raises(DataError, match=r"versions/000003/manifest\.json"):
        folder.history()
    with folder.writing() as writer:
        assert [change.version for change in publish(writer, 4).history] == [4]


def rewritten(folder: ModelFolder, files: dict[str, bytes]) -> None:
    """Write files with correct checksums along the whole chain, as a forger would."""
    place = folder.path / "versions" / "000001"
    manifest = folder.current()
    for name, content in files.items():
        (place / name).write_bytes(content)
        if name == "learner.safetensors":
            saved = File(hashlib.sha256(content).hexdigest(), len(content))
            (place / "manifest.json").write_bytes(dataclasses.replace(manifest, learner=saved).serialise())
    digest = hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()
    (folder.path / "current.json").write_bytes(Pointer(current=1, versions={1: digest}).serialise())


def test_a_signature_of_the_pointer_covers_all_other_files(tmp_path: Path) -> None:
    folder = made(tmp_path)
    signed = (tmp_path / "current.json").read_bytes()
    rewritten(folder, {"learner.safetensors": save({"weight": torch.tensor([2])})})
    assert folder.problems() == [] and weight(folder) == 2  # forged
    assert (tmp_path / "current.json").read_bytes() != signed
    (tmp_path / "current.json").write_bytes(signed)
    refused(folder, "versions/000001/manifest.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04}q\x00.",  # a pickle
        b"\xff" * 8 + b"{}",
        b'\x3e\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(70),
        (b'{"a":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]}}', b"12345678"),
        (b'{"a":{"dtype":"F32","shape":[0,9223372036854775807,9],"data_offsets":[0,0]}}', b""),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b""),
    ],
)
def test_invalid_tensors_with_a_correct_checksum_are_refused(
    content: bytes | tuple[bytes, bytes], tmp_path: Path
) -> None:
    folder = made(tmp_path)
    if isinstance(content, tuple):
        content = len(content[0]).to_bytes(8, "little") + content[0] + content[1]
    rewritten(folder, {"learner.safetensors": content})
    assert "versions/000001/learner.safetensors" in folder.problems()[0]
    with pytest.raises(DataError, match=r"versions/000001/learner\.safetensors"):
        folder.load()


@pytest.mark.parametrize("nonsense", [{}, {"schema": 1}, {"schema": 1, "deep": [[[[[[1]]]]]]}, {"schema": "one"}])
def test_invalid_manifest_with_a_correct_checksum_is_refused(nonsense: dict[str, Any], tmp_path: Path) -> None:
    folder = made(tmp_path)
    rewritten(folder, {"manifest.json": seal({"a": 1, **nonsense})})
    refused(folder, "versions/000001/manifest.json")


def test_oversized_json_is_not_read(tmp_path: Path) -> None:
    folder = made(tmp_path, 2)
    os.truncate(tmp_path / "current.json", 2**40)
    refused(folder, "current.json")
    assert "current.json" in folder.problems()[0] and str(MAX_BYTES) in folder.problems()[0]


# Other versions


def test_model_of_a_newer_version_is_neither_read_nor_changed(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (tmp_path / "current.json").write_bytes(seal({"schema": 2, "engram": "9.0.0", "anything": 1}))
    (tmp_path / "versions" / "000009").mkdir()
    before = files_of(tmp_path)
    fact = r"current\.json .*schema 2.* 9\.0\.0"
    assert len(folder.problems()) == 1
    for read in (folder.load, folder.current, folder.history):
        with pytest.raises(DataError, match=f"{tmp_path} .*{fact}"):
            read()
    with folder.writing() as writer:
        with pytest.raises(DataError, match=fact):
            publish(writer, 2)
        with pytest.raises(DataError, match=fact):
            writer.use(1)
    assert files_of(tmp_path) == before
    assert folders(tmp_path) == ["000001", "000009"]


def test_version_of_a_newer_version_is_distinguished_from_damage(tmp_path: Path) -> None:
    folder = made(tmp_path)
    rewritten(folder, {"manifest.json": seal({"schema": 2, "engram": "9.0.0"})})
    with pytest.raises(NewerError, match=r"versions/000001/manifest\.json .*schema 2.* 9\.0\.0"):
        folder.load()
    assert "9.0.0" in folder.problems()[0]


def test_folder_path_may_be_text(tmp_path: Path) -> None:
    made(tmp_path / "model", 2)
    assert ModelFolder(str(tmp_path / "model")).versions() == [1, 2]


def test_folder_versions_of_other_software_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "1.png").write_bytes(b"an image")
    folder = ModelFolder(tmp_path)
    assert not folder.exists()
    assert [str(tmp_path) in problem for problem in folder.problems()] == [True]
    with pytest.raises(UsageError, match="versions"), folder.writing():
        pass
    assert (tmp_path / "versions" / "1.png").read_bytes() == b"an image"
