"""The command line, used as a person uses it: real processes, real folders."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

QUICK = ["--epochs", "1", "--tasks", "2"]


def engram(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "engram", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_answers_in_under_half_a_second(tmp_path: Path) -> None:
    def seconds() -> float:
        start = time.perf_counter()
        assert engram("--help", cwd=tmp_path).returncode == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.5


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, engram.cli.app; print([m for m in ('torch', 'sklearn', 'numpy', 'pydantic') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_run_prints_its_result_to_stdout_and_its_progress_to_stderr(tmp_path: Path) -> None:
    done = engram("run", "features", *QUICK, "--out", "here", cwd=tmp_path)
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


def test_without_out_every_run_gets_its_own_folder_and_resume_takes_the_last(tmp_path: Path) -> None:
    for _ in range(2):
        assert engram("run", "finetune", *QUICK, "--quiet", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "finetune-digits-seed-0",
        "finetune-digits-seed-0-2",
    ]
    again = engram("run", "finetune", *QUICK, "--quiet", "--resume", cwd=tmp_path)
    assert "finetune-digits-seed-0-2" in again.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("methods", ["features", "features-unadapted", "lwf", "gamma-lwf", "finetune", "joint"]),
        ("datasets", ["digits", "cifar100", "cifar10", "arrays"]),
    ],
)
def test_what_there_is_is_listed_one_line_each(command: str, names: list[str], tmp_path: Path) -> None:
    lines = engram(command, cwd=tmp_path).stdout.splitlines()
    rows = json.loads(engram(command, "--json", cwd=tmp_path).stdout)[command]
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows] == names


def bad_archive(folder: Path) -> str:
    (folder / "data.npz").write_bytes(b"PK\x03\x04 not really")
    return "data.npz"


def pickled_archive(folder: Path) -> str:
    np.savez(folder / "objects.npz", inputs=np.array([{}], dtype=object), labels=np.array([0]))
    return "objects.npz"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["lfw"], 2, "There is no method 'lfw'. Did you mean 'lwf'? See: engram methods"),
        (["--dataset", "digit"], 2, "There is no data set 'digit'. Did you mean 'digits'? See: engram datasets"),
        (["--set", "alhpa=1"], 2, "The method 'features' has no setting 'alhpa'. Did you mean 'alpha'?"),
        (["lwf", "--features-per-class", "9"], 2, "The method 'lwf' has no setting 'features_per_class'."),
        (["--set", "rate=fast"], 2, "The setting 'rate' cannot be 'fast'"),
        (["--epochs", "0"], 2, "The setting 'epochs' cannot be 0"),
        (["--set", "rate"], 2, "--set wants KEY=VALUE, such as --set rate=0.5; found 'rate'."),
        (["--network", "resnet"], 2, "There is no network 'resnet'. Did you mean 'resnet"),
        (["--classes-per-task", "11"], 2, "digits has 10 classes; classes-per-task cannot be 11."),
        (["--tasks", "6"], 2, "This stream has 5 tasks; 6 were asked for."),
        (["--class-order", "nowhere"], 2, "The class order 'nowhere' is neither 'seed', '1993' nor a readable file."),
        (["--validation", "1.5"], 2, "The validation share must lie between 0 and 1"),
        (["--device", "cuda"], 1, "The device 'cuda' cannot be used here. Try --device auto."),
        (["--dataset", "arrays"], 2, "Name it with --data FILE.npz"),
        (["--dataset", "arrays", "--data", "missing.npz"], 1, "missing.npz"),
        (["--dataset", "arrays", "--data", bad_archive], 1, "data.npz"),
        (["--dataset", "arrays", "--data", pickled_archive], 1, "objects.npz"),
        (["--out", "/proc/nothing"], 1, "/proc/nothing"),
        (["--set", "weights=none.safetensors"], 1, "none.safetensors"),
    ],
)
def test_bad_input_gets_one_clear_sentence(arguments: list[object], code: int, said: str, tmp_path: Path) -> None:
    given = [each(tmp_path) if callable(each) else str(each) for each in arguments]
    before = sorted(path.name for path in tmp_path.iterdir())
    done = engram("run", *given, "--quiet", *([] if "--out" in given else ["--out", "out"]), cwd=tmp_path)
    assert said in done.stderr
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    left = [path for path in (tmp_path / "out").glob("*")] if (tmp_path / "out").exists() else []
    assert not [path for path in left if path.name != ".lock"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "out") == before


def test_an_output_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    assert engram("run", "finetune", *QUICK, "--out", "out", "--quiet", cwd=tmp_path).returncode == 0
    before = (tmp_path / "out" / "result.json").read_bytes()
    again = engram("run", "finetune", *QUICK, "--out", "out", "--quiet", cwd=tmp_path)
    assert again.returncode == 2 and "already holds a run. Continue it with --resume" in again.stderr
    other = engram("run", "finetune", *QUICK, "--out", "out", "--quiet", "--resume", "--seed", "3", cwd=tmp_path)
    assert other.returncode == 2 and "seed: 0, now 3" in other.stderr
    assert (tmp_path / "out" / "result.json").read_bytes() == before


def test_ctrl_c_says_how_to_go_on_and_leaves_things_clean(tmp_path: Path) -> None:
    arguments = ["run", "features", "--epochs", "2000", "--out", "out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "engram", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "out" / "training.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--out 'out' --resume goes on" in said and "Traceback" not in said
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {".lock", "run.json", "training.safetensors"}
