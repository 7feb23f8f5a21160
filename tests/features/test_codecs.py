"""Vectors in few bytes: how far off they are, how many bytes exactly, and that nothing else is kept."""

from __future__ import annotations

import sys

import faiss
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engram.errors import DataError, TrainingError, UsageError
from engram.features import Coding, FeatureMemory, codebooks
from engram.features.codebooks import STRETCH, in_basis
from engram.features.codecs import Product, Scaled, coded, nbytes, product_bytes

CODINGS = [
    Coding(),
    Coding(codec="float16"),
    Coding(codec="int8"),
    Coding(codec="pq", codec_bytes=8),
    Coding(codec="pq"),  # 4
]
NAMES = [f"{coding.codec}-{coding.codec_bytes}" for coding in CODINGS]
every_codec = pytest.mark.parametrize("coding", CODINGS, ids=NAMES)


def vectors(count: int, dimension: int = 16, seed: int = 0) -> Tensor:
    """Unit vectors with many zeros, as features are that end in a ReLU."""
    draws = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dimension, generator=draws).relu() + 1e-3 * torch.eye(dimension)[0])


def narrow_vectors(count: int, dimension: int = 16, seed: int = 0) -> Tensor:
    """Unit vectors that vary along few directions, none of them a dimension's own, as features do."""
    draws = torch.Generator().manual_seed(seed)
    sizes = 0.5 ** torch.arange(dimension)
    return F.normalize((torch.randn(count, dimension, generator=draws) * sizes) @ narrow_directions(dimension))


def narrow_directions(dimension: int) -> Tensor:
    """The directions of narrow vectors, in rows, the largest first."""
    return torch.linalg.qr(torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(1)))[0]


def distance(coding: Coding, given: Tensor) -> float:
    """1 − the mean cosine between vectors and what is kept of them."""
    return 1 - float((coding.encoded(given).decoded().double() * given.double()).sum(1).mean())


# How far off they are


def test_float32_is_what_it_was_to_the_last_bit() -> None:
    given = torch.randn(20, 8)
    kept = Coding().encoded(given)
    assert kept.decoded() is given
    assert kept.tensors().keys() == {"rows"}


def test_float16_is_off_by_its_rounding() -> None:
    given = vectors(500)
    kept = Coding(codec="float16").encoded(given)
    assert bool(((kept.numbers() - given).abs() <= given.abs() * 2**-11 + 2**-25).all())


def test_int8_is_off_by_half_a_step_of_each_dimension() -> None:
    given = vectors(500) * torch.linspace(0.1, 3, 16)  # dimensions of different size
    kept = Scaled.of(given)
    assert torch.allclose(kept.steps, (given.amax(0) - given.amin(0)) / 255)
    assert bool(((kept.numbers() - given).abs() <= kept.steps / 2 + 1e-6).all())
    assert torch.equal(kept.numbers()[given == 0], torch.zeros(int((given == 0).sum())))


def test_int8_of_a_dimension_that_is_always_the_same_is_exact() -> None:
    given = torch.tensor([[0.6, -0.8], [0.6, 0.8], [0.6, 0.8]])
    assert torch.allclose(Scaled.of(given).numbers(), given)


def test_product_quantisation_decodes_as_faiss_does() -> None:
    given = vectors(1000)
    kept = Product.of(given, 8)
    quantiser = faiss.ProductQuantizer(16, 8, 8)
    faiss.copy_array_to_vector(kept.codebook.float().flatten().numpy(), quantiser.centroids)
    assert kept.rotation is not None
    assert np.array_equal(quantiser.compute_codes(in_basis(given, kept.rotation).numpy()), kept.codes.numpy())
    decoded = torch.from_numpy(quantiser.decode(kept.codes.numpy()))
    assert torch.allclose(decoded @ kept.rotation.float().T, kept.numbers(), atol=1e-6)


def test_vectors_that_vary_along_few_directions_are_turned_and_come_out_nearer_than_by_faiss() -> None:
    given = narrow_vectors(2000)
    kept = Product.of(given, 4)
    assert kept.rotation is not None
    lengths = kept.rotation.float().norm(dim=0)
    turn = kept.rotation.float() / lengths
    assert torch.allclose(turn.T @ turn, torch.eye(16), atol=5e-3)  # float16
    assert torch.allclose(lengths, (given @ turn).square().mean(0).pow(STRETCH / 2), atol=1e-2)
    quantiser = faiss.ProductQuantizer(16, 4, 8)
    quantiser.cp.min_points_per_centroid = 1
    quantiser.train(given.numpy())
    theirs = torch.from_numpy(quantiser.decode(quantiser.compute_codes(given.numpy())))
    assert (kept.numbers() - given).square().sum() < 0.5 * (theirs - given).square().sum()


def test_turned_vectors_are_about_as_near_as_by_the_optimised_rotation_of_faiss() -> None:
    given = narrow_vectors(2000)
    optimised = faiss.OPQMatrix(16, 4)
    quantiser = faiss.ProductQuantizer(16, 4, 8)
    quantiser.cp.min_points_per_centroid = 1
    optimised.train(given.numpy())
    turned = optimised.apply(given.numpy())
    quantiser.train(turned)
    theirs = torch.from_numpy(quantiser.decode(quantiser.compute_codes(turned)) - turned)
    assert (Product.of(given, 4).numbers() - given).square().sum() < 1.1 * theirs.square().sum()


def test_vectors_with_many_zeros_are_left_as_they_are() -> None:
    rotation = Product.of(vectors(1000), 8).rotation
    assert rotation is not None and torch.equal(rotation, rotation.diag().diag())  # stretched, and not turned


def test_of_small_directions_more_is_kept_than_plain_errors_would_leave() -> None:
    """Each direction's error, beside its size, goes by its size to the power of STRETCH less than 1."""
    given = narrow_vectors(20_000, 4)
    errors = (Product.of(given, 2).numbers() - given) @ narrow_directions(4).T
    shares = errors.square().mean(0) / (given @ narrow_directions(4).T).square().mean(0)
    plain = faiss.ProductQuantizer(4, 2, 8)
    turned = (given @ narrow_directions(4).T)[:, [0, 3, 1, 2]].contiguous()
    plain.train(turned.numpy())
    plainly = torch.from_numpy(plain.decode(plain.compute_codes(turned.numpy()))) - turned
    assert shares[3] < 0.9 * plainly.square().mean(0)[1] / turned[:, 1].square().mean()


def test_product_quantisation_is_no_further_off_than_by_the_k_means_of_faiss() -> None:
    given = vectors(2000)
    for parts in (8, 4):
        quantiser = faiss.ProductQuantizer(16, parts, 8)
        quantiser.cp.min_points_per_centroid = 1
        quantiser.train(given.numpy())
        theirs = torch.from_numpy(quantiser.decode(quantiser.compute_codes(given.numpy())))
        ours = Product.of(given, parts).numbers()
        assert (ours - given).square().sum() <= 1.02 * (theirs - given).square().sum()


def test_more_bytes_bring_vectors_nearer() -> None:
    given = vectors(2000)
    off = [distance(Coding(codec="pq", codec_bytes=count), given) for count in (2, 4, 8, 16)]
    assert off == sorted(off, reverse=True)
    assert off[0] < 0.1
    assert off[-1] < 1e-4
    assert distance(Coding(codec="int8"), given) < 2e-5
    assert abs(distance(Coding(codec="float16"), given)) < 1e-6


@every_codec
@pytest.mark.parametrize("count", [1, 3, 256, 257])
def test_vectors_are_of_unit_length_and_of_few_none_is_far_off(coding: Coding, count: int) -> None:
    given = vectors(count)
    decoded = coding.encoded(given).decoded()
    assert decoded.dtype == torch.float32
    assert torch.allclose(decoded.norm(dim=1), torch.ones(count), atol=1e-6)
    assert float((decoded * given).sum(1).min()) > 0.999


@every_codec
def test_the_same_vectors_give_the_same_codes(coding: Coding) -> None:
    first, second = (coding.encoded(vectors(600)).tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_identical_vectors_are_kept_exactly_however_many() -> None:
    given = vectors(3).repeat(200, 1)
    assert abs(distance(Coding(codec="pq"), given)) < 1e-6


def test_what_has_not_moved_is_hardly_worse_for_being_encoded_again() -> None:
    for coding, most in (
        (Coding(codec="float16"), 1e-9),
        (Coding(codec="int8"), 1e-9),
        (Coding(codec="pq"), 1e-5),
    ):
        for given in (vectors(800), narrow_vectors(800)):
            once = coding.encoded(given)
            again = once
            for _ in range(5):
                again = coding.encoded(again.numbers(), again)
            assert 1 - float((once.decoded().double() * again.decoded().double()).sum(1).mean()) < max(most, 1e-7)


# How many bytes


@every_codec
@pytest.mark.parametrize("count", [1, 3, 255, 256, 257, 700])
def test_bytes_are_what_the_arithmetic_says(coding: Coding, count: int) -> None:
    kept = coding.encoded(vectors(count))
    assert kept.nbytes == sum(tensor.nbytes for tensor in kept.tensors().values())
    assert kept.nbytes == coding.nbytes(count, 16) == nbytes(coding.codec, count, 16, coding.codec_bytes)
    half = torch.arange(0, count, 2)
    assert kept.chosen(half).nbytes == coding.nbytes(len(half), 16)


def test_bytes_by_hand() -> None:
    assert nbytes("float32", 1000, 64) == 256_000
    assert nbytes("float16", 1000, 64) == 128_000
    assert nbytes("int8", 1000, 64) == 64_000 + 2 * 64 * 4
    assert nbytes("pq", 1000, 64) == 16_000 + 256 * 64 * 2 + 64 * 64 * 2
    assert nbytes("pq", 1000, 64, 32) == 32_000 + 256 * 64 * 2 + 64 * 64 * 2
    assert nbytes("pq", 3, 64) == 3 * 16 + 3 * 64 * 2


def test_a_vector_is_cut_into_as_many_parts_as_it_can_be() -> None:
    assert [product_bytes(dimension, None) for dimension in (64, 512, 15, 7, 1)] == [16, 128, 3, 1, 1]
    assert product_bytes(64, 32) == 32
    with pytest.raises(UsageError, match=r"^Vectors of 64 numbers cannot be cut into 24 equal parts.* to 16 or 32\.$"):
        product_bytes(64, 24)
    with pytest.raises(UsageError, match=r"Set codec_bytes to 64\.$"):
        product_bytes(64, 100)


# What else is kept


@every_codec
@pytest.mark.parametrize("count", [5, 700])
def test_some_of_the_vectors_are_what_they_were(coding: Coding, count: int) -> None:
    kept = coding.encoded(vectors(count))
    some = torch.arange(0, count, 3).flip(0)
    chosen = kept.chosen(some)
    assert chosen.codec == kept.codec
    assert len(chosen) == len(some)
    # The range of int8 may shrink: half a step, and then the length; few are no longer turned: half precision.
    tolerance = {"int8": 3e-3, "pq": 1e-3}.get(coding.codec, 0)
    assert torch.allclose(chosen.decoded(), kept.decoded()[some], atol=tolerance, rtol=0)


def test_what_only_others_have_led_to_is_not_among_some_of_the_vectors() -> None:
    odd = torch.zeros(1, 16)
    odd[0, 5] = -1.0  # the only one that is negative
    given = torch.cat([vectors(400), odd])
    for coding in (Coding(codec="int8"), Coding(codec="pq")):
        kept = coding.encoded(given)
        lowest = [
            min(float(tensor.float().min()) for tensor in each.tensors().values())
            for each in (kept, kept.chosen(torch.arange(400)))
        ]
        assert lowest[0] < -0.99
        assert lowest[1] > -0.01


def test_of_turned_vectors_some_are_what_they_were() -> None:
    kept = Product.of(narrow_vectors(1000), 8)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    for count, tolerance in ((1000, 0), (700, 0), (100, 1e-3)):  # so few are no longer turned: half precision
        chosen = kept.chosen(order[:count])
        assert torch.allclose(chosen.decoded(), kept.decoded()[order[:count]], atol=tolerance, rtol=0)
        assert chosen.nbytes == nbytes("pq", count, 16, 8)


def test_vectors_that_were_kept_before_there_were_rotations_are_read() -> None:
    given = vectors(300)
    kept = Product.of(given[:256], 8)  # as many as there are centroids, each its own
    assert kept.rotation is None
    read = coded({"codes": kept.codes, "codebook": kept.codebook})
    assert torch.equal(read.numbers(), kept.numbers())
    again = Product.of(torch.cat([read.numbers(), given[256:]]), 8, read)
    assert torch.allclose(again.numbers(), given, atol=0.05)


def test_vectors_that_were_kept_before_they_were_stretched_are_read_and_stay_where_they_are() -> None:
    given = narrow_vectors(1000)
    turn = narrow_directions(16).T.half()  # orthonormal, as all rotations were
    quantiser = faiss.ProductQuantizer(16, 4, 8)
    quantiser.train((given @ turn.float()).numpy())
    centroids = torch.from_numpy(faiss.vector_to_array(quantiser.centroids)).reshape(4, 256, 4)
    codes = torch.from_numpy(quantiser.compute_codes((given @ turn.float()).numpy()))
    read = coded({"codes": codes, "codebook": centroids.half(), "rotation": turn})
    assert (read.numbers() - given).square().sum(1).mean() < 0.05
    again = Product.of(read.numbers(), 4, read)
    assert torch.allclose(again.numbers(), read.numbers(), atol=2e-3)


@every_codec
def test_what_was_saved_is_read_again(coding: Coding) -> None:
    kept = coding.encoded(vectors(300))
    again = coded(kept.tensors())
    assert again.codec == coding.codec
    assert torch.equal(again.decoded(), kept.decoded())


def test_what_is_kept_in_an_unknown_way_is_refused() -> None:
    with pytest.raises(DataError, match="this engram does not know, as codes, signs"):
        coded({"codes": torch.zeros(1), "signs": torch.zeros(1)})


# Refusals


def test_numbers_that_are_not_finite_are_not_hidden_by_codes() -> None:
    given = vectors(3)
    given[1, 1] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        Coding(codec="int8").encoded(given)


def test_bytes_for_a_codec_that_has_none_to_choose_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^codec_bytes is for the codec pq, and the codec is int8"):
        Coding(codec="int8", codec_bytes=8)


def test_without_faiss_vectors_are_decoded_and_chosen_but_not_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Coding(codec="pq").encoded(vectors(300))
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert len(kept.chosen(torch.arange(280)).decoded()) == 280
    Coding(codec="int8").check()
    for refused in (Coding(codec="pq").check, lambda: codebooks.codebook_and_codes(vectors(300), 8)):
        with pytest.raises(UsageError, match=r"faiss-cpu must be installed\. .*'\.\[compress\]'"):
            refused()


# In a memory


@every_codec
def test_a_memory_is_encoded_together_and_says_what_it_keeps(coding: Coding) -> None:
    memory = FeatureMemory.empty(16)
    for number in range(3):
        old, new = len(memory), vectors(200, seed=number)
        sources = torch.cat([-1 - torch.arange(old), torch.arange(200)])
        memory = memory.rearranged(new, sources, torch.tensor([200] * (number + 1)), coding)
    assert memory.codec == coding.codec
    assert memory.nbytes == coding.nbytes(600, 16)
    assert memory.class_indices.tolist() == [0] * 200 + [1] * 200 + [2] * 200
    assert torch.allclose(memory.rows.norm(dim=1), torch.ones(600), atol=1e-6)
    truth = torch.cat([vectors(200, seed=number) for number in range(3)])
    assert float((memory.rows * truth).sum(1).mean()) > (0.98 if coding == Coding(codec="pq") else 0.999)


def test_a_memory_kept_in_one_way_can_be_kept_in_another_from_now_on() -> None:
    rows, everything = vectors(300), -1 - torch.arange(300)
    memory = FeatureMemory(Coding(codec="pq").encoded(rows), torch.tensor([300]))
    plain = memory.rearranged(rows[:0], everything, memory.counts)
    assert plain.codec == "float32"
    assert torch.equal(plain.rows, memory.rows)
    assert plain.rearranged(rows[:0], everything, memory.counts, Coding(codec="int8")).codec == "int8"
