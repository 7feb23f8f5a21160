"""Folders of images as data sets: their splits, and errors about a wrong layout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from folders_made import class_folders, imagenet, settle, write

from engram.data import DATASETS, Dataset, DecodeOptions, Samples, load, split
from engram.data.files import CachedImages, ImageFiles
from engram.data.folder import field_subset
from engram.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def alone(cache: Path) -> Path:
    return cache


def names_of(samples: Samples) -> list[str]:
    assert isinstance(samples.inputs, ImageFiles)
    root = samples.inputs.index.root
    return [str(samples.inputs.index.path(row).relative_to(root)) for row in samples.rows.tolist()]


def classes_of(dataset: Dataset, samples: Samples) -> list[str]:
    return [dataset.class_names[label] for label in samples.labels.tolist()]


SPLIT = ["folder", "imagenet1000", "imagenet100"]


@pytest.mark.parametrize("name", SPLIT)
def test_train_and_val_are_the_splits_and_classes_are_sorted(name: str, tmp_path: Path) -> None:
    root = imagenet(tmp_path / "photos", classes=3, train=3, test=2)
    (root / "imagenet100.txt").write_text("n00000002\n\nn00000000\nn00000001\n")
    dataset = load(name, root)
    assert dataset.name == ("photos" if name == "folder" else name)
    assert dataset.class_names == ("n00000000", "n00000001", "n00000002")
    for samples, part, count in ((dataset.train, "train", 3), (dataset.test, "val", 2)):
        assert len(samples) == 3 * count
        for path, known in zip(names_of(samples), classes_of(dataset, samples), strict=True):
            assert path.startswith(f"{part}/{known}/")


def test_each_data_set_has_its_own_default_size_and_fit(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "data")

    def how(name: str, reading: DecodeOptions | None = None) -> tuple[tuple[int, ...], str]:
        inputs = load(name, root, options=reading).train.inputs
        assert isinstance(inputs, ImageFiles)
        return inputs.shape[1:], inputs.fit

    assert how("folder") == ((64, 64, 3), "middle")
    assert how("imagenet1000") == ((256, 256, 3), "stretch")  # iCaRL's; an image is 196,608 bytes in the paper
    assert load("imagenet1000", root).train.sample_bytes == 196_608
    assert how("imagenet1000", DecodeOptions(size=12, fit="middle")) == ((12, 12, 3), "middle")


def test_the_name_does_not_depend_on_how_the_path_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = class_folders(tmp_path / "photos", classes=2, per_class=5)
    (root / "itself").symlink_to("itself")  # beside the classes: no reason to give them up
    monkeypatch.chdir(root)
    names = {load("folder", place).name for place in (root, Path("."), Path("../photos"))}
    assert names == {"photos"}


def test_a_folder_name_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    root = class_folders(tmp_path / os.fsdecode(b"caf\xe9\x1b"), classes=2, per_class=5)
    dataset = load("folder", root)
    assert (dataset.name, dataset.source["data"]) == ("caf\\udce9\\x1b", "caf\\udce9\\x1b")


@pytest.mark.parametrize("part", ["val", "validation", "test"])
def test_the_test_split_may_have_other_names(part: str, tmp_path: Path) -> None:
    root = imagenet(tmp_path / "data", classes=2)
    (root / "val").rename(root / part)
    if part == "val":
        (root / "test").mkdir()  # as ImageNet's, whose test images have no labels
        write(root / "test" / "1.JPEG", 0, 0)
    assert {path.split("/")[0] for path in names_of(load("folder", root).test)} == {part}


def test_without_splits_a_fixed_fifth_of_each_class_is_the_test_split(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "mine", classes=3, per_class=10)
    write(root / "n00000001" / "deeper" / "x.PNG", 1, 99, "PNG")
    dataset = load("folder", root)
    assert dataset.train.labels.bincount().tolist() == [8, 9, 8]
    assert dataset.test.labels.bincount().tolist() == [2, 2, 2]
    assert dataset.train.inputs is dataset.test.inputs
    assert sorted(names_of(dataset.train) + names_of(dataset.test)) == sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()
    )
    assert names_of(load("folder", root).test) == names_of(dataset.test)


def test_classes_named_train_and_plane_are_classes(tmp_path: Path) -> None:
    for label, name in enumerate(("plane", "train")):
        for number in range(3):
            write(tmp_path / "data" / name / f"{number}.jpg", label, number)
    assert load("folder", tmp_path / "data").class_names == ("plane", "train")


def test_a_class_list_selects_classes_in_any_order(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "data", classes=4, train=2, test=1)
    listed = tmp_path / "some.txt"
    listed.write_text("n00000003\nn00000001\n")
    for name in SPLIT:
        dataset = load(name, root, options=DecodeOptions(class_list=listed))
        assert dataset.class_names == ("n00000001", "n00000003")
        assert (len(dataset.train), len(dataset.test)) == (4, 2)
    assert load("folder", root / "train", options=DecodeOptions(class_list=listed)).class_names == (
        "n00000001",
        "n00000003",
    )


def test_the_usual_hundred_classes_are_the_first_of_icarls_permutation() -> None:
    names = [f"n{number:08d}" for number in range(1000)]
    chosen = field_subset(names)
    order = np.arange(1000)
    np.random.seed(1993)  # as published code does it
    np.random.shuffle(order)
    assert chosen == sorted(names[number] for number in order[:100])
    assert order[:5].tolist() == [54, 7, 894, 512, 126]  # as lists of the field's ImageNet order begin
    assert field_subset(names[:100]) == names[:100]


def test_splitting_into_tasks_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load("imagenet1000", imagenet(tmp_path / "data"))
    monkeypatch.setattr("engram.data.files.decode", None)
    stream = split(dataset, classes_per_task=2, seed=0, validation=0.2)
    assert [len(task.train) for task in stream] == [16, 16] and [len(task.test) for task in stream] == [4, 4]
    assert all(task.train.inputs is dataset.train.inputs for task in stream)
    assert len(set(stream.fingerprints())) == 2


def test_cached_images_have_the_pixels_and_the_fingerprint_of_the_files(tmp_path: Path) -> None:
    root = settle(imagenet(tmp_path / "data"))
    plain = load("imagenet1000", root, options=DecodeOptions(size=8))
    packed = load("imagenet1000", root, options=DecodeOptions(size=8, cache=10**6))
    assert isinstance(packed.train.inputs, CachedImages) and packed.train.inputs is packed.test.inputs
    for one, other in ((plain.train, packed.train), (plain.test, packed.test)):
        assert one.fingerprint() == other.fingerprint()
        everything = torch.arange(len(one))
        assert torch.equal(one.batch(everything), other.batch(everything))


def test_skipped_files_are_listed_as_by_learn(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "data", classes=2, train=3)
    (root / "train" / "n00000000" / "empty.JPEG").touch()
    (root / "train" / "n00000000" / "notes.txt").touch()
    write(root / "train" / "stray.JPEG", 0, 0)
    dataset = load("imagenet1000", root)
    reasons = {str(left.path.relative_to(root / "train")): left.reason for left in dataset.skipped}
    assert list(reasons) == ["n00000000/empty.JPEG", "n00000000/notes.txt", "stray.JPEG"]
    assert "empty" in reasons["n00000000/empty.JPEG"] and "extension" in reasons["n00000000/notes.txt"]
    assert "beside the class folders" in reasons["stray.JPEG"]
    assert len(dataset.train) == 6
    assert load("folder", root / "val").skipped == ()


# Errors


def test_a_folder_must_be_named_and_exist(tmp_path: Path) -> None:
    for name in ("folder", "imagenet100", "imagenet1000", "tiny-imagenet-200"):
        with pytest.raises(UsageError, match=f"'{name}' .* --data DIR"):
            load(name)
        with pytest.raises(DataError, match=r"gone .*--data DIR"):
            load(name, tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file "):
        load("folder", tmp_path / "file")


def test_a_wrong_layout_is_refused_with_what_was_found_and_what_is_expected(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", classes=7, per_class=2)
    found = "n00000000, n00000001, n00000002, n00000003, n00000004, …"
    with pytest.raises(DataError, match=f"data .*{found}.* train/CLASS/[*].JPEG .* val/CLASS/[*].JPEG"):
        load("imagenet1000", root)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty .* CLASS/\*\.jpg.* train/CLASS/\*\.jpg.* val/"):
        load("folder", tmp_path / "empty")


def test_validation_images_that_are_not_sorted_into_classes_are_reported(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data" / "train", classes=2, per_class=2).parent
    write(root / "val" / "ILSVRC2012_val_00000001.JPEG", 0, 0)
    with pytest.raises(DataError, match=r"val .* 2 of the 2 .* n00000000.* val/CLASS"):
        load("imagenet1000", root)


def test_train_without_a_test_split_is_reported(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data" / "train", classes=2, per_class=2).parent
    with pytest.raises(DataError, match=r"data .*data/train"):
        load("folder", root)
    assert len(load("folder", root / "train").test) == 2


@pytest.mark.parametrize("parts", [("Train", "Test"), ("training", "testing"), ("val", "test")])
def test_splits_are_not_learned_as_classes(parts: tuple[str, str], tmp_path: Path) -> None:
    for part in parts:
        class_folders(tmp_path / "data" / part, classes=2, per_class=2)
    with pytest.raises(DataError, match=rf"data .*{' and '.join(sorted(parts))}"):
        load("folder", tmp_path / "data")


def test_classes_named_like_splits_may_have_images(tmp_path: Path) -> None:
    for name in ("test", "train"):
        for number in range(3):
            write(tmp_path / "data" / name / f"{number}.jpg", 0, number)
    shutil.move(tmp_path / "data" / "test", tmp_path / "data" / "testing")
    assert load("folder", tmp_path / "data").class_names == ("testing", "train")


def test_classes_without_training_images_are_reported(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "data", classes=2, train=2, test=1)
    (root / "train" / "bare").mkdir()
    write(root / "val" / "unlearned" / "1.jpg", 0, 0)
    dataset = load("folder", root)
    assert dataset.class_names == ("n00000000", "n00000001")
    assert {(left.path.relative_to(root).as_posix(), left.reason) for left in dataset.skipped} == {
        ("train/bare", "This class has no images."),
        ("val/unlearned", "train has no such class, so it cannot be learned."),
    }
    (root / "train" / "n00000000" / "inner").mkdir()
    (root / "train" / "bare").rmdir()
    assert [left.path.name for left in load("folder", root / "train").skipped] == []


def test_a_class_list_may_have_any_line_ends_and_blanks_around_names(tmp_path: Path) -> None:
    for name in (" emu ", "cat", "dog"):
        for number in range(2):
            write(tmp_path / "data" / name / f"{number}.jpg", 0, number)
    (tmp_path / "list.txt").write_bytes("\ufeffemu\r\ncat\r\n".encode())
    dataset = load("folder", tmp_path / "data", options=DecodeOptions(class_list=tmp_path / "list.txt"))
    assert dataset.class_names == ("cat", "emu")


def test_a_class_with_one_image_is_reported(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data", classes=2, per_class=3)
    write(root / "single" / "1.jpg", 0, 0)
    with pytest.raises(DataError, match="single"):
        load("folder", root)


def test_classes_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    for name in ("Cat", "cat"):
        for number in range(2):
            write(tmp_path / "data" / name / f"{number}.jpg", 0, number)
    with pytest.raises(DataError, match=r"'Cat' .* and 'cat' "):
        load("folder", tmp_path / "data")


def test_neither_a_hundred_nor_a_thousand_classes_need_a_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"1,000; found 4.* imagenet100\.txt"):
        load("imagenet100", imagenet(tmp_path / "data"))


def test_a_list_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "data")
    listed = tmp_path / "list.txt"

    def attempt() -> Dataset:
        return load("imagenet100", root, options=DecodeOptions(class_list=listed))

    with pytest.raises(UsageError, match=r"list\.txt"):
        attempt()
    listed.write_text("\n")
    with pytest.raises(UsageError, match=r"list\.txt .*empty"):
        attempt()
    listed.write_text("n00000001\nn0000002\n")
    with pytest.raises(UsageError, match=r"'n0000002'.* 'n00000002'.*list.txt"):
        attempt()


def test_decode_options_are_refused_for_data_sets_without_files() -> None:
    for name in ("digits", "cifar100", "arrays"):
        with pytest.raises(UsageError, match=rf"^{name} .* folder, imagenet100"):
            load(name, options=DecodeOptions(size=12))


@pytest.mark.parametrize("wrong", [{"size": 0}, {"workers": 0}])
def test_impossible_decode_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="found 0"):
        DecodeOptions(**wrong)  # type: ignore[arg-type]


def test_data_sets_of_files_are_listed() -> None:
    assert [name for name, source in DATASETS.items() if source.location == "folder"] == [
        *("folder", "imagenet100", "imagenet1000", "tiny-imagenet-200")
    ]
