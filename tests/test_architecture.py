"""docs/architecture.md: its traces are those of the commands, and an extension touches the two places it names."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
from commands import ENVIRONMENT, warm
from commands import engram as run_engram
from folders_made import class_folders

import engram

ROOT = Path(__file__).parents[1]
SOURCE = Path(engram.__file__).parent
LOSS, BYTES = 24, 33  # files entered; lower these when modules on the way are merged


class Reached(BaseException):
    """The end of a trace."""


def trace(arguments: list[str], cwd: Path, found: Path) -> None:
    """Run a command up to its first gradient or published file; write the engram files in which a function ran."""
    from engram.cli import main

    entered: dict[str, None] = {}

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{SOURCE}{os.sep}") and frame.f_code.co_name != "<module>":
            entered[path.removeprefix(f"{SOURCE}{os.sep}").removesuffix(".py")] = None

    def stop(*_: Any, **__: Any) -> NoReturn:
        sys.setprofile(None)
        raise Reached

    torch.Tensor.backward = stop  # type: ignore[method-assign]
    os.replace = stop if arguments[0] == "learn" else os.replace
    os.chdir(cwd)
    sys.argv = ["engram", *arguments]
    sys.setprofile(on_call)
    try:
        main()
    except Reached:
        found.write_text(json.dumps(list(entered)))


def traced(tmp_path: Path, *arguments: str) -> list[str]:
    process = warm().Process(target=trace, args=([*arguments], tmp_path, tmp_path / "trace.json"))
    process.start()
    process.join(120)
    files: list[str] = json.loads((tmp_path / "trace.json").read_text())
    return files


def documented(number: int) -> list[str]:
    """The files of a trace in the document, in order: the left column of its block."""
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Two traces")[1]
    block = re.findall(r"```text\n(.*?)```", section, re.DOTALL)[number]
    return [file for line in block.splitlines() for file in re.split(r" {3,}", line)[0].split()]


def test_from_the_command_to_the_loss(tmp_path: Path) -> None:
    files = traced(tmp_path, "run", "features", "--epochs", "1", "--tasks", "1", "--out", "run")
    assert files[-1] == "network/losses" and len(files) <= LOSS
    assert [file for file in files if file in documented(0)] == documented(0)


def test_from_the_command_to_the_bytes(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos", 2, 5)
    files = traced(tmp_path, "learn", "model", "photos")
    assert files[0] == "cli/app" and len(files) <= BYTES
    assert [file for file in files if file in documented(1)] == documented(1)


OWN = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from engram.data import DATASETS, Dataset, Samples, Source
from engram.features import ADAPTERS, CLASSIFIERS, Adapter, NearestMean
from engram.methods import METHODS, Features, Method
from engram.network.registry import NETWORKS, NetworkEntry


@dataclass(kw_only=True)
class OwnMethod(Features):
    """Features with a setting more."""

    own_setting: int = 3


class OwnNetwork(nn.Module):
    """One layer on vectors."""

    def __init__(self, inputs, last_relu=True):
        super().__init__()
        self.layer, self.dimension = nn.Linear(inputs, 12), 12

    def forward(self, inputs):
        return self.layer(inputs).relu()


@dataclass(kw_only=True)
class OwnClassifier(NearestMean):
    """Nearest mean with a setting more."""

    own_margin: float = 0.0

    @property
    def description(self):
        return f"own (margin {self.own_margin:g})"


@dataclass(kw_only=True, eq=False)
class OwnAdapter(Adapter):
    """The mean shift."""

    name: ClassVar = "own"
    own_share: float = 1.0

    def _fit(self, pairs, run):
        self.shift = self.own_share * (pairs.new - pairs.old).mean(0)
        return self

    def __call__(self, vectors):
        return nn.functional.normalize(vectors + self.shift)


def load(root, options, progress):
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(80) % 4
    inputs = torch.randn(80, 6, generator=draws) + 4 * torch.eye(4, 6)[labels]
    train, test = (Samples.of(inputs[part], labels[part]) for part in (slice(0, 60), slice(60, 80)))
    return Dataset("own-data", train, test, ("a", "b", "c", "d"), published=True)


METHODS["own-method"] = Method(OwnMethod, "mine", "features")
NETWORKS["own-network"] = NetworkEntry("mine", OwnNetwork, 12, takes_vectors=True)
CLASSIFIERS["own-classifier"] = OwnClassifier
ADAPTERS["own-adapter"] = OwnAdapter
DATASETS["own-data"] = Source(summary="mine", load=load, location="installed", classes_per_task=2)
'''


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of five things that a module outside the package adds, each with a class or function and an entry."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    names = ["own-method", "--dataset", "own-data", "--network", "own-network", "--epochs", "1"]
    chosen = {
        "classifier": "own-classifier",
        "adapter": "own-adapter",
        "own_setting": 5,
        "own_margin": 2,
        "own_share": 0.5,
    }
    options = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    variables = {**ENVIRONMENT, "PYTHONPATH": path, "ENGRAM_PLUGINS": "own"}
    ended = run_engram("run", *names, *options, "--json", "--quiet", cwd=folder, fresh=True, **variables)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(
    ("setting", "value"),
    {
        **{"network": "own-network", "classifier": "own-classifier", "adapter": "own-adapter"},
        **{"own_setting": 5, "own_margin": 2.0, "own_share": 0.5},
    }.items(),
)
def test_additions_from_outside_are_used_by_name_with_their_settings(
    result: dict[str, Any], setting: str, value: object
) -> None:
    assert result["settings"][setting] == value


def test_a_method_and_a_data_set_from_outside_are_run(result: dict[str, Any]) -> None:
    assert (result["method"], result["dataset"], result["classes_seen"]) == ("own-method", "own-data", [2, 4])
    assert result["memory_bytes"] == 60 * 12 * 4  # every feature of the added network
    assert result["omega"][-1] < 1 < len(result["drift_gap"])
