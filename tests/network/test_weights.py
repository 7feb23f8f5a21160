"""Weights from files: `.pth` as training scripts save them, and nothing in them is ever executed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engram.errors import DataError
from engram.network.registry import NETWORKS, extractor_for_weights, load_weights

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")

LEGACY = {"_use_new_zipfile_serialization": False}  # as PyTorch saved before 1.6


def weights(name: str = "resnet32") -> dict[str, Tensor]:
    torch.manual_seed(0)
    return NETWORKS[name].make(3).state_dict()


WRAPPED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "a state dict": lambda found: found,
    "under state_dict": lambda found: {"state_dict": found, "epoch": 3},
    "under model": lambda found: {"model": found},
    "by DataParallel": lambda found: {f"module.{name}": tensor for name, tensor in found.items()},
    "with a classifier": lambda found: {**found, "fc.weight": torch.zeros(9, 64), "fc.bias": torch.zeros(9)},
    "without counters": lambda found: {name: t for name, t in found.items() if "num_batches" not in name},
}


@pytest.mark.parametrize(
    ("form", "ending"), [*((form, ".pth") for form in WRAPPED), ("a state dict", ".pt"), ("a state dict", ".bin")]
)
def test_a_pytorch_file_is_read_as_training_scripts_save_it(form: str, ending: str, tmp_path: Path) -> None:
    saved, path = weights(), tmp_path / f"weights{ending}"
    torch.save(WRAPPED[form](saved), path)
    assert extractor_for_weights(path) == "resnet32"
    torch.manual_seed(1)
    extractor = NETWORKS["resnet32"].make(3)
    assert not torch.equal(extractor.state_dict()["conv1.weight"], saved["conv1.weight"])
    load_weights(extractor, path)
    for name, tensor in extractor.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


def test_a_file_of_an_old_pytorch_is_read(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "old.pth", **LEGACY)
    assert extractor_for_weights(tmp_path / "old.pth") == "resnet32"


class Attack:
    """An object that creates a file when it is unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.evidence,)


SAVE: dict[str, Callable[[Any, Path], object]] = {
    "zip": torch.save,
    "legacy": partial(torch.save, **LEGACY),
    "pickle": lambda content, path: path.write_bytes(pickle.dumps(content)),
}


@pytest.mark.parametrize("form", SAVE)
@pytest.mark.parametrize("beside_weights", [False, True])
def test_code_in_a_weights_file_is_a_data_error_and_never_runs(form: str, beside_weights: bool, tmp_path: Path) -> None:
    evidence, path = tmp_path / "evidence", tmp_path / "weights.pth"
    attack = Attack(evidence)
    SAVE[form]({**weights(), "extra": attack} if beside_weights else attack, path)
    with pytest.raises(DataError) as caught:
        extractor_for_weights(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError):
        load_weights(NETWORKS["resnet32"].make(3), path)
    assert not evidence.exists()
    pickle.loads(pickle.dumps(attack))  # which would have done it
    assert evidence.exists()


@pytest.mark.parametrize("content", [[1, 2, 3], {"lr": 0.1}, torch.zeros(3), {}])
def test_a_pytorch_file_without_a_state_dict_is_a_data_error(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(DataError, match=r"other\.pth"):
        extractor_for_weights(tmp_path / "other.pth")


def test_a_damaged_or_absent_pytorch_file_is_named(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "cut.pth")
    content = (tmp_path / "cut.pth").read_bytes()
    noise = torch.Generator().manual_seed(0)
    random = [bytes(torch.randint(0, 256, (size,), generator=noise).tolist()) for size in (1, 10, 100, 1000)]
    for damaged in (b"", b"junk", b"\x80\x02junk", b"\x80\x04.", *random, content[: len(content) // 2]):
        (tmp_path / "cut.pth").write_bytes(damaged)
        with pytest.raises(DataError, match=r"cut\.pth"):
            extractor_for_weights(tmp_path / "cut.pth")
    with pytest.raises(DataError, match=r"absent\.pth"):
        extractor_for_weights(tmp_path / "absent.pth")


def test_weights_of_another_network_say_which_one_does_not_fit(tmp_path: Path) -> None:
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(DataError, match=r"other\.pth"):
        extractor_for_weights(tmp_path / "other.pth")
    torch.save(weights("small"), tmp_path / "small.pth")
    with pytest.raises(DataError, match=r"small\.pth"):
        load_weights(NETWORKS["resnet32"].make(3), tmp_path / "small.pth")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["pipe.pth", "pipe.safetensors"])
def test_a_pipe_or_a_device_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"device-{name}").symlink_to("/dev/null")
    for path in (tmp_path / name, tmp_path / f"device-{name}"):
        with pytest.raises(DataError, match=path.name):
            extractor_for_weights(path)
