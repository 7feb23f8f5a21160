"""Versions share the file of an unchanged network."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models_made import files_of, network_path
from safetensors.torch import load_file

from engram import storage
from engram.errors import DataError, EngramError, EngramWarning, UsageError
from engram.model import ModelFolder, rollback, verify
from engram.model.folder import Writer
from engram.model.manifest import Manifest

NUMBERS = 20_000  # of the network, in float32


def publish(writer: Writer, network: float | None = 0.0, **options: Any) -> Manifest:
    """A version with a network filled with this number, or without a network."""
    tensors = {"weight": torch.ones(3), "network.head.weight": torch.ones(2)}
    if network is not None:
        tensors["network.extractor.weight"] = torch.full((NUMBERS,), network)
    return writer.publish(tensors, action="learn", method="m", settings={}, classes=[], **options)


def made(path: Path, networks: Sequence[float | None], **options: Any) -> ModelFolder:
    """A model with a version for each of these networks."""
    folder = ModelFolder(path)
    with folder.writing() as writer:
        for network in networks:
            publish(writer, network, **options)
    return folder


def network(folder: ModelFolder, version: int | None = None) -> float:
    """The number that the network of a version is filled with."""
    tensors = folder.load(version)[1]
    assert tensors.keys() == {"weight", "network.head.weight", "network.extractor.weight"}
    (value,) = tensors["network.extractor.weight"].unique().tolist()
    return float(value)


def files(folder: ModelFolder) -> list[Path]:
    """What is in `networks`."""
    return sorted((folder.path / "networks").iterdir())


def path_of(folder: ModelFolder, version: int) -> Path:
    """The network file of a version."""
    return folder.path / network_path(folder.load(version)[0])


def reads_of_networks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by a name for each time that a network file is opened."""
    reads: list[str] = []
    open_inside = storage.open_inside

    def counting(folder: Path, name: str, most: int) -> Any:
        reads.extend([name] if name.startswith("networks/") else [])
        return open_inside(folder, name, most)

    monkeypatch.setattr(storage, "open_inside", counting)
    return reads


# Sharing


def test_ten_updates_of_a_frozen_network_store_it_once(tmp_path: Path) -> None:
    folder = made(tmp_path, [0.5])
    (file,) = files(folder)
    before = file.stat()
    with folder.writing() as writer:
        for _ in range(9):
            publish(writer, 0.5, keep=10)
    assert folder.versions() == list(range(1, 11))
    assert files(folder) == [file]
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # never rewritten
    size = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
    assert 4 * NUMBERS < size < 2 * 4 * NUMBERS
    assert {network(folder, number) for number in folder.versions()} == {0.5}
    assert folder.problems() == []


def test_a_network_file_holds_the_extractor_and_is_named_by_its_checksum(tmp_path: Path) -> None:
    folder = made(tmp_path, [0.5])
    (file,) = files(folder)
    manifest = folder.current()
    assert file.name == f"{hashlib.sha256(file.read_bytes()).hexdigest()}.safetensors"
    assert manifest.network is not None and manifest.network.bytes == file.stat().st_size
    assert load_file(file).keys() == {"network.extractor.weight"}
    own = load_file(tmp_path / "versions" / "000001" / "learner.safetensors")
    assert own.keys() == {"weight", "network.head.weight"}


def test_a_changed_network_makes_a_second_file_and_pruning_removes_the_first(tmp_path: Path) -> None:
    folder = made(tmp_path, [1.0, 2.0])
    first, second = path_of(folder, 1), path_of(folder, 2)
    assert files(folder) == sorted([first, second])
    assert (network(folder, 1), network(folder, 2)) == (1.0, 2.0)
    with folder.writing() as writer:
        publish(writer, 2.0, keep=2)
    assert files(folder) == [second]
    assert (network(folder, 2), network(folder)) == (2.0, 2.0)
    assert folder.problems() == []


def test_forgetting_leaves_no_network_of_an_older_version(tmp_path: Path) -> None:
    folder = made(tmp_path, [1.0, 2.0, 2.0])
    with folder.writing() as writer:
        publish(writer, 2.0, alone=True)
        assert files(folder) == [path_of(folder, 4)]
        publish(writer, 3.0, alone=True)
    assert files(folder) == [path_of(folder, 5)]
    old = [torch.full((2,), value).numpy().tobytes() for value in (1.0, 2.0)]
    assert not any(each in files(folder)[0].read_bytes() for each in old)
    assert folder.problems() == []


def test_without_an_extractor_there_is_no_network_file(tmp_path: Path) -> None:
    folder = made(tmp_path, [None])
    assert folder.current().network is None
    assert not (tmp_path / "networks").exists()
    with folder.writing() as writer:
        publish(writer, 1.0)
        publish(writer, None, keep=1)
    assert files(folder) == []
    assert folder.problems() == []


def test_each_network_file_is_read_once_to_load_verify_and_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, [1.0, 2.0, 1.0, 1.0])
    first, second = (network_path(folder.load(number)[0]) for number in (1, 2))
    reads = reads_of_networks(monkeypatch)
    folder.load()
    assert reads == [first, first]  # to compare its checksum, and to read it
    reads.clear()
    assert folder.problems() == []
    assert sorted(reads) == sorted([first, first, second, second])
    reads.clear()
    verify(folder)
    assert reads == [first, second]  # its tensors are not a model's, so they are not read
    reads.clear()
    with folder.writing() as writer:
        publish(writer, 1.0)
    assert reads == [first]
    (tmp_path / first).write_bytes(bytes((tmp_path / first).stat().st_size))
    reads.clear()
    assert len(folder.problems()) == 1
    assert reads == [first, second, second]  # a damaged file is not hashed again for each version either


# Damage

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "was cut short"),
    "changed": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"), "was changed"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is longer"),
    "a link": (lambda path: path.symlink_to(path.rename(path.parents[2] / "elsewhere")), "a link leads there"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_network_is_reported_with_the_rollback_command(damage: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", [1.0, 2.0, 2.0])
    file = path_of(folder, 3)
    do, words = DAMAGES[damage]
    do(file)
    name = f"networks/{file.name}"
    problems = folder.problems()
    assert problems[0].startswith(name) and words in problems[0]
    assert len([problem for problem in problems if words in problem]) == 1  # though two versions use it
    with pytest.raises(DataError, match=rf"damaged: {name} .*{words}.* engram rollback .* --to 1$"):
        folder.load()
    assert rollback(folder, 1).version == 1
    assert network(folder) == 1.0


@pytest.mark.parametrize("damage", DAMAGES)
def test_publishing_replaces_a_damaged_file_of_the_same_network(damage: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", [2.0, 2.0])
    DAMAGES[damage][0](path_of(folder, 2))
    with pytest.raises(DataError, match=r"No version of it is intact"):
        folder.load()
    with folder.writing() as writer:
        publish(writer, 2.0)
    assert [network(folder, number) for number in (1, 2, 3)] == [2.0, 2.0, 2.0]
    assert folder.problems() == []


def test_no_network_is_removed_while_a_manifest_is_unreadable(tmp_path: Path) -> None:
    folder = made(tmp_path, [1.0, 2.0])
    (tmp_path / "networks" / f"{'0' * 64}.safetensors").write_text("unused")
    before, manifest = files(folder), tmp_path / "versions" / "000001" / "manifest.json"
    content = manifest.read_bytes()
    for damaged, intact in ((manifest, content), (tmp_path / "current.json", (tmp_path / "current.json").read_bytes())):
        damaged.write_bytes(b"")
        with folder.writing():
            assert files(folder) == before
        damaged.write_bytes(intact)
    assert folder.leftovers() == [f"networks/{'0' * 64}.safetensors"]
    with pytest.warns(EngramWarning, match="0" * 64), folder.writing():
        assert len(files(folder)) == 2


def test_rollback_recovers_a_lost_pointer_with_its_networks(tmp_path: Path) -> None:
    folder = made(tmp_path, [1.0, 2.0])
    (tmp_path / "current.json").unlink()
    assert rollback(folder, 2).version == 2
    assert (network(folder, 1), network(folder)) == (1.0, 2.0)
    assert folder.problems() == []


def test_folder_networks_alone_is_not_a_model(tmp_path: Path) -> None:
    folder = made(tmp_path, [1.0])
    shutil.rmtree(tmp_path / "versions")
    (tmp_path / "current.json").unlink()
    before = files(folder)
    assert not folder.exists()
    with pytest.raises(UsageError, match=r"\(networks\)"), folder.writing():
        pass
    assert files(folder) == before


def test_a_first_network_that_cannot_be_saved_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, [None])
    before = files_of(tmp_path)

    def refuse(*arguments: Any) -> None:
        assert len(files(folder)) == 1
        raise OSError(errno.ENOSPC, "No space left on device")

    with folder.writing() as writer:
        monkeypatch.setattr(storage, "writing_folder", refuse)
        with pytest.raises(EngramError, match=os.strerror(errno.ENOSPC)):
            publish(writer, 2.0)
    assert files_of(tmp_path) == before
    assert folder.problems() == []


def test_a_network_file_is_shared_only_by_networks_that_are_the_same_bit_by_bit(tmp_path: Path) -> None:
    folder = made(tmp_path, [1.0])
    with folder.writing() as writer:
        _, tensors = writer.load()
        known = folder.current().network
        assert publish(writer, 1.0).network == known
        tensors["network.extractor.weight"][0] = -1.0  # in place: the file on disk is what counts
        assert writer.publish(tensors, action="learn", method="m", settings={}, classes=[]).network != known
        others = {"network.extractor.weight": torch.full((NUMBERS,), 1.0).bfloat16()}  # equal numbers, other bits
        assert writer.publish(others, action="learn", method="m", settings={}, classes=[]).network != known
    assert folder.problems() == []


def test_a_network_damaged_after_it_was_loaded_is_replaced(tmp_path: Path) -> None:
    folder = made(tmp_path, [1.0])
    with folder.writing() as writer:
        writer.load()
        path_of(folder, 1).write_bytes(b"")
        publish(writer, 1.0)
    assert folder.problems() == [] and network(folder) == 1.0
