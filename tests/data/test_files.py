"""Files are decoded on request, as by Pillow, and one bad file does not end a run."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from folders_made import class_folders, noisy_image, settle
from images_made import encoded, exif, gradient, ycck
from PIL import Image

from engram.data import Samples
from engram.data import files as decoding
from engram.data.files import CHANGED, GREY, MAX_WARNINGS, PARTLY, REPLACED, TOLERATED, ImageFiles
from engram.data.images import Fit
from engram.data.scanning import build_index, open_index
from engram.errors import DataError, EngramWarning


@pytest.fixture
def root(tmp_path: Path, cache: Path) -> Path:
    return settle(class_folders(tmp_path / "data", classes=3, per_class=5))


def everything(files: ImageFiles) -> np.ndarray:
    return files[torch.arange(len(files.index))].numpy()


def by_pillow(path: Path, size: int, fit: Fit) -> np.ndarray:
    with Image.open(path) as image:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        box = (0, 0, *image.size) if fit == "stretch" else (left, top, left + side, top + side)
        return np.array(image.resize((size, size), Image.Resampling.BICUBIC, box))


@pytest.mark.parametrize("fit", ["stretch", "middle"])
@pytest.mark.parametrize("workers", [1, 3])
def test_images_are_those_that_pillow_decodes(fit: Fit, workers: int, root: Path) -> None:
    files = ImageFiles(build_index(root, ()), 16, fit, workers)
    expected = np.stack([by_pillow(files.index.path(row), 16, fit) for row in range(15)])
    assert files.shape == (15, 16, 16, 3)
    assert np.array_equal(everything(files), expected)
    assert np.array_equal(files[torch.tensor([7, 0, 7])].numpy(), expected[[7, 0, 7]])
    assert files[torch.empty(0, dtype=torch.int64)].shape == (0, 16, 16, 3)


def test_changing_a_decoded_image_does_not_change_the_next(root: Path) -> None:
    files = ImageFiles(build_index(root, ()), 8, "stretch")
    first = files[torch.tensor([2])]
    before = first.clone()
    first.zero_()
    assert torch.equal(files[torch.tensor([2])], before)


def test_the_unusual_files_of_imagenet_are_decoded(tmp_path: Path) -> None:
    plain = gradient(24, 32)
    oddities = {
        "a-png.JPEG": encoded(plain, "PNG"),
        "cmyk.JPEG": encoded(Image.fromarray(plain).convert("CMYK"), "JPEG", quality=100),
        "grey.JPEG": encoded(Image.fromarray(plain).convert("L"), "JPEG", quality=100),
        "plain.JPEG": encoded(plain, "JPEG", quality=100),
        "sideways.JPEG": encoded(np.rot90(plain), "JPEG", quality=100, exif=exif(6)),  # to be turned back by a quarter
        "ycck.JPEG": ycck(plain),
    }
    (tmp_path / "data" / "class").mkdir(parents=True)
    for name, content in oddities.items():
        (tmp_path / "data" / "class" / name).write_bytes(content)
    index = build_index(tmp_path / "data", ())
    assert [index.path(row).name for row in range(len(index))] == sorted(oddities)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = dict(zip(sorted(oddities), everything(ImageFiles(index, 12, "stretch")).astype(int), strict=True))
    expected = np.array(Image.fromarray(plain).resize((12, 12), Image.Resampling.BICUBIC)).astype(int)
    for name in ("a-png.JPEG", "cmyk.JPEG", "plain.JPEG", "sideways.JPEG", "ycck.JPEG"):
        assert np.abs(images[name] - expected).max() <= 6, name
    grey = np.array(Image.fromarray(plain).convert("L").resize((12, 12), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(images["grey.JPEG"] - grey[..., None]).max() <= 4


@pytest.mark.parametrize("fit", ["stretch", "middle"])
def test_a_large_jpeg_decoded_at_half_its_size_is_almost_the_same(fit: Fit, tmp_path: Path) -> None:
    small = np.random.default_rng(1).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    large = Image.fromarray(small).resize((260, 180), Image.Resampling.BICUBIC)
    (tmp_path / "data" / "class").mkdir(parents=True)
    (tmp_path / "data" / "class" / "a.jpg").write_bytes(encoded(large, "JPEG", quality=95))
    (tmp_path / "data" / "class" / "b.png").write_bytes(encoded(large, "PNG"))  # never decoded at less
    drafted, full = everything(ImageFiles(build_index(tmp_path / "data", ()), 32, fit)).astype(int)
    assert np.abs(drafted - full).mean() < 1.5 and np.abs(drafted - full).max() < 16


# Damaged files


def warned(files: ImageFiles, rows: list[int]) -> tuple[np.ndarray, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = files[torch.tensor(rows)].numpy()
    assert all(issubclass(each.category, EngramWarning) for each in caught)
    return images, [str(each.message) for each in caught]


def test_the_readable_part_of_a_truncated_jpeg_is_used_with_one_warning(root: Path) -> None:
    path = build_index(root, ()).path(4)
    content = encoded(noisy_image(0, 4), "JPEG", quality=100)
    path.write_bytes(content[: len(content) * 7 // 10])
    files = ImageFiles(build_index(root, ()), 30, "stretch")
    images, messages = warned(files, [3, 4, 5])
    assert len(messages) == 1
    assert messages[0].startswith(f"{path}: It begins like a JPEG") and messages[0].endswith(PARTLY)
    intact = np.array(Image.open(io.BytesIO(content)).resize((30, 30), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(images[1][:15] - intact[:15]).max() <= 2  # the upper half is there
    assert (images[1][-1, -10:] == GREY).all()  # and the last corner is not
    assert warned(files, [4, 4])[1] == []


def test_a_grey_image_replaces_an_unreadable_file_with_one_warning(root: Path) -> None:
    index = build_index(root, ())
    index.path(1).write_bytes(b"x" * int(index.sizes[1]))
    index.path(2).unlink()
    files = ImageFiles(index, 8, "stretch", workers=2)
    images, messages = warned(files, list(range(15)))
    assert (images[1] == GREY).all() and (images[2] == GREY).all() and not (images[3] == GREY).all()
    for row, message in zip((1, 2), messages, strict=True):
        assert message.startswith(f"{index.path(row)}: ") and message.endswith(REPLACED)
    assert warned(files, [0, 1, 2])[1] == []
    assert sorted(files.problems) == [1, 2]


def test_warnings_name_a_limited_number_of_files(tmp_path: Path) -> None:
    index = build_index(class_folders(tmp_path / "data", classes=1, per_class=30), ())
    for row in range(25):
        index.path(row).write_bytes(b"x" * int(index.sizes[row]))
    files = ImageFiles(index, 8, "stretch")
    messages = [message for some in torch.arange(25).split(5) for message in warned(files, some.tolist())[1]]
    assert len(messages) == MAX_WARNINGS + 1 and len(files.problems) == 25
    assert str(tmp_path / "data") in messages[-1] and ".JPEG" not in messages[-1]


def test_too_many_unreadable_files_at_once_are_an_error(root: Path) -> None:
    index = build_index(root, ())
    for row in range(TOLERATED + 1):
        index.path(row).unlink()
    files = ImageFiles(index, 8, "stretch")
    assert len(warned(files, list(range(TOLERATED)))[1]) == TOLERATED
    with pytest.raises(DataError, match=rf"15 .* {TOLERATED + 1} .*_0\.JPEG"):
        files[torch.arange(15)]


def test_a_file_changed_in_place_gives_a_warning_and_a_new_scan(root: Path) -> None:
    index = open_index(root, ())
    path = index.path(0)
    path.write_bytes(encoded(gradient(), "PNG"))  # its folder's time of change stays as it is
    assert int(open_index(root, ()).sizes[0]) == int(index.sizes[0])
    _, messages = warned(ImageFiles(index, 8, "stretch"), [0])
    assert len(messages) == 1 and messages[0].endswith(CHANGED)
    assert int(open_index(root, ()).sizes[0]) == path.stat().st_size


# What tells files apart


def test_the_fingerprint_depends_on_names_sizes_and_decoding_and_decodes_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(decoding, "decode", refuse)

    def fingerprint(size: int = 8, fit: Fit = "stretch") -> str:
        files = ImageFiles(build_index(root, ()), size, fit)
        return Samples(files, torch.arange(15), torch.arange(15) // 5).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    others = {first, fingerprint(size=9), fingerprint(fit="middle")}
    path = root / "n00000001" / "n00000001_0.JPEG"
    path.write_bytes(path.read_bytes() + b"\0")
    others.add(fingerprint())
    path.rename(path.with_name("n00000001_00.JPEG"))
    others.add(fingerprint())
    assert len(others) == 5
