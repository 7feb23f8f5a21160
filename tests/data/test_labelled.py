"""Labelled images are found in folders and lists; skipped files are listed with the reason."""

from __future__ import annotations

import os
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images_made import encoded, gradient
from progress_made import Recorder

from engram.data import labelled
from engram.data.labelled import LabelledFiles, SkippedFile, decode_files, read_images, scan
from engram.errors import DataError, UsageError
from engram.text import printable

CAFE = "café"
COMPOSED, DECOMPOSED = unicodedata.normalize("NFC", CAFE), unicodedata.normalize("NFD", CAFE)


def fill(folder: Path, *names: str) -> None:
    """Write small images, each of another grey, and their folders."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(np.full((5, 7, 3), 10 * number % 256, np.uint8), "PNG"))


def listed(folder: Path, text: str | bytes) -> Path:
    """A list of images; a.png, b.png and c.png exist."""
    fill(folder, "a.png", "b.png", "c.png")
    path = folder / "list.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def classes(found: LabelledFiles) -> dict[str, list[str]]:
    """The relative paths that were found, by class."""
    root = found.source if found.source.is_dir() else found.source.parent
    result: dict[str, list[str]] = {name: [] for name in found.class_names}
    for path, label in zip(found.paths, found.labels, strict=True):
        result[found.class_names[label]].append(str(path.relative_to(root)))
    return result


def reasons(skipped: tuple[SkippedFile, ...], root: Path) -> dict[str, str]:
    return {str(left.path.relative_to(root)): left.reason for left in skipped}


# Folders


def test_each_sub_folder_is_a_class_with_all_images_below_it(tmp_path: Path) -> None:
    fill(tmp_path, "dog/2.png", "dog/1.JPG", "cat/b.webp", "cat/kitten/young/a.png", "cat/kitten/b.jpeg", "emu/1.gif")
    found = scan(tmp_path)
    assert classes(found) == {
        "cat": ["cat/b.webp", "cat/kitten/b.jpeg", "cat/kitten/young/a.png"],
        "dog": ["dog/1.JPG", "dog/2.png"],
        "emu": ["emu/1.gif"],
    }
    assert found.class_names == ("cat", "dog", "emu")
    assert found.labels == (0, 0, 0, 1, 1, 2)
    assert found.skipped == ()
    assert scan(str(tmp_path)) == found


def test_the_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *(f"{label}/{number}/{number}.png" for label in "cab" for number in (3, 1, 2)))
    expected = scan(tmp_path)
    assert list(expected.paths) == sorted(expected.paths)
    scandir = os.scandir

    def turned(folder: Path) -> Any:
        with scandir(folder) as entries:
            return nullcontext(sorted(entries, key=lambda entry: entry.name, reverse=True))

    monkeypatch.setattr(os, "scandir", turned)
    assert scan(tmp_path) == expected


def test_system_files_are_ignored_without_a_report(tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.png", "__MACOSX/cat/._1.png", ".git/1.png", "cat/.hidden/1.png", "cat/._1.png")
    fill(tmp_path, "@eaDir/1.png", "$RECYCLE.BIN/1.png", "lost+found/1.png", "cat/@eaDir/1.png/thumb.png")
    for name in ("Thumbs.db", "cat/Thumbs.db", "cat/desktop.ini", ".DS_Store", "cat/.DS_Store"):
        (tmp_path / name).touch()
    found = scan(tmp_path)
    assert classes(found) == {"cat": ["cat/1.png"]}
    assert found.skipped == ()


def test_files_without_an_image_extension_and_empty_classes_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.png", "2.png")
    (tmp_path / "README.md").touch()
    (tmp_path / "cat" / "notes.txt").touch()
    (tmp_path / "cat" / "scan.tiff").touch()
    (tmp_path / "cat" / "png").touch()
    (tmp_path / "dog" / "puppies").mkdir(parents=True)
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    found = scan(tmp_path)
    assert classes(found) == {"cat": ["cat/1.png"]}
    extensions = ".jpg, .jpeg, .jpe, .jfif, .png, .apng, .webp, .bmp, .gif, .heic, .heif, .hif"
    name = f"It does not have the extension of an image: {extensions}."
    assert reasons(found.skipped, tmp_path) == {
        "2.png": "It lies beside the class folders, so it has no class.",
        "README.md": name,
        "cat/notes.txt": name,
        "cat/png": name,
        "cat/scan.tiff": name,
        "cat/pipe.png": "It is not a regular file.",
        "dog": "This class has no images.",
    }
    assert [left.path for left in found.skipped] == sorted(left.path for left in found.skipped)
    assert str(found.skipped[0]) == f"{tmp_path}/2.png: It lies beside the class folders, so it has no class."


def test_links_are_followed(tmp_path: Path) -> None:
    fill(tmp_path, "store/x/1.png", "store/2.png", "data/cat/3.png")
    (tmp_path / "data" / "dog").symlink_to(tmp_path / "store" / "x")
    (tmp_path / "data" / "cat" / "one").symlink_to("../../store/x")
    (tmp_path / "data" / "cat" / "two.png").symlink_to("../../store/2.png")
    assert classes(scan(tmp_path / "data")) == {
        "cat": ["cat/3.png", "cat/one/1.png", "cat/two.png"],
        "dog": ["dog/1.png"],
    }


def test_circular_and_broken_links_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.png", "cat/deep/2.png")
    (tmp_path / "cat" / "deep" / "up").symlink_to("..")
    (tmp_path / "cat" / "deep" / "all").symlink_to(tmp_path)
    (tmp_path / "all").symlink_to(tmp_path)
    (tmp_path / "cat" / "gone.png").symlink_to("nowhere.png")
    (tmp_path / "cat" / "itself.png").symlink_to("itself.png")
    found = scan(tmp_path)
    assert classes(found) == {"cat": ["cat/1.png", "cat/deep/2.png"]}
    circle = "This link leads to a folder that contains it."
    assert reasons(found.skipped, tmp_path) == {
        "all": circle,
        "cat/deep/all": circle,
        "cat/deep/up": circle,
        "cat/gone.png": "This link is broken.",
        "cat/itself.png": "This link is broken.",
    }


def test_images_without_class_folders_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    fill(tmp_path, "1.png", "2.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"{tmp_path} .*{tmp_path}/cat/1.jpg"):
        scan(tmp_path)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "notes.txt").touch()
    with pytest.raises(DataError, match="no images"):
        scan(tmp_path)


def test_a_source_must_be_a_folder_or_a_list(tmp_path: Path) -> None:
    fill(tmp_path, "1.png")
    with pytest.raises(DataError, match=r"1\.png .*\.csv"):
        scan(tmp_path / "1.png")
    with pytest.raises(DataError, match="absent "):
        scan(tmp_path / "absent")


def test_a_data_set_that_is_already_split_is_not_learned_as_train_and_test(tmp_path: Path) -> None:
    fill(tmp_path, "train/cat/1.png", "train/dog/1.png", "Val/cat/2.png")
    with pytest.raises(DataError, match=rf"Val and train.* {tmp_path}/train"):
        scan(tmp_path)
    fill(tmp_path, "plane/1.png")
    assert scan(tmp_path).class_names == ("Val", "plane", "train")


def test_train_may_be_a_class(tmp_path: Path) -> None:
    fill(tmp_path, "train/1.png", "train/steam/2.png")
    assert scan(tmp_path).class_names == ("train",)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "cat/1.png", "dog/1.png")
    scandir = os.scandir

    def forbid(folder: bytes) -> Any:
        if folder.endswith(b"/dog"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", forbid)
    with pytest.raises(DataError, match=r"/dog .*Permission denied"):
        scan(tmp_path)


# Names


def test_class_names_are_composed(tmp_path: Path) -> None:
    assert COMPOSED != DECOMPOSED
    fill(tmp_path, f"{DECOMPOSED}/1.png", " a name with spaces /1.png")
    assert scan(tmp_path).class_names == ("a name with spaces", COMPOSED)


@pytest.mark.parametrize(
    ("one", "other"),
    [("Cat", "cat"), (COMPOSED, DECOMPOSED), (COMPOSED.upper(), DECOMPOSED), ("Straße", "STRASSE"), ("cat", "cat ")],
)
def test_class_names_that_look_the_same_are_refused(one: str, other: str, tmp_path: Path) -> None:
    both = sorted((one, other))
    fill(tmp_path, *(f"{name}/1.png" for name in both), "dog/1.png")
    if len(os.listdir(tmp_path)) < 3:
        pytest.skip("a file system that takes both names for one")
    with pytest.raises(DataError) as caught:
        scan(tmp_path)
    for name in both:
        assert f"{name!a} (the folder {tmp_path / name})" in str(caught.value)


def test_labels_that_look_the_same_are_refused_with_their_lines(tmp_path: Path) -> None:
    path = listed(tmp_path, f"path,label\na.png,{COMPOSED}\nb.png,{COMPOSED}\nc.png,{DECOMPOSED}\n")
    with pytest.raises(DataError, match=r"'caf\\xe9' \(line 2\) and 'cafe\\u0301' \(line 4\)"):
        scan(path)


def test_a_class_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    try:
        fill(tmp_path, os.fsdecode(b"k\xe4fer/1.png"))
    except OSError:
        pytest.skip("a file system of UTF-8 alone")
    with pytest.raises(DataError, match=r"'k\\udce4fer' .*UTF-8"):
        scan(tmp_path)


def test_files_may_have_any_name_and_are_shown_on_one_line(tmp_path: Path) -> None:
    names = ["new\nline.png", "tab\t.png", "Käfer 🪲.png", "\x1b[31mred.png", "\u202egnp.png", "a,b'\".png"]
    fill(tmp_path, *(f"cat/{name}" for name in names))
    try:
        fill(tmp_path, os.fsdecode(b"cat/\xff.png"))
        names.append(os.fsdecode(b"\xff.png"))
    except OSError:
        pass  # a file system of UTF-8 alone
    (tmp_path / "cat" / "\x07bell.txt").touch()
    found = scan(tmp_path)
    assert sorted(path.name for path in found.paths) == sorted(names)
    assert len(read_images(found, 4).samples) == len(names)
    assert str(found.skipped[0]).startswith(rf"{tmp_path}/cat/\x07bell.txt: ")
    for path in found.paths:
        printable(path).encode()
        assert printable(path).isprintable()
    assert printable("a\udcff\nb\x1b Kä\u202e") == r"a\udcff\nb\x1b Kä\u202e"


# Lists


@pytest.mark.parametrize(
    "text",
    [
        "path,label\na.png,cat\nb.png,dog\nc.png,cat\n",
        "a.png,cat\nb.png,dog\nc.png,cat\n",
        "\ufeffpath,label\r\na.png,cat\r\nb.png,dog\r\nc.png,cat",
        "\ufeffa.png,cat\nb.png,dog\n\n , \nc.png,cat\n",
        " Label , PATH ,who\n cat ,a.png,me\ndog,./b.png,you\ncat,.//c.png,\n",
        '"a.png","cat"\n"b.png","dog"\n"c.png","cat"\n',
    ],
    ids=["header", "no header", "BOM", "BOM, no header, blank lines", "other columns", "quotes"],
)
def test_a_list_gives_the_label_of_each_image(text: str, tmp_path: Path) -> None:
    found = scan(listed(tmp_path, text))
    assert classes(found) == {"cat": ["a.png", "c.png"], "dog": ["b.png"]}
    assert found.skipped == ()


def test_a_list_may_name_any_file_in_any_place(tmp_path: Path) -> None:
    fill(tmp_path, "elsewhere/1.png", "lists/in side/new\nline.dat")
    rows = f'"in side/new\nline.dat",cat\n../elsewhere/1.png,dog\n{tmp_path}/lists/a.png,"dog"\n'
    path = listed(tmp_path / "lists", f"path,label\n{rows}")
    found = scan(path)
    assert [(found.class_names[label], path.name) for path, label in zip(found.paths, found.labels, strict=True)] == [
        ("cat", "new\nline.dat"),
        ("dog", "1.png"),
        ("dog", "a.png"),
    ]


def test_a_list_may_name_files_that_are_not_utf8(tmp_path: Path) -> None:
    try:
        fill(tmp_path, os.fsdecode(b"\xff.png"))
    except OSError:
        pytest.skip("a file system of UTF-8 alone")
    assert scan(listed(tmp_path, b"path,label\n\xff.png,cat\n")).paths == (tmp_path / os.fsdecode(b"\xff.png"),)
    with pytest.raises(DataError, match=r"'k\\udce4fer' \(line 2\) .*UTF-8"):
        scan(listed(tmp_path, b"path,label\na.png,k\xe4fer\n"))


def test_errors_in_a_list_are_reported_by_line(tmp_path: Path) -> None:
    good = "path,label\na.png,cat\n"
    bad = 'absent.png,cat\nb.png, \n"ab\nsent.png",dog\n,dog\na.png,dog\n./a.png,cat\nc.png\nc,d.png,cat\n'
    path = listed(tmp_path, good + bad)
    with pytest.raises(DataError) as caught:
        scan(path)
    for problem in (
        *("Line 3: there is no file absent.png.", "Line 4: the label of b.png is empty."),
        *(r"Line 5: there is no file ab\nsent.png.", "Line 7: the path is empty."),
        *("Line 8: a.png is 'dog', but 'cat' in line 2.", "Line 10: it has 1 instead of 2 columns."),
        "Line 11: it has 3 instead of 2 columns.",
    ):
        assert problem in str(caught.value)


def test_of_many_wrong_lines_ten_are_reported(tmp_path: Path) -> None:
    path = listed(tmp_path, "".join(f"{number}.png,cat\n" for number in range(1234)))
    with pytest.raises(DataError, match=r"Line 10: .* 9\.png\. .*1,224 more"):
        scan(path)


def test_dots_after_a_linked_folder_are_resolved_by_the_file_system(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "store/a.png", "store/deep/b.png")
    (tmp_path / "linked").symlink_to("store/deep")
    (tmp_path / "list.csv").write_text("linked/../a.png,cat\nlinked/b.png,dog\nstore/deep/b.png,dog\na.png,cow\n")
    found = scan(tmp_path / "list.csv")
    files = {name: path.resolve() for name, path in zip(found.class_names, found.paths, strict=True)}
    assert files["cat"] == tmp_path.resolve() / "store" / "a.png"
    assert files["cow"] == tmp_path.resolve() / "a.png"
    assert reasons(found.skipped, tmp_path) == {"store/deep/b.png": "Line 3 repeats line 2."}


def test_a_line_that_repeats_another_is_skipped_and_listed(tmp_path: Path) -> None:
    found = scan(listed(tmp_path, "path,label\na.png,cat\nb.png,dog\n./a.png, cat\n"))
    assert classes(found) == {"cat": ["a.png"], "dog": ["b.png"]}
    assert reasons(found.skipped, tmp_path) == {"a.png": "Line 4 repeats line 2."}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no images"),
        ("path,label\n", "no images"),
        ("\n\n", "no images"),
        ("path;label\na.png;cat\n", "UTF-8 .*'path;label'"),
        ("file,class,who\na.png,cat,me\n", "'file,class,who'"),
        ("file,class\na.png,cat\n", "Line 1: .* file.* path and label"),
        ("path,label\n".encode("utf-16"), "UTF-8"),
        ("path,label\n" + "a" * 200_000 + ",cat\n", ""),
        ("path,label\n" + "a" * 5_000 + ",cat\n", "Line 2: .*aaa"),
        ("path,label\na\0.png,cat\n", r"Line 2: .*a\\x00\.png"),
    ],
)
def test_a_file_that_is_not_a_list_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"list\.csv .*{message}"):
        scan(listed(tmp_path, text))


def test_a_list_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = listed(tmp_path, "a.png,cat\n")

    def forbid(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbid)
    with pytest.raises(DataError, match=r"list\.csv .*Permission denied"):
        scan(path)


# Reading


def use_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


def test_files_are_read_as_samples_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *(f"{label}/{number}.png" for number in range(8) for label in ("cat", "dog", "emu")))
    found = scan(tmp_path)
    for threads in (1, 3):
        use_threads(monkeypatch, threads)
        result = read_images(found, 4)
        assert result.samples.shape == (4, 4, 3)
        assert result.samples.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
        assert result.class_names == ("cat", "dog", "emu")
        assert result.paths == found.paths
        assert result.unreadable == ()
        greys = [10 * (3 * number + label) for label in range(3) for number in range(8)]
        assert result.samples.batch(torch.arange(24)).float().mean((1, 2, 3)).tolist() == greys


def test_images_are_read_as_squares_of_their_middle(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "wide.png").write_bytes(encoded(gradient(24, 60), "PNG"))
    result = read_images(scan(tmp_path), 24)
    assert np.array_equal(result.samples.inputs[0].numpy(), gradient(24, 60)[:, 18:42])


def test_unreadable_files_are_skipped_and_listed(tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.png", "cat/3.png", "dog/2.png", "dog/5.png")
    (tmp_path / "cat" / "2.png").write_bytes((tmp_path / "cat" / "1.png").read_bytes()[:-20])
    (tmp_path / "dog" / "1.jpg").write_text("not an image")
    (tmp_path / "dog" / "9.gif").touch()
    found = scan(tmp_path)
    (tmp_path / "dog" / "2.png").unlink()
    result = read_images(found, 4)
    assert [path.relative_to(tmp_path).as_posix() for path in result.paths] == ["cat/1.png", "cat/3.png", "dog/5.png"]
    assert result.samples.labels.tolist() == [0, 0, 1]
    assert result.samples.batch(torch.arange(3))[:, 0, 0, 0].tolist() == [0, 10, 30]
    assert len(result.samples.inputs) == 3
    assert {path: reason[:20] for path, reason in reasons(result.unreadable, tmp_path).items()} == {
        "cat/2.png": "It begins like a PNG",
        "dog/1.jpg": "It is text, and only",
        "dog/2.png": "There is no such fil",
        "dog/9.gif": "It is empty. Copy it",
    }


def test_a_class_without_a_readable_image_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.png")
    (tmp_path / "bad\ndog").mkdir()
    (tmp_path / "bad\ndog" / "1.jpg").touch()
    with pytest.raises(DataError, match=r"'bad\\ndog' .*/bad\\ndog/1\.jpg"):
        read_images(scan(tmp_path), 4)


def test_scanning_and_reading_report_every_image(tmp_path: Path) -> None:
    fill(tmp_path, *(f"{label}/{number}.png" for label in ("cat", "dog") for number in range(4)))
    (tmp_path / "dog" / "3.png").write_text("not an image")
    folder, lines = Recorder(), Recorder()
    read_images(scan(tmp_path, folder), 4, folder)
    assert folder.phases == [["scan", None, 8], ["read", 8, 8]]
    scan(listed(tmp_path, "a.png,cat\nb.png,dog\n"), lines)
    assert lines.phases == [["scan", None, 2]]


def test_few_images_are_in_memory_at_a_time_and_several_are_decoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, *(f"cat/{number:02}.png" for number in range(40)))
    guard = threading.Lock()
    meeting = threading.Barrier(3, timeout=20)  # broken, and so the test, unless three are at work together
    begun, ahead = 0, []
    decode = labelled.decode

    class Watched(Recorder):
        def advance(self, steps: int = 1, note: str = "") -> None:
            super().advance(steps)
            time.sleep(0.003)  # time enough to run ahead
            ahead.append(begun - self.phases[-1][2])

    def slow(path: Path, **options: int) -> torch.Tensor:
        nonlocal begun
        with guard:
            begun += 1
            early = begun <= 3
        if early:
            meeting.wait()
        return decode(path, **options)

    monkeypatch.setattr(labelled, "decode", slow)
    use_threads(monkeypatch, 3)
    assert len(read_images(scan(tmp_path), 4, Watched()).samples) == 40
    assert max(ahead) <= 6


def test_an_error_that_is_not_about_an_image_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "cat/1.png")

    def fail(path: Path, **options: int) -> torch.Tensor:
        raise ZeroDivisionError

    monkeypatch.setattr(labelled, "decode", fail)
    with pytest.raises(ZeroDivisionError):
        read_images(scan(tmp_path), 4)


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_without_pixels_is_refused(size: int, tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.png")
    with pytest.raises(UsageError, match=f" {size}"):
        read_images(scan(tmp_path), size)


def test_images_beyond_the_memory_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.png", "cat/2.png")
    with pytest.raises(DataError, match=r"^2 images of .* 600,000\.0 GB"):
        read_images(scan(tmp_path), 10_000_000)


def test_files_are_decoded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch, 2)
    asked: list[Path] = []

    def paths() -> Iterator[Path]:
        for number in range(20):
            asked.append(tmp_path / f"{number}.png")
            yield asked[-1]

    for ahead in (0, 12):
        asked.clear()
        with closing(decode_files(paths(), 8, ahead=ahead)) as decoded:
            assert isinstance(next(decoded), SkippedFile)
            assert len(asked) == 1 + max(ahead, 4)
