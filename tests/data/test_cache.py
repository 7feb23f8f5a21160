"""Cached images are those of the files, are written once, and survive a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import warm
from folders_made import class_folders
from lazy_made import killed_while_caching
from PIL import Image
from torch import Tensor

from engram import storage
from engram.data import Samples
from engram.data import files as caching
from engram.data.files import CachedImages, ImageFiles, cache_images
from engram.data.scanning import build_index, folder_cache
from engram.errors import DataError, EngramWarning

LENGTH = 8 * 8 * 3
ROWS = torch.tensor([0, 2, 3, 5, 7, 8, 10, 11])
PLENTY = 2**20


class Counting(ImageFiles):
    """Image files that count how many of them were decoded."""

    decoded = 0

    def __getitem__(self, rows: Tensor) -> Tensor:
        self.decoded += len(rows)
        return super().__getitem__(rows)


@pytest.fixture
def root(tmp_path: Path, cache: Path) -> Path:
    return class_folders(tmp_path / "data", classes=3, per_class=4)


def files_of(root: Path, size: int = 8) -> Counting:
    return Counting(build_index(root, ()), size, "stretch")


def places(root: Path) -> list[str]:
    return sorted(path.name for path in folder_cache(root).glob("images-*"))


def test_cached_images_have_the_pixels_and_the_identity_of_their_files(root: Path) -> None:
    files = files_of(root)
    images = cache_images(files, ROWS, PLENTY)
    assert isinstance(images, CachedImages) and images.shape == files.shape
    for chosen in (ROWS, ROWS.flip(0), torch.tensor([7, 7, 0]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(images[chosen], files[chosen])
    labels = torch.zeros(len(ROWS), dtype=torch.int64)
    assert Samples(images, ROWS, labels).fingerprint() == Samples(files, ROWS, labels).fingerprint()
    assert images.path.stat().st_size == len(ROWS) * LENGTH
    images[ROWS].zero_()
    assert torch.equal(images[ROWS], files[ROWS])


def test_nothing_is_decoded_twice(root: Path) -> None:
    assert isinstance(cache_images(files_of(root), ROWS, PLENTY), CachedImages)
    files = files_of(root)
    images = cache_images(files, ROWS, PLENTY)
    assert len(images[ROWS]) == 8 and files.decoded == 0


def test_other_rows_another_size_and_changed_files_get_their_own_cache(root: Path) -> None:
    cache_images(files_of(root), ROWS, PLENTY)
    cache_images(files_of(root), ROWS[:4], PLENTY)
    cache_images(files_of(root, size=4), ROWS, PLENTY)
    path = root / "n00000000" / "n00000000_0.JPEG"
    path.write_bytes(path.read_bytes() + b"\0")
    files = files_of(root)
    cache_images(files, ROWS, PLENTY)
    assert files.decoded == 8
    assert len(places(root)) == 2 * 4  # each with its record


def test_a_file_replaced_by_one_of_the_same_size_is_cached_again(root: Path) -> None:
    path = root / "n00000000" / "n00000000_0.bmp"
    Image.new("RGB", (8, 8), "red").save(path)
    rows = torch.arange(13)
    cache_images(files_of(root), rows, PLENTY)
    later, size = path.stat().st_mtime_ns + 1, path.stat().st_size
    Image.new("RGB", (8, 8), "blue").save(path)
    os.utime(path, ns=(later, later))
    assert path.stat().st_size == size
    files = files_of(root)
    assert torch.equal(cache_images(files, rows, PLENTY)[rows], files[rows])


def test_images_beyond_the_limit_are_not_cached_with_a_warning(root: Path) -> None:
    files = files_of(root)
    with pytest.warns(EngramWarning, match=r"^8 images .*--cache"):
        assert cache_images(files, ROWS, 8 * LENGTH - 1) is files
    assert isinstance(cache_images(files, ROWS, 8 * LENGTH), CachedImages)


def test_a_full_disk_is_reported_before_anything_is_decoded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    files = files_of(root)
    with pytest.warns(EngramWarning, match=r"has 0\.00 GB free"):
        assert cache_images(files, ROWS, PLENTY) is files
    assert files.decoded == 0


def test_the_least_recently_used_cache_is_deleted_first(root: Path) -> None:
    old, recent = (cache_images(files_of(root, size=size), ROWS, PLENTY) for size in (4, 5))
    assert isinstance(old, CachedImages) and isinstance(recent, CachedImages)
    os.utime(old.path, (1, 1))
    os.utime(recent.path, (2, 2))
    before = recent[ROWS]
    new = cache_images(files_of(root), ROWS, 8 * LENGTH + 8 * 5 * 5 * 3)
    assert isinstance(new, CachedImages)
    assert not old.path.exists() and recent.path.exists() and new.path.exists()
    assert torch.equal(recent[ROWS], before)
    assert len(old[ROWS]) == 8  # still readable where it is open


def test_damaged_files_are_reported_each_time_the_cache_is_opened(root: Path) -> None:
    index = build_index(root, ())
    index.path(3).write_bytes(b"x" * int(index.sizes[3]))
    sentence = r"^1 of the cached images .*_3\.JPEG: It is text"
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache_images(files_of(root), ROWS, PLENTY)
        assert any(re.search(sentence, str(each.message)) for each in caught)


def test_a_truncated_cache_file_is_an_error(root: Path) -> None:
    images = cache_images(files_of(root), ROWS, PLENTY)
    assert isinstance(images, CachedImages)
    os.truncate(images.path, 7 * LENGTH)
    assert len(images[ROWS[:7]]) == 7
    with pytest.raises(DataError, match=r"images-\w+ "):
        images[ROWS]


def test_writing_the_cache_resumes_after_a_kill(root: Path) -> None:
    process = warm().Process(target=killed_while_caching, args=(root, ROWS.tolist(), os.environ["ENGRAM_DATA"]))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (part,) = folder_cache(root).glob("images-*.part")
    record = json.loads(part.with_name(part.name.replace(".part", ".json")).read_text())
    assert 2 <= record["images"] <= 4
    part.write_bytes(part.read_bytes() + b"half of an image")  # what a write that was not finished may leave
    files = files_of(root)
    images = cache_images(files, ROWS, PLENTY)
    assert isinstance(images, CachedImages) and files.decoded == 8 - record["images"]
    assert torch.equal(images[ROWS], files[ROWS])
    assert places(root) == [images.path.name, f"{images.path.name}.json"]


def test_an_error_while_writing_leaves_no_complete_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "CHUNK", 2)

    class Failing(Counting):
        def __getitem__(self, rows: Tensor) -> Tensor:
            if self.decoded >= 4:
                raise DataError("enough")
            return super().__getitem__(rows)

    with pytest.raises(DataError, match="enough"):
        cache_images(Failing(build_index(root, ()), 8, "stretch"), ROWS, PLENTY)
    assert all(name.endswith(".part") for name in places(root))
    files = files_of(root)
    assert torch.equal(cache_images(files, ROWS, PLENTY)[ROWS], files[ROWS])


def test_a_complete_cache_is_read_without_waiting_for_a_writer(root: Path) -> None:
    first = cache_images(files_of(root), ROWS, PLENTY)
    with ThreadPoolExecutor() as threads, storage.waiting(folder_cache(root) / ".writing"):  # as another run holds it
        second = threads.submit(cache_images, files_of(root), ROWS, PLENTY).result(timeout=30)
    assert isinstance(second, CachedImages)
    assert torch.equal(second[ROWS], first[ROWS])
