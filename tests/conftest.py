"""Data, streams and models that the tests of several rooms share."""

import os
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch looks: tests run side by side, and sums add up in one order

import pytest
import torch
from models_made import taught

from engram.data import Dataset, Samples, Stream, split
from engram.model import ModelFolder
from engram.network import NETWORKS

# A shell that runs the tests in the background lets them ignore Ctrl-C, and so would every command that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def blobs(classes: int = 6, per_class: int = 24, dimension: int = 12, seed: int = 0) -> Dataset:
    """Vectors around one centre per class: learnable in a second by an MLP."""
    draws = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, dimension, generator=draws)
    labels = torch.arange(classes).repeat_interleave(per_class)
    inputs = centres[labels] + torch.randn(len(labels), dimension, generator=draws)
    test = centres[labels] + torch.randn(len(labels), dimension, generator=draws)
    names = tuple(f"class {label}" for label in range(classes))
    return Dataset("blobs", Samples.of(inputs, labels), Samples.of(test, labels), names)


def patterns(classes: int = 4, per_class: int = 12, side: int = 8, seed: int = 0) -> Dataset:
    """Noisy uint8 images of one pattern per class."""
    draws = torch.Generator().manual_seed(seed)
    base = torch.randint(0, 256, (classes, side, side, 3), generator=draws)
    labels = torch.arange(classes).repeat_interleave(per_class)

    def noisy() -> torch.Tensor:
        noise = torch.randint(-40, 41, (len(labels), side, side, 3), generator=draws)
        return (base[labels] + noise).clamp(0, 255).to(torch.uint8)

    names = tuple(f"pattern {label}" for label in range(classes))
    return Dataset("patterns", Samples.of(noisy(), labels), Samples.of(noisy(), labels), names)


@pytest.fixture(scope="session")
def vectors() -> Stream:
    """Three tasks of two classes, vectors."""
    return split(blobs(), classes_per_task=2, seed=0)


@pytest.fixture(scope="session")
def images() -> Stream:
    """Two tasks of two classes, images."""
    return split(patterns(), classes_per_task=2, seed=0)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model of images that stores features; see `models_made`. Copy it to change it."""
    return taught(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The same, which also stores three images of each class."""
    return taught(tmp_path_factory.mktemp("hybrid"), images_per_class=3)


@pytest.fixture(scope="session")
def calibrated_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The small model with 24 features a class instead of 6: enough of held-out images to calibrate it."""
    return taught(tmp_path_factory.mktemp("calibrated"), features_per_class=24)


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights for the network `small`: a model that starts from it has a pretrained network, in a moment."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(NETWORKS["small"].make(3).state_dict(), path)
    return path


@pytest.fixture(scope="session")
def photos() -> Path:
    """Real photographs, `train` and `test`, in folders by class."""
    folder = Path(os.environ.get("ENGRAM_DATA") or "/nowhere", "photos")
    if not folder.is_dir():
        pytest.skip("ENGRAM_DATA does not name a folder that holds photos")
    return folder
