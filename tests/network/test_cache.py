"""`Cache`: an entry is found by everything it depends on, and by nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engram import storage
from engram.data import Samples
from engram.network import Cache, Network, extract, make_network

IMAGES = torch.randint(0, 256, (20, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SAMPLES = Samples.of(IMAGES, torch.zeros(20, dtype=torch.int64))
BYTES = 20 * 64 * 4  # of their features, and a header


def network_of(seed: int = 0, crop: int | None = None) -> Network:
    return make_network("small", "cosine", SAMPLES, seed=seed, crop=crop)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_features_that_were_extracted_before_are_read(tmp_path: Path) -> None:
    once = extract(network_of(), SAMPLES, cache=Cache(tmp_path))
    assert torch.equal(extract(network_of(), SAMPLES, cache=Cache(tmp_path)), once)
    (path,) = files(tmp_path)
    storage.save_tensors(path, {"features": once + 1})  # a marked copy shows what is read
    assert torch.equal(extract(network_of(), SAMPLES, cache=Cache(tmp_path)), once + 1)
    assert torch.equal(extract(network_of(), SAMPLES), once)


def test_another_network_or_other_samples_are_another_entry(tmp_path: Path) -> None:
    changed = network_of()
    with torch.no_grad():
        next(changed.extractor.parameters()).view(-1)[0] += 1e-3
    moved = network_of()
    moved.mean += 0.1
    asked = [
        (network_of(), SAMPLES),
        (network_of(seed=1), SAMPLES),
        (network_of(crop=6), SAMPLES),
        (changed, SAMPLES),
        (moved, SAMPLES),
        (network_of(), SAMPLES.select(torch.arange(19))),
        (network_of(), SAMPLES.select(torch.arange(20).flip(0))),
    ]
    for network, samples in asked:
        extract(network, samples, cache=Cache(tmp_path))
    assert len(files(tmp_path)) == len(asked)


def test_another_version_of_engram_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extract(network_of(), SAMPLES, cache=Cache(tmp_path))
    monkeypatch.setattr("engram.network.cache.ENGRAM_VERSION", "0.0")
    extract(network_of(), SAMPLES, cache=Cache(tmp_path))
    assert len(files(tmp_path)) == 2


def test_the_head_makes_no_difference(tmp_path: Path) -> None:
    extract(network_of(), SAMPLES, cache=Cache(tmp_path))
    extract(network_of().grown(3, 0, "head"), SAMPLES, cache=Cache(tmp_path))
    assert len(files(tmp_path)) == 1


def test_a_network_that_is_trained_further_is_another_entry(tmp_path: Path) -> None:
    network, cache = network_of(), Cache(tmp_path)
    before = extract(network, SAMPLES, cache=cache)
    with torch.no_grad():
        for parameter in network.extractor.parameters():
            parameter += 0.1
    assert not torch.allclose(extract(network, SAMPLES, cache=cache), before)


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_entry_is_computed_again(damage: bytes | None, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    once = extract(network_of(), SAMPLES, cache=cache)
    (path,) = files(tmp_path)
    intact = path.read_bytes()
    path.write_bytes(intact[:-8] if damage is None else damage)
    assert torch.equal(extract(network_of(), SAMPLES, cache=cache), once)
    assert path.read_bytes() == intact


def test_the_least_recently_used_entry_is_evicted_and_networks_never_are(tmp_path: Path) -> None:
    networks, paths = [network_of(seed).frozen() for seed in range(3)], {}
    cache = Cache(tmp_path, max_bytes=BYTES * 5 // 2)  # two of them
    trained = cache.path("network", ["a"])
    cache.save(trained, {"weight": torch.zeros(BYTES)})
    os.utime(trained, (0, 0))
    for second, number in enumerate((0, 1, 0, 2)):  # the first is used again
        before = set(files(tmp_path))
        extract(networks[number], SAMPLES, cache=cache)
        paths.setdefault(number, next(iter(set(files(tmp_path)) - before), None))
        os.utime(paths[number], (second, second))
    assert set(files(tmp_path)) == {trained, paths[0], paths[2]}


def test_an_entry_that_is_too_large_is_not_stored(tmp_path: Path) -> None:
    extract(network_of(), SAMPLES, cache=Cache(tmp_path, max_bytes=BYTES - 1))
    assert files(tmp_path) == []


def test_features_are_computed_even_if_they_cannot_be_stored(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "features")
    (tmp_path / "features").rmdir()
    assert torch.equal(extract(network_of(), SAMPLES, cache=cache), extract(network_of(), SAMPLES, cache=cache))
    assert files(tmp_path) == []
