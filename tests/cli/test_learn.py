"""`engram learn`: output, refusals, and interruptions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commands import Watched, engram, engram_here, tree
from folders_made import paint
from models_made import DAISY, FORMULA, NAMES, TULIP, copied, draw
from rich.cells import cell_len

from engram import storage
from engram.data.labelled import scan
from engram.model import LearnOptions, ModelFolder, load, plan_update
from engram.model.held_out import Accuracy

QUICK = ("--set", "adapter_steps=20", "--set", "adapter_width=32")
ONCE = ("--epochs", "1", *QUICK)
LONG = ("--epochs", "100000", *QUICK)
SMALL = ("--network", "small")  # a new model's network that is trained from scratch


@pytest.fixture
def model(small_model: ModelFolder, tmp_path: Path) -> ModelFolder:
    return copied(small_model, tmp_path / "model")


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    return draw(tmp_path / "flowers", (TULIP, DAISY), 6)


# Output


def test_the_result_is_printed_to_stdout_and_nothing_to_stderr(flowers: Path, tmp_path: Path) -> None:
    done = engram("learn", "model", "flowers", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"learned 2 new classes \(\[red\]tulip 6, gänseblümchen 6\) in \d+ s", lines[0])
    # Each number of a feature takes a byte, and each of its 1280 dimensions eight more for all.
    size = sum(path.stat().st_size for path in flowers.rglob("*.png")) / 1024
    stored = f"memory {(12 + 8) * 1280 / 1024:.1f} KB"
    assert lines[1] == f"model, version 1: 2 classes; {stored}; this update: 12 images, {size:.1f} KB"
    low, high = Accuracy(12, 12).interval
    assert lines[2] == (
        f"accuracy 1.000 (95 % interval {low:.3f} to {high:.3f}) over all 2 classes, on 12 held-out images"
    )
    model = load(ModelFolder(tmp_path / "model"))
    error = model.metadata.calibration.error_after
    assert lines[3] == f"probabilities calibrated on 12 held-out images: expected calibration error {error:.3f}"
    assert lines[4:] == [
        "network efficientnet-lite0: not tuned (tuning is tried with at least 4 classes of 100 images each)",
        "classifier: ridge (penalty 1)",
    ]
    assert model.names == (TULIP, DAISY)


def test_a_network_from_scratch_is_assessed_on_held_out_images_only(flowers: Path, tmp_path: Path) -> None:
    done = engram("learn", "model", "flowers", *SMALL, *ONCE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    evidence = load(ModelFolder(tmp_path / "model")).metadata.held_out_counts
    right = sum(evidence.correct)
    low, high = Accuracy(right, 2).interval
    assert evidence.total == (1, 1)
    assert done.stdout.splitlines()[2:] == [
        f"accuracy {right / 2:.3f} (95 % interval {low:.3f} to {high:.3f}) over all 2 classes, on 2 held-out images",
        "network small: tuned (it starts from random weights)",
        "classifier: linear SVM (C 1)",
    ]


def test_accuracy_of_classes_without_held_out_images_is_not_known(flowers: Path, tmp_path: Path) -> None:
    done = engram("learn", "model", "flowers", "--hold-out", "0", *SMALL, *ONCE, cwd=tmp_path)
    assert done.stdout.splitlines()[2] == (
        "accuracy not known: no image was held out. Measure it with: engram evaluate MODEL FOLDER"
    )
    draw(tmp_path / "more", ("rose", "lily"), 10)
    done = engram("learn", "model", "more", *ONCE, cwd=tmp_path)
    accuracy = done.stdout.splitlines()[2]
    assert " over 2 of 4 classes, on 2 held-out images" in accuracy and "other classes were not measured" in accuracy


def test_an_update_prints_new_and_known_classes_separately(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", ("rose", TULIP), 5)
    done = engram("learn", "model", "more", *ONCE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("learned 1 new class (rose 5), 1 known class ([red]tulip 5) in ")
    assert "model, version 3: 4 classes; " in done.stdout
    assert re.search(
        r"^accuracy .* over all 4 classes, on \d+ held-out images\. This is an estimate: ", done.stdout, re.M
    )
    assert "\nnetwork small: tuned (it starts from random weights)\n" in done.stdout
    assert re.search(r"^stored features were adapted: ω \d\.\d{3} \(\d\.\d{3} without adaptation\)$", done.stdout, re.M)


def test_accuracy_after_an_update_of_a_frozen_network_is_no_estimate(flowers: Path, tmp_path: Path) -> None:
    engram("learn", "model", "flowers", cwd=tmp_path)
    draw(tmp_path / "more", ("rose", TULIP), 5)
    done = engram("learn", "model", "more", cwd=tmp_path)
    evidence = load(ModelFolder(tmp_path / "model")).metadata.held_out_counts
    assert evidence.total == (11, 6, 5)
    low, high = Accuracy(sum(evidence.correct), 22).interval
    assert done.stdout.splitlines()[2:3] == [
        f"accuracy {sum(evidence.correct) / 22:.3f} (95 % interval {low:.3f} to {high:.3f}) over all 3 classes, "
        "on 22 held-out images"
    ]
    assert "network efficientnet-lite0: not tuned (images of the older classes are gone" in done.stdout
    assert "adapted" not in done.stdout


def test_json_prints_the_whole_result_as_one_object(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", ("rose", TULIP), 10)
    (tmp_path / "more" / "rose" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    done = engram("learn", "model", "more", "--json", "--hold-out", "0.5", *ONCE, cwd=tmp_path)
    assert done.returncode == 0
    output = json.loads(done.stdout)
    assert output["published"] is True and output["version"] == 3 and output["classes"] == 4
    assert output["new"] == {"rose": 10} and output["more"] == {TULIP: 10}
    assert output["memory_bytes"] == load(model).learner.memory.nbytes
    sizes = [path.stat().st_size for path in (tmp_path / "more").rglob("?.png")]
    assert output["seen_bytes"] == sum(sizes)
    assert [each["name"] for each in output["class_accuracies"]] == [*NAMES, "rose"]
    features = load(model).learner.memory.features
    assert features.held_out is not None
    held_out = [int(features.held_out[features.class_indices == column].sum()) for column in range(4)]
    assert [each["images"] for each in output["class_accuracies"]] == held_out
    assert (output["held_out"], output["held_out_classes"]) == (sum(held_out), sum(count > 0 for count in held_out))
    evidence = load(model).metadata.held_out_counts
    assert output["accuracy"] == sum(evidence.correct) / sum(held_out)
    assert output["interval"] == [*Accuracy(sum(evidence.correct), sum(held_out)).interval]
    assert (output["estimated"], output["tuned"], output["tuning"]) == (True, True, "it starts from random weights")
    assert (output["network"], output["classifier"]) == ("small", "linear SVM (C 1)")
    assert output["warnings"] == []
    assert [left["path"] for left in output["skipped"]] == ["more/rose/broken.png"]
    assert done.stderr == f"skipped: more/rose/broken.png: {output['skipped'][0]['reason']}\n"


def test_json_says_that_the_network_was_not_tuned(flowers: Path, tmp_path: Path) -> None:
    shutil.copy(flowers / TULIP / "0.png", flowers / DAISY / "same.png")
    output = json.loads(engram("learn", "model", "flowers", "--json", cwd=tmp_path).stdout)
    assert output["network"] == "efficientnet-lite0" and output["classifier"].startswith(
        ("ridge", "LDA", "nearest mean")
    )
    assert (output["tuned"], output["estimated"], output["adaptation"]) == (False, False, None)
    assert output["tuning"] == "tuning is tried with at least 4 classes of 100 images each"
    assert (output["held_out"], output["held_out_classes"]) == (13, 2)
    (warning,) = output["warnings"]
    assert f"flowers/{TULIP}/0.png" in warning and f"flowers/{DAISY}/same.png" in warning


def test_an_update_below_at_least_is_shown_and_not_published(flowers: Path, tmp_path: Path) -> None:
    shutil.rmtree(flowers / DAISY)
    shutil.copytree(flowers / TULIP, flowers / DAISY)  # two classes of the same images
    arguments = ("learn", "model", "flowers", "--at-least", "1", "--hold-out", "0.5", *SMALL, *ONCE)
    text, as_json = engram(*arguments, cwd=tmp_path), engram(*arguments, "--json", cwd=tmp_path)
    for done in (text, as_json):
        assert done.returncode == 1
        assert re.match(r"error: .* mean over 2 classes, would be 0\.\d{3}, below 1", done.stderr)
    assert [line.split()[2:] for line in text.stdout.splitlines()[1:]] == [["3", "new", TULIP], ["3", "new", DAISY]]
    output = json.loads(as_json.stdout)
    assert output["published"] is False and output["reason"] in as_json.stderr
    classes = [(each["name"], each["kind"], each["images"]) for each in output["class_accuracies"]]
    assert classes == [(TULIP, "new", 3), (DAISY, "new", 3)]
    assert not (tmp_path / "model").exists()


def test_an_update_that_harms_old_classes_is_rejected_unless_forced(tmp_path: Path) -> None:
    paint(tmp_path / "colours", ("red", "green"), 12)
    assert engram("learn", "model", "colours", cwd=tmp_path).returncode == 0
    for name, other in (("red", "crimson"), ("green", "emerald")):
        shutil.copytree(tmp_path / "colours" / name, tmp_path / "again" / other)
    before = tree(tmp_path / "model")
    text = engram("learn", "model", "again", cwd=tmp_path)
    as_json = engram("learn", "model", "again", "--json", cwd=tmp_path)
    for done in (text, as_json):
        assert done.returncode == 1
        assert "2 old classes" in done.stderr and "from 1.000" in done.stderr and "--force" in done.stderr
    cause = "Nearly the same image in two classes: again/crimson/"
    lines = text.stdout.splitlines()
    assert lines[0] == "before  after  held out  kind  class" and lines[1].startswith(" 1.000  0.")
    assert any(line.startswith(f"warning: {cause}") for line in lines)
    output = json.loads(as_json.stdout)
    assert output["published"] is False and output["reason"] in as_json.stderr
    accuracies = [(each["name"], each["before"]) for each in output["class_accuracies"][:2]]
    assert accuracies == [("green", 1.0), ("red", 1.0)]
    assert any(warning.startswith(cause) for warning in output["warnings"])
    assert {name: content for name, (_, content) in tree(tmp_path / "model").items()} == {
        name: content for name, (_, content) in before.items()
    }
    done = engram("learn", "model", "again", "--force", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert load(ModelFolder(tmp_path / "model")).names == ("green", "red", "crimson", "emerald")


def test_validation_shows_each_class_before_and_after(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", (TULIP,), 10)
    before = load(model).metadata.held_out_counts
    done = engram("learn", "model", "more", "--validate", "--hold-out", "0.5", cwd=tmp_path)
    assert done.returncode == 0
    after = load(model).metadata.held_out_counts
    lines = done.stdout.splitlines()
    assert lines[0] == "before  after  held out  kind  class"
    for column, (kind, name) in enumerate((("more", TULIP), ("old ", DAISY), ("old ", FORMULA))):
        was, now = (each.correct[column] / each.total[column] for each in (before, after))
        assert lines[1 + column] == f" {was:.3f}  {now:.3f}         {after.total[column]}  {kind}  {name}"
    assert lines[4].startswith("These are estimates: ")  # the network was trained twice


def test_three_images_per_class_can_be_validated_with_a_frozen_network(tmp_path: Path) -> None:
    draw(tmp_path / "few", (TULIP, DAISY), 3)
    done = engram("learn", "model", "few", "--validate", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:3] == [f"     –  1.000         3  new   {name}" for name in (TULIP, DAISY)]
    assert "estimates" not in done.stdout


def test_an_update_that_cannot_be_assessed_says_so(tmp_path: Path) -> None:
    draw(tmp_path / "few", (TULIP, DAISY), 3)
    for dry in ((), ("--dry-run",)):
        done = engram_here("learn", "model", "few", "--validate", *SMALL, *ONCE, *dry, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no class has 5 images" in done.stderr and not (tmp_path / "model").exists()
    draw(tmp_path / "single", (TULIP, DAISY), 1)
    done = engram_here("learn", "model", "single", "--validate", cwd=tmp_path)
    assert done.returncode == 1 and "no image was held out" in done.stderr
    assert not (tmp_path / "model").exists()


def test_one_image_of_one_class_is_printed_in_the_singular(tmp_path: Path) -> None:
    draw(tmp_path / "one", (TULIP,), 1)
    done = engram("learn", "model", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("learned 1 new class ([red]tulip 1) in ")
    assert lines[1].startswith("model, version 1: 1 class; memory 11.2 KB; this update: 1 image, 0.")
    assert lines[2].startswith("accuracy not known")
    assert [line.split(".")[0] for line in lines if line.startswith("warning: ")] == [
        "warning: The model knows only one class, and so predicts it for any image",
        "warning: Only one image: [red]tulip",
    ]


# Skipped files

ODD = os.fsdecode(b"\xff.png")


def test_skipped_files_are_listed_on_stderr_even_with_quiet(flowers: Path, tmp_path: Path) -> None:
    (flowers / TULIP / ":smile: [red].txt").touch()
    (flowers / DAISY / "\x1b[31mred.png").touch()
    (flowers / DAISY / ODD).touch()
    (flowers / "empty").mkdir()
    done = engram("learn", "model", "flowers", "--quiet", "--json", *SMALL, *ONCE, cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(line.split(": It")[0] for line in done.stderr.splitlines()) == [
        "skipped: flowers/[red]tulip/:smile: [red].txt",
        "skipped: flowers/empty: This class has no images.",
        r"skipped: flowers/gänseblümchen/\udcff.png",
        r"skipped: flowers/gänseblümchen/\x1b[31mred.png",
    ]
    assert f"flowers/{DAISY}/{ODD}" in [each["path"] for each in json.loads(done.stdout)["skipped"]]
    assert done.stdout.isascii()


def test_at_most_twenty_skipped_files_are_listed(flowers: Path, tmp_path: Path) -> None:
    for number in range(30):
        (flowers / TULIP / f"{number:02}.txt").touch()
    done = engram_here("learn", "model", "flowers", "--dry-run", "--json", *SMALL, cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert len(lines) == 21 and lines[-1] == "skipped: 10 more; --json lists all"
    assert len(json.loads(done.stdout)["skipped"]) == 30


# Dry runs


def test_a_dry_run_prints_the_plan_of_a_new_model_and_changes_nothing(flowers: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    epochs = plan_update(None, scan(flowers), LearnOptions()).learner.training.epochs
    done = engram_here("learn", "model", "flowers", "--dry-run", "--budget", "1MB", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"would create model: 2 new classes ({TULIP} 6, {DAISY} 6)"
    why = re.escape("(it starts from random weights)")
    assert re.fullmatch(rf"network small at 16 pixels, trained for {epochs} epochs {why}; about \d+ s here", lines[1])
    assert lines[2:] == [
        "memory: at most 1.2 KB, up to 250 features per class; the budget is 1.00 MB",
        "Nothing was changed.",
    ]
    output = json.loads(engram_here("learn", "model", "flowers", "--dry-run", "--json", *SMALL, cwd=tmp_path).stdout)
    seconds = output.pop("seconds")
    assert 0 < seconds < 600
    assert output == {
        "new": {TULIP: 6, DAISY: 6},
        "more": {},
        "classes": 2,
        "method": "engram",
        "network": "small",
        "image_size": 16,
        "epochs": epochs,
        "memory_bytes": (12 + 2 * 4) * 64,  # a byte a number, and two numbers a dimension
        "budget": None,
        "skipped": [],
    }
    assert tree(tmp_path) == before


def test_a_dry_run_says_why_a_pretrained_network_would_not_be_trained(flowers: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    done = engram_here("learn", "model", "flowers", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    why = re.escape("(tuning is tried with at least 4 classes of 100 images each)")
    assert re.fullmatch(
        rf"network efficientnet-lite0 at 224 pixels, not trained {why}; about \d+ s here", done.stdout.splitlines()[1]
    )
    output = json.loads(engram_here("learn", "model", "flowers", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert (output["network"], output["image_size"], output["epochs"]) == ("efficientnet-lite0", 224, 0)
    assert output["memory_bytes"] == (12 + 2 * 4) * 1280
    assert tree(tmp_path) == before


def test_a_dry_run_prints_the_plan_of_an_update_and_changes_nothing(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", (TULIP,), 1)
    before = tree(tmp_path)
    done = engram_here("learn", "model", "more", "--dry-run", cwd=tmp_path)
    assert done.stdout.startswith(
        f"would update model: 1 known class ({TULIP} 1)\n"
        "network small at 16 pixels, not trained (these classes alone give it nothing to distinguish); about "
    )
    draw(tmp_path / "new", ("rose", "lily"), 2)
    output = json.loads(
        engram_here("learn", "model", "new", "--dry-run", "--json", "--epochs", "3", cwd=tmp_path).stdout
    )
    assert (output["new"], output["more"], output["classes"], output["epochs"]) == ({"lily": 2, "rose": 2}, {}, 5, 3)
    shutil.rmtree(tmp_path / "new")
    assert {**tree(tmp_path), ".": ()} == {**before, ".": ()}


# Refusals


def weights(path: Path) -> None:
    storage.save_tensors(path, {"layer.weight": torch.zeros(3)})


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (("--epochs", "0"), 2, "--epochs.*'0'"),
        (("--epochs", "9" * 5000), 2, "--epochs"),
        (("--budget", "lots"), 2, "'lots'.*6MB"),
        (("--budget", "100"), 2, "100 bytes.* 2 classes.*12,800"),
        (("--tune", "none", *SMALL), 2, "'small'"),
        (("--classifier", "lad"), 2, "'lad'"),
        (("--method", "engrams"), 2, "'engrams'.*'engram'"),
        (("--network", "resnet81"), 2, "'resnet81'.*'resnet18'"),
        (("--network", "mlp"), 2, "'mlp'"),
        (("--image-size", "0"), 2, "image_size.* 0.* 8"),
        (("--features-per-class", "0"), 2, "features_per_class.* 0.* 1"),
        (("--images-per-class", "-1"), 2, "images_per_class.* -1.* 0"),
        (("--hold-out", "1"), 2, "hold_out.* 1.0"),
        (("--at-least", "2"), 2, "at_least.* 2.0.* 1"),
        (("--at-least", "nan"), 2, "at_least.* nan"),
        (("--validate", "--hold-out", "0"), 2, "must be held out"),
        (("--set", "learning_rat=1"), 2, "'learning_rate'"),
        (("--set", "learning_rate"), 2, "KEY=VALUE.*'learning_rate'"),
        (("--set", "method=features"), 2, "'engram'.*'method'"),
        (("--device", "abacus"), 2, "'abacus'"),
        (("--from-weights", "absent.safetensors"), 1, "absent.safetensors"),
        (("--from-weights", "junk.safetensors"), 1, "junk.safetensors"),
        (("--from-weights", "of-another.safetensors"), 1, "of-another.safetensors"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence_and_create_nothing(
    arguments: tuple[str, ...], code: int, fact: str, flowers: Path, tmp_path: Path
) -> None:
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    weights(tmp_path / "of-another.safetensors")
    before = tree(tmp_path)
    late = arguments[0] in ("--budget", "--method", "--network", "--from-weights")  # refused late
    for dry in [(), ("--dry-run",)] if late else [()]:
        done = engram_here("learn", "model", "flowers", *arguments, *dry, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
        assert re.search(fact, done.stderr)
        assert done.stderr.startswith("error: ") == ("abacus" not in arguments)
    assert {**tree(tmp_path), ".": ()} == {**before, ".": ()}


@pytest.mark.parametrize(
    ("place", "code", "fact"),
    [
        ("file", 2, "file"),
        ("flowers", 2, TULIP),
        ("file/model", 1, "file/model"),
        ("/proc/model", 1, "/proc/model"),
    ],
)
def test_a_path_that_cannot_hold_a_model_is_refused(
    place: str, code: int, fact: str, flowers: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    before = tree(tmp_path)
    done = engram_here("learn", place, "flowers", *ONCE, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ") and fact in done.stderr
    if code == 2:
        dry = engram_here("learn", place, "flowers", "--dry-run", cwd=tmp_path)
        assert (dry.returncode, dry.stderr) == (2, done.stderr)
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write whatever the permissions say")
def test_a_folder_without_write_permission_is_refused(flowers: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    done = engram("learn", "closed", "flowers", *ONCE, cwd=tmp_path)
    assert done.returncode == 1 and "closed" in done.stderr


def folder_of(path: Path, *names: str) -> None:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path.parent / "flowers" / TULIP / "0.png", path / name)


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        ((), "photos/cat/1.jpg"),
        (("1.png", "2.png"), "photos"),
        (("train/cat/1.png", "test/cat/1.png"), "test and train"),
        (("Cat/1.png", "cat/1.png"), "cat"),
        (("c\nat/1.png",), r"'c\nat'"),
    ],
    ids=["empty", "no classes", "split", "twins", "not shown"],
)
def test_a_folder_in_an_unexpected_layout_is_refused(
    names: tuple[str, ...], fact: str, flowers: Path, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    folder_of(tmp_path / "photos", *names)
    done = engram_here("learn", "model", "photos", *ONCE, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and fact in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_a_list_can_be_learned_and_its_errors_name_their_lines(flowers: Path, tmp_path: Path) -> None:
    rows = [f"{flowers}/{name}/{number}.png,{name}" for name in (TULIP, DAISY) for number in range(6)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    done = engram_here("learn", "model", "list.csv", *SMALL, *ONCE, cwd=tmp_path)
    assert done.returncode == 0 and f"2 new classes ({TULIP} 6, {DAISY} 6)" in done.stdout
    (tmp_path / "list.csv").write_text("path,label\nabsent.png,cat\nflowers,dog\n")
    done = engram_here("learn", "model", "list.csv", *ONCE, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"list\.csv.*Line 2: .*absent\.png.*Line 3: .*flowers", done.stderr)


def test_a_damaged_model_is_left_alone_and_its_repair_is_named(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", (TULIP,), 1)
    damaged = model.path / "versions" / "000002" / "learner.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = tree(tmp_path)
    for asked in ((), ("--dry-run",)):
        done = engram_here("learn", "model", "more", *asked, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert "versions/000002/learner.safetensors" in done.stderr
        assert done.stderr.endswith("engram rollback model --to 1\n")
    assert tree(tmp_path) == before


def test_a_model_that_another_process_updates_is_refused(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", (TULIP,), 1)
    with model.writing():
        done = engram_here("learn", "model", "more", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and "model" in done.stderr


# Names

HOSTILE = ("[red]x[bold]", "=1+1+1", "\u202egnp.evil", "😀 :smile:", "x" * 200, "日本語の名前" * 6, "שלום")


def test_hostile_names_are_shown_as_they_are_at_any_width(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", HOSTILE, 5)
    for asked in (("--dry-run",), ("--validate", "--at-least", "0")):
        done = engram("learn", "model", "more", *asked, *ONCE, cwd=tmp_path, COLUMNS="40")
        assert done.returncode == 0, done.stderr
        flat = done.stdout.replace("\n", "").replace(" ", "")
        for name in HOSTILE:
            assert name.replace("\u202e", r"\u202e").replace(" ", "") + "5" in flat
        assert all(letter.isprintable() or letter == "\n" for letter in done.stdout)
    table = done.stdout[: done.stdout.index("These are estimates")].splitlines()
    assert len(table) > 11 and max(map(cell_len, table)) <= 40
    assert set(json.loads(engram("inspect", "model", "--json", cwd=tmp_path).stdout)["changed"])
    assert load(model).names == (*NAMES, *sorted(HOSTILE))


def test_a_model_may_have_any_name(flowers: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff[red] :smile:")
    done = engram("learn", name, "flowers", *SMALL, *ONCE, cwd=tmp_path)
    assert done.returncode == 0 and r"\udcff[red] :smile:, version 1: 2 classes" in done.stdout
    done = engram("learn", name, "flowers", "--dry-run", cwd=tmp_path)
    assert r"would update \udcff[red] :smile:: 2 known classes" in done.stdout
    done = engram("learn", "\x1b[31mabsent", ":smile:\x1b[31m", cwd=tmp_path)
    assert r":smile:\x1b[31m" in done.stderr


# Terminals


def test_a_terminal_shows_bars_with_the_time_left_and_stdout_none_of_them(flowers: Path, tmp_path: Path) -> None:
    watched = Watched("learn", "model", "flowers", "--epochs", "40", *SMALL, *QUICK, cwd=tmp_path)
    watched.wait_for("train")
    watched.wait_for("time left")
    assert watched.exit_code() == 0
    assert re.search(r"train .*?\d+ %.*?time left.*?\d:\d\d", watched.seen)
    assert watched.printed.startswith("learned 2 new classes") and "\x1b" not in watched.printed
    assert watched.seen.endswith("\r\x1b[2K\x1b[?25h\r")  # the bars are erased


def test_quiet_shows_nothing_on_a_terminal(flowers: Path, tmp_path: Path) -> None:
    watched = Watched("learn", "model", "flowers", "--quiet", *SMALL, *ONCE, cwd=tmp_path)
    assert (watched.exit_code(), watched.seen) == (0, "")


# Interruptions


def test_ctrl_c_in_a_first_training_leaves_no_folder(flowers: Path, tmp_path: Path) -> None:
    before = tree(flowers)
    watched = Watched("learn", "model", "flowers", *SMALL, *LONG, "--json", cwd=tmp_path)
    watched.wait_for("train")
    assert (tmp_path / "model").exists()
    watched.send_signal(signal.SIGINT)
    assert watched.exit_code() == 130
    assert watched.seen.endswith("Interrupted. Nothing was changed.\r\n") and watched.printed == ""
    assert not (tmp_path / "model").exists() and tree(flowers) == before


def test_ctrl_c_during_an_update_leaves_the_model_as_it_was(model: ModelFolder, tmp_path: Path) -> None:
    draw(tmp_path / "more", ("rose", "lily"), 6)
    before = tree(tmp_path)
    watched = Watched("learn", "model", "more", *LONG, cwd=tmp_path)
    watched.wait_for("train")
    watched.send_signal(signal.SIGINT)
    assert watched.exit_code() == 130
    assert "Interrupted. Nothing was changed." in watched.seen and watched.printed == ""
    assert tree(tmp_path) == before
