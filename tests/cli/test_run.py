"""The command line, used as a person uses it: real processes, real folders."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command, engram, engram_here

from engram.methods import METHODS, make

QUICK = ["--epochs", "1", "--tasks", "2"]


HELP = """
import sys
from engram.cli import main
for command in ("run", "suite", "learn", "predict", "evaluate", "serve"):
    sys.argv = ["engram", command, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
print(*sys.modules)
"""


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=tmp_path, capture_output=True, text=True, check=True)
    heavy = {"torch", "sklearn", "scipy", "numpy", "pandas", "matplotlib", "PIL", "safetensors"}
    words = set(done.stdout.split())
    assert {"typer", "FOLDER|LIST.csv", "IMAGE|FOLDER|-..."} <= words and not heavy & words
    assert done.stdout.count("Usage: engram") == 6


def test_a_run_prints_its_result_to_stdout_and_its_progress_to_stderr(tmp_path: Path) -> None:
    done = engram("run", "features", *QUICK, "--out", "here", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert "average incremental accuracy" in done.stdout and "here/result.json" in done.stdout
    assert "task  classes  accuracy" in done.stderr and "average" not in done.stderr
    result = json.loads((tmp_path / "here" / "result.json").read_text())
    wanted = (
        "schema method dataset seed classes_per_task settings curve average_incremental_accuracy curve_top5 "
        "average_incremental_accuracy_top5 head_curve accuracy_matrix forgetting omega omega_previous omega_first "
        "drift_gap memory_bytes memory_mb seconds environment"
    )
    assert set(wanted.split()) <= set(result)
    assert (result["method"], result["dataset"], len(result["curve"])) == ("features", "digits", 2)


def test_json_prints_one_object_and_quiet_nothing_else(tmp_path: Path) -> None:
    done = engram("run", "finetune", *QUICK, "--out", "here", "--json", "--quiet", cwd=tmp_path)
    assert done.stderr == ""
    assert json.loads(done.stdout) == json.loads((tmp_path / "here" / "result.json").read_text())


def test_seeds_make_a_folder_each_and_a_summary(tmp_path: Path) -> None:
    done = engram("run", "finetune", *QUICK, "--seeds", "2", "--out", "here", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["seeds"] == [0, 1]
    assert json.loads((tmp_path / "here" / "summary.json").read_text()) == summary
    orders = [json.loads((tmp_path / "here" / f"seed-{s}" / "result.json").read_text())["class_order"] for s in (0, 1)]
    assert orders[0] != orders[1]


def test_without_out_every_run_gets_a_folder_and_resume_continues_the_last(tmp_path: Path) -> None:
    for _ in range(2):
        assert engram("run", "finetune", *QUICK, "--quiet", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "finetune-digits-seed-0",
        "finetune-digits-seed-0-2",
    ]
    again = engram("run", "finetune", *QUICK, "--quiet", "--resume", cwd=tmp_path)
    assert "finetune-digits-seed-0-2" in again.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 2
    shutil.rmtree(tmp_path / "runs" / "finetune-digits-seed-0")
    failed = tmp_path / "runs" / "finetune-digits-seed-0-3"  # left by a run that could not start
    failed.mkdir()
    (failed / "events.jsonl").touch()
    assert "seed-0-3" in engram("run", "finetune", *QUICK, "--quiet", cwd=tmp_path).stdout


def test_the_datasets_are_listed_one_line_each(tmp_path: Path) -> None:
    lines = engram_here("datasets", cwd=tmp_path).stdout.splitlines()
    rows = json.loads(engram_here("datasets", "--json", cwd=tmp_path).stdout)["datasets"]
    names = ["digits", "cifar100", "cifar10", "arrays", "folder", "imagenet100", "imagenet1000", "tiny-imagenet-200"]
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows] == names


def test_the_methods_are_listed_one_line_each_with_what_they_store(tmp_path: Path) -> None:
    some = {"hybrid": "features and images", "lwf": "nothing", "lucir": "images", "joint": "every image"}
    lines = engram_here("methods", cwd=tmp_path).stdout.splitlines()
    rows = json.loads(engram_here("methods", "--json", cwd=tmp_path).stdout)["methods"]
    listed = [tuple(re.split(r" {2,}", line)) for line in lines]
    assert [name for name, _, _ in listed] == list(METHODS)
    assert some.items() <= {name: stored for name, stored, _ in listed}.items()
    assert [(row["name"], row["keeps"], row["summary"]) for row in rows] == listed
    assert all(summary for *_, summary in listed)


def test_the_settings_of_a_method_are_listed_as_set_takes_them(tmp_path: Path) -> None:
    done = engram_here("methods", "lucir", cwd=tmp_path)
    listed = dict(re.split(r" {2,}", line) for line in done.stdout.splitlines())
    output = json.loads(engram_here("methods", "lucir", "--json", cwd=tmp_path).stdout)
    assert output["method"] == "lucir" and list(output["settings"]) == list(listed)
    assert (listed["objective"], listed["last_relu"], listed["crop"], listed["milestones"]) == (
        *("lucir", "false", "none", "0.5,0.75"),
    )
    given = {name: value for name, value in listed.items() if name != "network"}
    assert make("lucir", **given).settings() == make("lucir").settings()
    assert "There is no method 'engrm'" in engram_here("methods", "engrm", cwd=tmp_path).stderr


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


DIGIT, FEATURE = 8 * 8, 64 * 4  # bytes
QUICK_FEATURES = ["--set", "adapter_steps=5", "--set", "adapter_width=32"]


@pytest.mark.parametrize(
    ("arguments", "settings", "count"),
    [
        (["gamma-icarl", "--images-per-class", "3"], (3, None), 4 * 3),
        (["icarl", "--images-total", "42"], (None, 42), 4 * 10),  # ten of each of four classes; two are left over
    ],
    ids=["per class", "in all"],
)
def test_exemplars_are_stored_per_class_or_as_a_total(
    arguments: list[str], settings: tuple[int | None, int | None], count: int, tmp_path: Path
) -> None:
    done = engram("run", *arguments, *QUICK, "--out", "here", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    result = result_of(tmp_path / "here")
    assert (result["settings"]["images_per_class"], result["settings"]["images_total"]) == settings
    assert result["memory_bytes"] == count * DIGIT


@pytest.mark.parametrize(
    ("arguments", "text", "settings", "size"),
    [
        (["features"], "12 features a class", {"features_per_class": 12}, 10 * 12 * FEATURE),
        (
            ["hybrid"],
            "24 images a class and 6 features a class",
            {"images_per_class": 24, "images_total": None, "features_per_class": 6},
            10 * (24 * DIGIT + 6 * FEATURE),
        ),
        (
            ["hybrid", "--images-total", "100"],
            "9 features a class",
            {"images_per_class": None, "images_total": 100, "features_per_class": 9},
            100 * DIGIT + 10 * 9 * FEATURE,
        ),
    ],
    ids=["features", "both", "the rest"],
)
def test_a_budget_chooses_and_prints_how_much_is_stored(
    arguments: list[str], text: str, settings: dict[str, int | None], size: int, tmp_path: Path
) -> None:
    quick = ["--epochs", "1", "--classes-per-task", "5", *QUICK_FEATURES]  # all ten classes in two tasks
    done = engram("run", *arguments, *quick, "--budget", "30KB", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"30.0 KB for 10 classes: {text}"
    result = result_of(tmp_path / "here")
    assert {name: result["settings"][name] for name in settings} == settings
    assert result["memory_bytes"] == size <= 30 * 2**10


def test_a_budget_for_arrays_of_ones_own_counts_the_classes_of_the_tasks_that_are_learned(tmp_path: Path) -> None:
    draws, labels = np.random.default_rng(0), np.arange(60) % 6
    vectors = draws.normal(size=(60, 10)) + 5 * labels[:, None]
    np.savez(tmp_path / "mine.npz", inputs=vectors, labels=labels)
    data = ["--dataset", "arrays", "--data", "mine.npz", "--classes-per-task", "2"]
    done = engram("run", "icarl", *data, *QUICK, "--budget", "1 KB", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "1.0 KB for 4 classes: 25 images in all"  # of 40 bytes
    result = result_of(tmp_path / "here")
    assert result["settings"]["images_total"] == 25
    assert result["memory_bytes"] == 4 * 6 * 40


def test_another_objective_is_set_by_its_name_and_a_run_with_it_is_another_run(tmp_path: Path) -> None:
    quick = [*QUICK, *QUICK_FEATURES, "--out", "here", "--quiet"]
    done = engram("run", "features", "--set", "objective=lucir", *quick, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    result = result_of(tmp_path / "here")
    settings = result["settings"]
    assert (result["method"], settings["objective"], settings["last_relu"]) == ("features", "lucir", False)
    assert settings["less_forget"] == 5.0 and "distillation" not in settings
    before = (tmp_path / "here" / "result.json").read_bytes()
    other = engram("run", "features", *quick, "--resume", cwd=tmp_path)
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1
    assert "holds another run; it differs in " in other.stderr
    assert "objective: lucir, now distillation" in other.stderr
    same = engram("run", "features", "--set", "objective=lucir", *quick, "--resume", cwd=tmp_path)
    assert same.returncode == 0
    assert (tmp_path / "here" / "result.json").read_bytes() == before


def bad_archive(folder: Path) -> str:
    (folder / "data.npz").write_bytes(b"PK\x03\x04 not really")
    return "data.npz"


def pickled_archive(folder: Path) -> str:
    np.savez(folder / "objects.npz", inputs=np.array([{}], dtype=object), labels=np.array([0]))
    return "objects.npz"


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (["lfw"], 2, "'lfw'.*'lwf'.*engram methods"),
        (["--dataset", "digit"], 2, "'digit'.*'digits'.*engram datasets"),
        (["--set", "alhpa=1"], 2, "'features'.*'alhpa'.*'alpha'"),
        (["lwf", "--features-per-class", "9"], 2, "'lwf'.*'features_per_class'"),
        (["--images-per-class", "9"], 2, "'features'.*'images_per_class'"),
        (["icarl", "--images-per-class", "9", "--images-total", "90"], 2, "images_per_class.*images_total"),
        (["icarl", "--images-total", "1"], 2, "images_total=1"),
        (["--set", "objective=lucri"], 2, "'lucri'.*'lucir'"),
        (["--budget", "lots"], 2, "'lots'.*6MB"),
        (["--budget", "2KB"], 2, "2,048 bytes.*2,560"),
        (["lwf", "--budget", "1MB"], 2, "'lwf'.*--budget"),
        (["--budget", "1MB", "--features-per-class", "9"], 2, "features_per_class.*--budget"),
        (["--set", "learning_rate=fast"], 2, "'learning_rate'.*'fast'"),
        (["--epochs", "0"], 2, "'epochs'.* 0"),
        (["--set", "learning_rate"], 2, "KEY=VALUE.*'learning_rate'"),
        (["--network", "resnet"], 2, "'resnet'.*'resnet"),
        (["--classes-per-task", "11"], 2, "10 classes.* 11"),
        (["--tasks", "6"], 2, "5 tasks.* 6 "),
        (["--class-order", "nowhere"], 2, "class order nowhere"),
        (["--validation", "1.5"], 2, "between 0 and 1"),
        (["--device", "cuda"], 1, "'cuda'"),
        (["--dataset", "arrays"], 2, "--data FILE.npz"),
        (["--dataset", "arrays", "--data", "missing.npz"], 1, "missing.npz"),
        (["--dataset", "arrays", "--data", bad_archive], 1, "data.npz"),
        (["--dataset", "arrays", "--data", pickled_archive], 1, "objects.npz"),
        (["--out", "/proc/nothing"], 1, "/proc/nothing"),
        (["--set", "weights=none.safetensors"], 1, "none.safetensors"),
        (["/data/photos"], 2, "'/data/photos'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[object], code: int, fact: str, tmp_path: Path) -> None:
    given = [each(tmp_path) if callable(each) else str(each) for each in arguments]
    before = sorted(path.name for path in tmp_path.iterdir())
    done = engram_here("run", *given, "--quiet", *([] if "--out" in given else ["--out", "out"]), cwd=tmp_path)
    assert re.search(fact, done.stderr)
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    left = [path for path in (tmp_path / "out").glob("*")] if (tmp_path / "out").exists() else []
    assert not [path for path in left if path.name not in (".lock", "events.jsonl")]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "out") == before


@pytest.mark.parametrize("arguments", [["--tasks", "6"], ["--classes-per-task", "0"], ["--budget", "2KB"]])
def test_errors_are_reported_before_the_table_starts(arguments: list[str], tmp_path: Path) -> None:
    done = engram_here("run", *arguments, cwd=tmp_path)
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_output_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    assert engram("run", "finetune", *QUICK, "--out", "out", "--quiet", cwd=tmp_path).returncode == 0
    before = (tmp_path / "out" / "result.json").read_bytes()
    again = engram("run", "finetune", *QUICK, "--out", "out", "--quiet", cwd=tmp_path)
    assert again.returncode == 2 and "already holds a run. Continue it with --resume" in again.stderr
    other = engram("run", "finetune", *QUICK, "--out", "out", "--quiet", "--resume", "--seed", "3", cwd=tmp_path)
    assert other.returncode == 2 and "seed: 0, now 3" in other.stderr
    assert (tmp_path / "out" / "result.json").read_bytes() == before


def test_ctrl_c_says_how_to_resume_and_leaves_a_clean_folder(tmp_path: Path) -> None:
    process = Command("run", "features", "--epochs", "2000", "--out", "out", cwd=tmp_path)
    while not (tmp_path / "out" / "training.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stopped = process.wait(60)
    assert stopped.returncode == 130
    assert "--out out --resume" in stopped.stderr and "Traceback" not in stopped.stderr
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left <= {".lock", "run.json", "training.safetensors", "events.jsonl"}
