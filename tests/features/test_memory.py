"""The memory holds the right rows, in herding order, and counts its bytes exactly."""

from __future__ import annotations

import doctest
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import engram.features
from engram.errors import EngramWarning
from engram.features import (
    MEGABYTE,
    FeatureMemory,
    Float32,
    ImageMemory,
    Memory,
    Pairs,
    RidgeAdapter,
    herd,
    select,
    warn_of_small_classes,
)


def vectors(count: int, dimension: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(count, dimension, generator=torch.Generator().manual_seed(seed)) * 5


def stored(*counts: int, dimension: int = 8, seed: int = 7) -> FeatureMemory:
    rows = F.normalize(vectors(sum(counts), dimension, seed))
    return FeatureMemory(rows, torch.tensor(counts))


# Which rows


def test_each_new_class_is_herded_by_itself() -> None:
    features, class_indices = vectors(60), torch.arange(60) % 3
    sources, counts = select(FeatureMemory.empty(8), features, class_indices, per_class=5)
    assert counts.tolist() == [5, 5, 5]
    for class_index in range(3):
        own = (class_indices == class_index).nonzero().squeeze(1)
        expected = own[herd(F.normalize(features[own]), 5)]
        assert sources[5 * class_index : 5 * class_index + 5].tolist() == expected.tolist()


def test_vectors_are_herded_by_direction_and_not_by_length() -> None:
    features, class_indices = vectors(30), torch.zeros(30, dtype=torch.int64)
    lengths = torch.linspace(0.01, 100, 30)[:, None]
    chosen = [
        select(FeatureMemory.empty(8), v, class_indices, 6)[0] for v in (features, F.normalize(features) * lengths)
    ]
    assert torch.equal(chosen[0], chosen[1])


def test_known_classes_keep_their_rows_when_new_ones_are_added() -> None:
    memory, features = stored(4, 4), vectors(20)
    class_indices = torch.tensor([2, 3] * 10)
    sources, counts = select(memory, features, class_indices, per_class=4)
    assert counts.tolist() == [4, 4, 4, 4]
    assert sources[:8].tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]
    after = memory.rearranged(F.normalize(features), sources, counts)
    assert torch.equal(after.rows[:8], memory.rows)
    assert torch.equal(after.rows[8:12], F.normalize(features)[::2][herd(F.normalize(features[::2]), 4)])
    assert after.class_indices.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_a_smaller_number_keeps_the_first_rows_of_every_class() -> None:
    memory = stored(5, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sources, counts = select(memory, vectors(9), torch.full((9,), 3), per_class=3)
    assert counts.tolist() == [3, 3, 3, 3]
    assert sources[:9].tolist() == [-1, -2, -3, -6, -7, -8, -9, -10, -11]
    after = memory.rearranged(F.normalize(vectors(9)), sources, counts)
    assert torch.equal(after.rows[:9], memory.rows[[0, 1, 2, 5, 6, 7, 8, 9, 10]])


def test_a_known_class_with_new_samples_is_herded_anew_from_both() -> None:
    memory, features = stored(3, 4, 2), vectors(12)
    class_indices = torch.tensor([1, 3, 3, 1, 3, 3, 1, 3, 1, 3, 1, 3])  # class 1 comes back beside a new class 3
    sources, counts = select(memory, features, class_indices, per_class=4)
    assert counts.tolist() == [3, 4, 2, 4]
    assert sources[:3].tolist() == [-1, -2, -3]
    assert sources[7:9].tolist() == [-8, -9]
    # Of class 1: rows 3 to 6 of the memory, whose sources are -4 to -7, then positions 0, 3, 6, 8 and 10.
    arrived = [0, 3, 6, 8, 10]
    candidates = torch.cat([memory.rows[3:7], F.normalize(features[arrived])])
    picks = herd(candidates, 4)
    assert sources[3:7].tolist() == [[-4, -5, -6, -7, *arrived][pick] for pick in picks.tolist()]
    after = memory.rearranged(F.normalize(features), sources, counts)
    assert torch.equal(after.rows[after.class_indices == 1], candidates[picks])
    assert torch.equal(after.rows[after.class_indices == 2], memory.rows[7:9])
    assert {source < 0 for source in sources[3:7].tolist()} == {True, False}  # from both, in this example


def test_a_class_with_fewer_samples_keeps_all_with_a_warning() -> None:
    class_indices = torch.tensor([0] * 10 + [1] * 3 + [2] * 2)
    sources, counts = select(FeatureMemory.empty(8), vectors(15), class_indices, per_class=4)
    assert counts.tolist() == [4, 3, 2]
    with pytest.warns(EngramWarning, match=r"2 classes .* 4 samples .* 2\)"):
        warn_of_small_classes(counts, torch.tensor([True, True, True]), 4)
    assert sorted(sources[4:].tolist()) == [10, 11, 12, 13, 14]


def test_enough_samples_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, counts = select(FeatureMemory.empty(8), vectors(8), torch.tensor([0, 1] * 4), per_class=4)
        warn_of_small_classes(counts, torch.tensor([True, True]), 4)
        warn_of_small_classes(torch.tensor([1, 4]), torch.tensor([False, True]), 4)


def test_a_class_that_has_no_samples_yet_has_no_rows() -> None:
    sources, counts = select(FeatureMemory.empty(8), vectors(6), torch.tensor([2] * 6), per_class=3)
    assert counts.tolist() == [0, 0, 3]
    assert FeatureMemory(vectors(6)[sources], counts).class_indices.tolist() == [2, 2, 2]


def test_nothing_new_only_trims() -> None:
    sources, counts = select(stored(3, 2), vectors(0), torch.empty(0, dtype=torch.int64), per_class=2)
    assert sources.tolist() == [-1, -2, -4, -5]
    assert counts.tolist() == [2, 2]


def test_rearranging_does_not_change_the_memory_before() -> None:
    memory, features = stored(3), vectors(5)
    rows = memory.rows.clone()
    after = memory.rearranged(features, torch.tensor([4, -1]), torch.tensor([2]))
    after.rows.zero_()
    assert torch.equal(memory.rows, rows)
    assert torch.equal(features, vectors(5))


def test_images_are_rearranged_as_they_came() -> None:
    images = torch.arange(24, dtype=torch.uint8).reshape(6, 2, 2, 1)
    memory = ImageMemory.empty().rearranged(images, torch.tensor([5, 0, 2]), torch.tensor([1, 2]))
    assert memory.rows.dtype == torch.uint8
    assert torch.equal(memory.rows, images[[5, 0, 2]])
    again = memory.rearranged(images, torch.tensor([-3, 1]), torch.tensor([0, 2]))
    assert torch.equal(again.rows, images[[2, 1]])
    assert again.class_indices.tolist() == [1, 1]


def test_an_adapted_memory_has_adapted_vectors_and_the_same_classes() -> None:
    memory, vectors_of_pairs = stored(3, 2), vectors(40)
    adapter = RidgeAdapter().fit(Pairs(vectors_of_pairs, vectors_of_pairs.flip(1), torch.zeros(40, dtype=torch.int64)))
    adapted = memory.adapted(adapter)
    assert torch.equal(adapted.rows, adapter(memory.rows))
    assert torch.equal(adapted.class_indices, memory.class_indices)


# How many bytes


def test_bytes_are_counted_exactly() -> None:
    features = stored(250, 250, dimension=64)
    assert features.nbytes == 500 * 64 * 4
    images = ImageMemory(torch.zeros(20, 32, 32, 3, dtype=torch.uint8), torch.tensor([20, 0]))
    assert images.nbytes == 20 * 3072
    assert Memory(features, images).nbytes == 128_000 + 61_440
    assert Memory().nbytes == 0


IMAGE = 256 * 256 * 3  # bytes of one image of ImageNet, as the paper counts it


@pytest.mark.parametrize(
    ("classes", "features", "images", "megabytes"),
    [
        (100, 250, 0, "48.8"),
        (100, 250, 10, "236.3"),
        (100, 0, 20, "375.0"),
        (1000, 250, 0, "488.3"),
        (1000, 250, 10, "2363.3"),
        (1000, 0, 20, "3750.0"),
    ],
)
def test_the_megabytes_of_table_1(classes: int, features: int, images: int, megabytes: str) -> None:
    stored_bytes = Float32().nbytes(classes * features, 512) + classes * images * IMAGE
    assert f"{stored_bytes / MEGABYTE:.1f}" == megabytes


def test_the_example_of_the_package_runs() -> None:
    assert doctest.testmod(engram.features).attempted > 10
    assert doctest.testmod(engram.features).failed == 0
