"""Features that were extracted before are read; of another network or other samples they never are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engram import storage
from engram.data import Samples
from engram.network import Network, TensorCache, caching, extract, make_network

IMAGES = torch.randint(0, 256, (20, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SAMPLES = Samples.of(IMAGES, torch.zeros(20, dtype=torch.int64))
BYTES = 20 * 64 * 4  # of their features, and a header


def network_of(seed: int = 0, side: int | None = None) -> Network:
    return make_network("small", "cosine", SAMPLES, seed=seed, side=side)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_what_was_extracted_before_is_read(tmp_path: Path) -> None:
    with caching(TensorCache(tmp_path)):
        once = extract(network_of(), SAMPLES)
        assert torch.equal(extract(network_of(), SAMPLES), once)
    (path,) = files(tmp_path)
    storage.save_tensors(path, {"features": once + 1})  # what is read now is what lies there
    with caching(TensorCache(tmp_path)):
        assert torch.equal(extract(network_of(), SAMPLES), once + 1)
    assert torch.equal(extract(network_of(), SAMPLES), once)


def test_nothing_is_kept_where_nobody_asked_for_it(tmp_path: Path) -> None:
    with caching(TensorCache(tmp_path)), caching(None):
        extract(network_of(), SAMPLES)
    extract(network_of(), SAMPLES)
    assert files(tmp_path) == []


def test_another_network_or_other_samples_are_something_else(tmp_path: Path) -> None:
    changed = network_of()
    with torch.no_grad():
        next(changed.extractor.parameters()).view(-1)[0] += 1e-3
    moved = network_of()
    moved.mean += 0.1
    asked = [
        (network_of(), SAMPLES),
        (network_of(seed=1), SAMPLES),
        (network_of(side=6), SAMPLES),
        (changed, SAMPLES),
        (moved, SAMPLES),
        (network_of(), SAMPLES.select(torch.arange(19))),
        (network_of(), SAMPLES.select(torch.arange(20).flip(0))),
    ]
    with caching(TensorCache(tmp_path)):
        for network, samples in asked:
            extract(network, samples)
    assert len(files(tmp_path)) == len(asked)


def test_the_head_makes_no_difference(tmp_path: Path) -> None:
    with caching(TensorCache(tmp_path)):
        extract(network_of(), SAMPLES)
        extract(network_of().grown(3, 0, "head"), SAMPLES)
    assert len(files(tmp_path)) == 1


def test_a_network_that_is_trained_on_is_another(tmp_path: Path) -> None:
    network = network_of()
    with caching(TensorCache(tmp_path)):
        before = extract(network, SAMPLES)
        with torch.no_grad():
            for parameter in network.extractor.parameters():
                parameter += 0.1
        assert not torch.allclose(extract(network, SAMPLES), before)


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_what_is_damaged_is_extracted_anew(damage: bytes | None, tmp_path: Path) -> None:
    with caching(TensorCache(tmp_path)):
        once = extract(network_of(), SAMPLES)
        (path,) = files(tmp_path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-8] if damage is None else damage)
        assert torch.equal(extract(network_of(), SAMPLES), once)
    assert path.read_bytes() == whole


def test_what_was_not_asked_for_longest_makes_room(tmp_path: Path) -> None:
    networks, paths = [network_of(seed).frozen() for seed in range(3)], {}
    with caching(TensorCache(tmp_path, most=BYTES * 5 // 2)):  # two of them
        for second, number in enumerate((0, 1, 0, 2)):  # the first is asked for again
            before = set(files(tmp_path))
            extract(networks[number], SAMPLES)
            paths.setdefault(number, next(iter(set(files(tmp_path)) - before), None))
            os.utime(paths[number], (second, second))
    assert set(files(tmp_path)) == {paths[0], paths[2]}


def test_what_alone_is_too_large_is_not_kept(tmp_path: Path) -> None:
    with caching(TensorCache(tmp_path, most=BYTES - 1)):
        extract(network_of(), SAMPLES)
    assert files(tmp_path) == []


def test_what_cannot_be_kept_is_extracted_all_the_same(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path / "features")
    (tmp_path / "features").rmdir()
    with caching(cache):
        assert torch.equal(extract(network_of(), SAMPLES), extract(network_of(), SAMPLES))
    assert files(tmp_path) == []
