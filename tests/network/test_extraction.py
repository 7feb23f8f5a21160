"""Features extracted in parts are those of one pass, and never NaN."""

from __future__ import annotations

import pytest
import torch
from lazy_made import as_lazy
from torch import Tensor, nn

from engram.data import Samples
from engram.errors import TrainingError
from engram.network import extract, make_network
from engram.network.network import batch_size

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (20, 8, 8, 1), dtype=torch.uint8, generator=GENERATOR)
SAMPLES = Samples.of(IMAGES, torch.zeros(20, dtype=torch.int64))


@pytest.mark.parametrize("size", [1, 7, 20, 500])
def test_features_equal_those_of_a_single_pass(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.network.network.BATCH", size)
    network = make_network("small", "cosine", SAMPLES, seed=0).frozen()
    chosen = SAMPLES.select(torch.tensor([19, 3, 3, 0, *range(4, 12)]))
    features = extract(network, chosen)
    torch.testing.assert_close(features, network.features(IMAGES[chosen.rows]), rtol=1e-5, atol=1e-6)
    assert features.dtype == torch.float32
    assert not features.requires_grad


def test_no_samples_give_no_features() -> None:
    network = make_network("small", "cosine", SAMPLES, seed=0).frozen()
    assert extract(network, SAMPLES.select(torch.arange(0))).shape == (0, 64)


class Broken(nn.Module):
    """Gives `bad` for the samples whose first number is large."""

    def __init__(self, bad: float) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, vectors: Tensor) -> Tensor:
        return torch.where(vectors[:, :1] > 2, self.bad, vectors)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_not_finite_are_an_error(bad: float) -> None:
    vectors = torch.zeros(30, 3)
    network = make_network(Broken(bad), "cosine", Samples.of(vectors, torch.zeros(30, dtype=torch.int64)), seed=0)
    assert extract(network, Samples.of(vectors, torch.zeros(30, dtype=torch.int64))).shape == (30, 3)
    vectors[29, 0] = 100
    with pytest.raises(TrainingError, match="not finite"):
        extract(network, Samples.of(vectors, torch.zeros(30, dtype=torch.int64)))


def test_features_of_prefetched_images_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.network.network.BATCH", 7)
    network = make_network("small", "cosine", SAMPLES, seed=0)
    assert torch.equal(extract(network, as_lazy(SAMPLES)), extract(network, SAMPLES))


@pytest.mark.parametrize(
    ("shape", "size"), [((12,), 500), ((32, 32, 3), 500), ((96, 96, 3), 500), ((224, 224, 3), 91), ((4096, 4096, 3), 1)]
)
def test_batches_of_large_images_are_smaller(shape: tuple[int, ...], size: int) -> None:
    assert batch_size(shape) == size
