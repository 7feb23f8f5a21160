"""`engram export`, used as a person uses it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import engram

from engram.cli import main
from engram.data import Samples, Task
from engram.methods import make
from engram.model import Metadata, Model, ModelFolder, save
from engram.network import extractor_for_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two generations: of two classes and then three."""
    draws = torch.Generator().manual_seed(0)
    learner = make("features", epochs=1, batch_size=8, features_per_class=4, adapter_steps=5)
    place = ModelFolder(tmp_path_factory.mktemp("models") / "flowers")
    for index, classes in enumerate([(0, 1), (2,)]):
        labels = torch.tensor(classes).repeat_interleave(6)
        images = torch.randint(0, 256, (len(labels), 8, 8, 3), generator=draws).to(torch.uint8)
        samples = Samples.of(images, labels)
        learner.learn(Task(index, classes, samples, samples))
        names = ("rose", "Türkenbund", "名前")[: len(learner.classes_)]
        with place.writing() as writer:
            save(writer, Model(learner, names, Metadata(seen=(6,) * len(names))), action="learn")
    return place.path


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path):
    """`engram export` of the model in this process, in an empty folder; gives the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, model: Path = folder) -> int:
        monkeypatch.setattr(sys, "argv", ["engram", "export", str(model), *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0)

    return run


def test_a_model_becomes_one_onnx_file_and_nothing_is_said_but_that(folder: Path, tmp_path: Path) -> None:
    done = engram("export", str(folder), "model.onnx", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert json.loads(done.stdout) == {
        **{"path": "model.onnx", "kind": "onnx", "bytes": (tmp_path / "model.onnx").stat().st_size, "generation": 2},
        **{"input": "images", "shape": ["batch", 8, 8, 3], "outputs": ["scores", "probabilities"], "opset": 20},
        "classes": ["rose", "Türkenbund", "名前"],
    }


def test_the_stored_vectors_of_either_generation(command, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, number, classes in (((), 2, 3), (("--generation", "1"), 1, 2)):
        assert command("kept.npz", "--overwrite", *arguments) == 0
        output = capsys.readouterr()
        size = Path("kept.npz").stat().st_size / 1024
        assert (output.out, output.err) == (f"npz: kept.npz ({size:.1f} KB, generation {number})\n", "")
        with np.load("kept.npz", allow_pickle=False) as kept:
            assert kept["features"].shape == (4 * classes, 64)
            assert kept["classes"].tolist() == ["rose", "Türkenbund", "名前"][:classes]


def test_weights_that_a_new_model_can_start_from(command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("new/weights.safetensors", "--json", "--quiet") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["kind"] == "safetensors" and output["dimension"] == 64
    assert extractor_for_weights(Path(output["path"])) == "small"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["model.pt"], 2, ".npz"),
        (["mine.npz"], 2, "--overwrite"),
        (["new.npz", "--generation", "7"], 2, "generation 7"),
        (["/proc/nothing/new.npz"], 1, "/proc/nothing"),
    ],
)
def test_bad_input_gets_one_clear_sentence(
    arguments: list[str], code: int, said: str, command, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.npz").write_text("mine")
    assert command(*arguments) == code
    output = capsys.readouterr()
    assert said in output.err and output.out == "" and len(output.err.splitlines()) == 1
    assert [path.name for path in Path().iterdir()] == ["mine.npz"] and Path("mine.npz").read_text() == "mine"


def test_where_there_is_no_model_the_way_to_one_is_told(command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("new.npz", model=Path("nowhere")) == 1
    assert "engram learn nowhere FOLDER" in capsys.readouterr().err
