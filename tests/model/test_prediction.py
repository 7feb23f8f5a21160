"""`predict`: class probabilities of images in order, and finding images in files and folders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Never

import numpy as np
import pytest
import torch
from images_made import encoded
from models_made import NAMES, SIDE, TULIP

from engram.data.images import decode
from engram.data.labelled import SkippedFile
from engram.errors import DataError, UsageError
from engram.model import Model, ModelFolder, Prediction, answers, find_images, load, predict
from engram.progress import Phase


@pytest.fixture(scope="module")
def model(small_model: ModelFolder) -> Model:
    return load(small_model)


def fill(folder: Path, *names: str) -> list[Path]:
    """Images of one colour each, all different."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        colour = 37 * number % 256, 91 * number % 256, 5 * number % 256
        (folder / name).write_bytes(encoded(np.full((12, 20, 3), colour, np.uint8), "PNG"))
    return [folder / name for name in names]


def expected(model: Model, paths: list[Path]) -> torch.Tensor:
    return model.probabilities(torch.stack([decode(path, size=SIDE) for path in paths]))


class FixedProbabilities:
    """A model with given probabilities."""

    image_size = SIDE
    is_calibrated = True

    def __init__(self, *rows: tuple[float, ...]) -> None:
        self.rows = torch.tensor(rows)
        self.names = tuple(f"class {number}" for number in range(self.rows.shape[1]))
        self.batches: list[int] = []

    def probabilities(self, inputs: torch.Tensor) -> torch.Tensor:
        begin = sum(self.batches)
        self.batches.append(len(inputs))
        return self.rows.expand(max(begin + len(inputs), len(self.rows)), -1)[begin : begin + len(inputs)]


def test_probabilities_of_each_image_are_sorted(model: Model, tmp_path: Path) -> None:
    paths = fill(tmp_path, *(f"{number}.png" for number in (3, 1, 2, 0)))
    found = list(predict(model, paths))
    wanted = expected(model, paths)
    assert [each.path for each in found if isinstance(each, Prediction)] == paths
    for row, each in enumerate(found):
        assert isinstance(each, Prediction) and not each.rejected
        by_name = {answer.name: answer.probability for answer in each.top}
        assert [by_name[name] for name in model.names] == pytest.approx(wanted[row].tolist(), abs=1e-6)
        assert sum(by_name.values()) == pytest.approx(1, abs=1e-5)
        values = [answer.probability for answer in each.top]
        assert values == sorted(values, reverse=True)


def test_batches_predict_as_single_images(model: Model, tmp_path: Path) -> None:
    paths = fill(tmp_path, *(f"{number:03}.png" for number in range(150)))
    together = [each for each in predict(model, paths, top=1) if isinstance(each, Prediction)]
    wanted = expected(model, paths).max(dim=1)
    assert [each.path for each in together] == paths
    assert [each.top[0].name for each in together] == [NAMES[class_index] for class_index in wanted.indices.tolist()]
    assert [each.top[0].probability for each in together] == pytest.approx(wanted.values.tolist(), abs=1e-5)


def test_unreadable_images_are_reported_in_order(tmp_path: Path) -> None:
    paths = fill(tmp_path, *(f"{number:03}.png" for number in range(140)))
    broken = {0, 5, 63, 64, 65, 139}
    for number in broken:
        paths[number].write_bytes(b"")
    paths[7] = tmp_path / "absent.png"
    output = FixedProbabilities((0.25, 0.75))
    found = list(predict(output, paths))  # type: ignore[arg-type]
    assert [each.path for each in found] == paths
    assert {row for row, each in enumerate(found) if isinstance(each, SkippedFile)} == {*broken, 7}
    assert found[0] == SkippedFile(paths[0], "It is empty. Copy it again.")
    assert found[7] == SkippedFile(paths[7], "There is no such file.")
    assert output.batches == [60, 62, 11]  # of batches of 64, 64 and 12


def test_batch_of_unreadable_images_does_not_call_the_model(tmp_path: Path) -> None:
    output = FixedProbabilities((1.0,))
    assert all(isinstance(each, SkippedFile) for each in predict(output, [tmp_path / "a", tmp_path / "b"]))  # type: ignore[arg-type]
    assert output.batches == []
    assert list(predict(output, [])) == []  # type: ignore[arg-type]


def test_predictions_are_streamed(tmp_path: Path) -> None:
    paths = fill(tmp_path, *(f"{number:03}.png" for number in range(200)))
    output = FixedProbabilities((1.0,))
    stream = predict(output, paths)  # type: ignore[arg-type]
    assert output.batches == []
    assert [each.path for each in itertools.islice(stream, 3)] == paths[:3]
    assert output.batches == [64]


@pytest.mark.parametrize("top", [1, 2, 3, 99])
def test_top_is_limited_to_the_number_of_classes(top: int, model: Model, tmp_path: Path) -> None:
    (found,) = predict(model, fill(tmp_path, "a.png"), top=top)
    assert isinstance(found, Prediction) and len(found.top) == min(top, 3)


def test_ties_are_broken_by_order_of_learning() -> None:
    output = FixedProbabilities((0.2, 0.3, 0.2, 0.3), (0.25, 0.25, 0.25, 0.25))
    found = answers(output, torch.zeros(2, SIDE, SIDE, 3), top=3)  # type: ignore[arg-type]
    assert [[each.name for each in answer.top] for answer in found] == [
        ["class 1", "class 3", "class 0"],
        ["class 0", "class 1", "class 2"],
    ]


def test_probability_equal_to_the_threshold_is_accepted(tmp_path: Path) -> None:
    paths = fill(tmp_path, "a.png", "b.png", "c.png")
    rows = (0.5, 0.5), (0.375, 0.625), (0.75, 0.25)

    def rejected(reject: float | None) -> list[bool]:
        return [each.rejected for each in predict(FixedProbabilities(*rows), paths, reject=reject)]  # type: ignore[arg-type, union-attr]

    assert rejected(None) == rejected(0) == rejected(0.5) == [False, False, False]
    assert rejected(0.625) == [True, False, False]
    assert rejected(0.6251) == [True, True, False]
    assert rejected(1) == [True, True, True]


def test_uncalibrated_model_refuses_to_reject(model: Model, tmp_path: Path) -> None:
    assert not model.is_calibrated
    output = FixedProbabilities((0.5, 0.5))
    output.is_calibrated = False
    for reject in (0.0, 0.5):
        with pytest.raises(UsageError, match="never calibrated"):
            predict(model, fill(tmp_path, "a.png"), reject=reject)
        with pytest.raises(UsageError, match="never calibrated"):
            predict(output, [], reject=reject)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reject": 1.5}, r".*found 1\.5"),
        ({"reject": -0.1}, r".*found -0\.1"),
        ({"reject": float("nan")}, ".*found nan"),
        ({"top": 0}, "found 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, float], message: str, model: Model) -> None:
    with pytest.raises(UsageError, match=message):
        predict(model, [], **options)  # type: ignore[arg-type]


def test_a_model_of_vectors_cannot_predict_images() -> None:
    output = FixedProbabilities((1.0,))
    output.image_size = None  # type: ignore[assignment]
    with pytest.raises(UsageError, match="vectors"):
        predict(output, [])  # type: ignore[arg-type]


def test_every_image_is_a_step_of_progress(tmp_path: Path) -> None:
    paths = fill(tmp_path, "a.png", "b.png")
    totals: list[int | None] = []
    steps: list[int] = []

    class Noted(Phase):
        @contextmanager
        def phase(self, name: str, total: int | None = None) -> Iterator[Noted]:
            assert name == "predict"
            totals.append(total)
            yield self

        def advance(self, count: int = 1, note: str = "") -> None:
            steps.append(count)

    list(predict(FixedProbabilities((1.0,)), [*paths, tmp_path / "absent.png"], progress=Noted()))  # type: ignore[arg-type]
    assert totals == [3] and sum(steps) == 3


# Which photos


def test_files_are_taken_as_they_are_and_folders_are_searched(tmp_path: Path) -> None:
    fill(tmp_path, "b/2.png", "b/1.JPG", "b/deep/er/3.webp", "b/.hidden.png", "b/.git/4.png", "b/@eaDir/5.png", "a.txt")
    (tmp_path / "b" / "notes.txt").touch()
    photos, skipped = find_images([tmp_path / "a.txt", tmp_path / "b", tmp_path / "absent", tmp_path / "a.txt"])
    assert [path.relative_to(tmp_path).as_posix() for path in photos] == [
        "a.txt",
        "b/1.JPG",
        "b/2.png",
        "b/deep/er/3.webp",
        "absent",
        "a.txt",
    ]
    assert [left.path.name for left in skipped] == ["notes.txt"]
    assert ".jpg" in skipped[0].reason


def test_links_are_followed_and_cycles_reported(tmp_path: Path) -> None:
    fill(tmp_path, "store/1.png", "given/2.png")
    (tmp_path / "given" / "far").symlink_to(tmp_path / "store")
    (tmp_path / "given" / "one.png").symlink_to(tmp_path / "store" / "1.png")
    (tmp_path / "given" / "self").symlink_to(tmp_path / "given")
    (tmp_path / "store" / "back").symlink_to(tmp_path / "given")
    (tmp_path / "given" / "gone.png").symlink_to("nowhere")
    (tmp_path / "link").symlink_to("given")
    photos, skipped = find_images([tmp_path / "link"])
    names = [path.relative_to(tmp_path / "link").as_posix() for path in photos]
    assert names == ["2.png", "far/1.png", "one.png"]
    found = {left.path.relative_to(tmp_path / "link").as_posix() for left in skipped}
    assert found == {"self", "far/back", "gone.png"}


def test_folder_without_images_gives_none(tmp_path: Path) -> None:
    assert find_images([tmp_path]) == ([], [])


def test_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(folder: Path) -> Never:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", forbid)
    with pytest.raises(DataError, match="Permission denied"):
        find_images([tmp_path])


def test_learned_classes_are_recognised(small_model: ModelFolder, model: Model) -> None:
    photos, _ = find_images([small_model.path.parent / "1" / TULIP])
    names = [each.top[0].name for each in predict(model, photos, top=1) if isinstance(each, Prediction)]
    assert len(names) == 24 and names.count(TULIP) >= 22
