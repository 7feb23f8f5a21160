"""A folder laid out as ImageNet goes through `run`, `suite`, `report` and `learn`, as a person uses them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import engram
from folders_made import imagenet, settle, tiny_imagenet

DATA = ["--dataset", "imagenet100", "--data", "imagenet", "--image-size", "16"]
QUICK = ["--epochs", "1", "--network", "small", "--tasks", "2", "--set", "adapter_steps=5", "--set", "adapter_width=32"]
QUICK_SUITE = ["--set", "network=small", "--set", "epochs=1", "--set", "adapter_steps=5", "--set", "adapter_width=32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    root = imagenet(folder / "imagenet", classes=11, train=6, test=2)
    listed = [f"n{label:08d}" for label in range(11) if label != 3]
    (root / "imagenet100.txt").write_text("\n".join(listed))
    (root / "train" / "n00000000" / "empty.JPEG").touch()
    settle(root)
    tiny_imagenet(folder / "tiny")
    return folder


def command(*arguments: str, place: Path) -> subprocess.CompletedProcess[str]:
    return engram(*arguments, cwd=place, ENGRAM_DATA=str(place / "cache"))


def test_a_run_lists_skipped_files_and_saves_a_result(place: Path) -> None:
    done = command("run", "hybrid", *DATA, *QUICK, "--out", "one", place=place)
    assert done.returncode == 0, done.stderr
    assert "skipped: imagenet/train/n00000000/empty.JPEG: " in done.stderr
    result = json.loads((place / "one" / "result.json").read_text())
    assert (result["dataset"], len(result["curve"])) == ("imagenet100", 2)
    assert len(result["class_order"]) == 4 and "n00000003" not in result["class_order"]
    assert (result["settings"]["crop"], result["settings"]["expected_classes"]) == (14, 10)
    assert list((place / "cache").glob("folders/*/index-train-val.safetensors"))


def test_cached_images_give_the_same_result(place: Path) -> None:
    curves = []
    for out, more in (("two", []), ("three", ["--cache", "1MB", "--workers", "2"])):
        done = command("run", "features", *DATA, *QUICK, *more, "--out", out, "--quiet", "--json", place=place)
        assert done.returncode == 0 and "skipped" not in done.stderr, done.stderr
        curves.append(json.loads(done.stdout)["curve"])
    assert curves[0] == curves[1]
    (cached,) = [path for path in (place / "cache").glob("folders/*/images-*") if path.suffix != ".json"]
    assert cached.stat().st_size == 10 * 8 * 16 * 16 * 3
    tight = command("run", "features", *DATA, *QUICK, "--cache", "10KB", "--out", "four", place=place)
    assert tight.returncode == 0
    assert "80 images" in tight.stderr and "--cache" in tight.stderr


def test_table_1_of_two_methods_over_two_tasks_and_its_report(place: Path) -> None:
    arguments = ["suite", "table1", *DATA, "--methods", "features,gamma-icarl", "--tasks", "2", *QUICK_SUITE]
    plan = command(*arguments, "--plan", "--json", "--out", "suite", place=place)
    assert [row["memory_bytes"] for row in json.loads(plan.stdout)["runs"]] == [4 * 6 * 16 * 16 * 3, 4 * 6 * 64 * 4]
    done = command(*arguments, "--jobs", "2", "--out", "suite", "--json", place=place)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["label"] for row in rows] == ["gamma-icarl", "features"]
    report = command("report", "suite", "-o", "report.html", place=place)
    assert report.returncode == 0, report.stderr
    page = (place / "report.html").read_text()
    assert "imagenet100" in page and "gamma-icarl" in page


def test_a_model_learns_from_the_same_folder(place: Path) -> None:
    done = command("learn", "model", "imagenet/train", "--epochs", "1", "--image-size", "16", "--json", place=place)
    assert done.returncode == 0, done.stderr
    learned = json.loads(done.stdout)
    assert learned["classes"] == 11
    assert [left["path"] for left in learned["skipped"]] == ["imagenet/train/n00000000/empty.JPEG"]
    output = command("evaluate", "model", "imagenet/val", "--json", place=place)
    assert json.loads(output.stdout)["images"] == 22


def test_tiny_imagenet_and_a_folder_of_classes_run_too(place: Path) -> None:
    for name, root in (("tiny-imagenet-200", "tiny"), ("folder", "imagenet/train")):
        arguments = ["--dataset", name, "--data", root, "--image-size", "16", *QUICK[:6]]
        done = command("run", "finetune", *arguments, "--out", f"of {name}", "--json", place=place)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["dataset"] == ("train" if name == "folder" else name)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--dataset", "folder"], "--data DIR"),
        (["--dataset", "imagenet1000", "--data", "nowhere"], "nowhere"),
        (["--image-size", "9"], "digits"),
        ([*DATA, "--cache", "much"], "'much'"),
        ([*DATA, "--set", "crop=17"], "17"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], fact: str, place: Path) -> None:
    done = command("run", "finetune", *arguments, "--epochs", "1", "--tasks", "1", "--out", "never", place=place)
    assert done.returncode in (1, 2) and fact in done.stderr and "Traceback" not in done.stderr
