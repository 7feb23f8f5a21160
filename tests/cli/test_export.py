"""`engram export`, used as a person uses it."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import engram, engram_here
from models_made import NAMES, SIDE

from engram.model import ModelFolder
from engram.network import extractor_for_weights


def test_a_model_becomes_one_onnx_file_and_nothing_else_is_printed(small_model: ModelFolder, tmp_path: Path) -> None:
    done = engram("export", str(small_model.path), "model.onnx", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert json.loads(done.stdout) == {
        **{"path": "model.onnx", "kind": "onnx", "bytes": (tmp_path / "model.onnx").stat().st_size, "version": 2},
        **{"input": "images", "shape": ["batch", SIDE, SIDE, 3], "outputs": ["scores", "probabilities"], "opset": 20},
        "classes": [*NAMES],
    }


def test_the_stored_features_of_either_version(small_model: ModelFolder, tmp_path: Path) -> None:
    for arguments, number, classes in (((), 2, 3), (("--version", "1"), 1, 2)):
        done = engram_here("export", small_model.path, "stored.npz", "--overwrite", *arguments, cwd=tmp_path)
        size = (tmp_path / "stored.npz").stat().st_size / 1024
        assert done == (0, f"npz: stored.npz ({size:.1f} KB, version {number})\n", "")
        with np.load(tmp_path / "stored.npz", allow_pickle=False) as stored:
            assert stored["features"].shape == (6 * classes, 64)
            assert stored["classes"].tolist() == [*NAMES[:classes]]


def test_weights_that_a_new_model_can_start_from(small_model: ModelFolder, tmp_path: Path) -> None:
    done = engram_here("export", small_model.path, "new/weights.safetensors", "--json", "--quiet", cwd=tmp_path)
    output = json.loads(done.stdout)
    assert output["kind"] == "safetensors" and output["dimension"] == 64
    assert extractor_for_weights(tmp_path / output["path"]) == "small"


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (["FOLDER", "model.pt"], 2, ".npz"),
        (["FOLDER", "mine.npz"], 2, "--overwrite"),
        (["FOLDER", "new.npz", "--version", "7"], 2, "version 7"),
        (["FOLDER", "/proc/nothing/new.npz"], 1, "/proc/nothing"),
        (["nowhere", "new.npz"], 1, "engram learn nowhere FOLDER"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    arguments: list[str], code: int, fact: str, small_model: ModelFolder, tmp_path: Path
) -> None:
    (tmp_path / "mine.npz").write_text("mine")
    done = engram_here("export", *(small_model.path if each == "FOLDER" else each for each in arguments), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert fact in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.npz"] and (tmp_path / "mine.npz").read_text() == "mine"
