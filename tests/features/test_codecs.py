"""Codecs: errors, exact bytes, what `take` leaves out, and reading saved vectors."""

from __future__ import annotations

import sys

import faiss
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engram.errors import DataError, TrainingError, UsageError
from engram.features import CODECS, Codec, Encoded, FeatureMemory, Float16, Float32, Int8
from engram.features import ProductQuantisation as PQ
from engram.features.codecs import STRETCH, Quantised, Scaled, budget_options, in_basis, restore_encoded

every_codec = pytest.mark.parametrize("codec", [Float32(), Float16(), Int8(), PQ(codec_bytes=8), PQ()], ids=repr)


def vectors(count: int, dimension: int = 16, seed: int = 0) -> Tensor:
    """Unit vectors with many zeros, like features after a ReLU."""
    draws = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dimension, generator=draws).relu() + 1e-3 * torch.eye(dimension)[0])


def narrow_vectors(count: int, dimension: int = 16, seed: int = 0) -> Tensor:
    """Unit vectors that vary along few directions, which are not those of the dimensions."""
    draws = torch.Generator().manual_seed(seed)
    sizes = 0.5 ** torch.arange(dimension)
    return F.normalize((torch.randn(count, dimension, generator=draws) * sizes) @ narrow_directions(dimension))


def narrow_directions(dimension: int) -> Tensor:
    """The directions of narrow vectors, in rows, the largest first."""
    return torch.linalg.qr(torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(1)))[0]


def quantised(given: Tensor, parts: int, previous: Encoded | None = None) -> Quantised:
    encoded = PQ(codec_bytes=parts).encode(given, previous)
    assert isinstance(encoded, Quantised)
    return encoded


def error(codec: Codec, given: Tensor) -> float:
    """1 − the mean cosine between vectors and their decoded ones."""
    return 1 - float((codec.encode(given).decode().double() * given.double()).sum(1).mean())


# Errors


def test_float32_is_exact() -> None:
    given = torch.randn(20, 8)
    encoded = Float32().encode(given)
    assert encoded.decode() is given
    assert encoded.tensors().keys() == {"rows"}


def test_the_error_of_float16_is_its_rounding() -> None:
    given = vectors(500)
    encoded = Float16().encode(given)
    assert bool(((encoded.approximations() - given).abs() <= given.abs() * 2**-11 + 2**-25).all())


def test_the_error_of_int8_is_at_most_half_a_step() -> None:
    given = vectors(500) * torch.linspace(0.1, 3, 16)  # dimensions of different size
    encoded = Scaled.of(given)
    assert torch.allclose(encoded.steps, (given.amax(0) - given.amin(0)) / 255)
    assert bool(((encoded.approximations() - given).abs() <= encoded.steps / 2 + 1e-6).all())
    assert torch.equal(encoded.approximations()[given == 0], torch.zeros(int((given == 0).sum())))


def test_int8_of_a_constant_dimension_is_exact() -> None:
    given = torch.tensor([[0.6, -0.8], [0.6, 0.8], [0.6, 0.8]])
    assert torch.allclose(Scaled.of(given).approximations(), given)


def test_product_quantisation_decodes_as_faiss_does() -> None:
    given = vectors(1000)
    encoded = quantised(given, 8)
    quantiser = faiss.ProductQuantizer(16, 8, 8)
    faiss.copy_array_to_vector(encoded.codebook.float().flatten().numpy(), quantiser.centroids)
    assert encoded.rotation is not None
    assert np.array_equal(quantiser.compute_codes(in_basis(given, encoded.rotation).numpy()), encoded.codes.numpy())
    decoded = torch.from_numpy(quantiser.decode(encoded.codes.numpy()))
    assert torch.allclose(decoded @ encoded.rotation.float().T, encoded.approximations(), atol=1e-6)


def test_vectors_along_few_directions_are_rotated_and_the_error_is_below_that_of_faiss() -> None:
    given = narrow_vectors(2000)
    encoded = quantised(given, 4)
    assert encoded.rotation is not None
    lengths = encoded.rotation.float().norm(dim=0)
    turn = encoded.rotation.float() / lengths
    assert torch.allclose(turn.T @ turn, torch.eye(16), atol=5e-3)  # float16
    assert torch.allclose(lengths, (given @ turn).square().mean(0).pow(STRETCH / 2), atol=1e-2)
    quantiser = faiss.ProductQuantizer(16, 4, 8)
    quantiser.cp.min_points_per_centroid = 1
    quantiser.train(given.numpy())
    theirs = torch.from_numpy(quantiser.decode(quantiser.compute_codes(given.numpy())))
    assert (encoded.approximations() - given).square().sum() < 0.5 * (theirs - given).square().sum()


def test_the_error_is_about_that_of_the_optimised_rotation_of_faiss() -> None:
    given = narrow_vectors(1000)
    optimised = faiss.OPQMatrix(16, 4)
    quantiser = faiss.ProductQuantizer(16, 4, 8)
    quantiser.cp.min_points_per_centroid = 1
    optimised.train(given.numpy())
    turned = optimised.apply(given.numpy())
    quantiser.train(turned)
    theirs = torch.from_numpy(quantiser.decode(quantiser.compute_codes(turned)) - turned)
    assert (quantised(given, 4).approximations() - given).square().sum() < 1.1 * theirs.square().sum()


def test_vectors_with_many_zeros_are_not_rotated() -> None:
    rotation = quantised(vectors(1000), 8).rotation
    assert rotation is not None and torch.equal(rotation, rotation.diag().diag())  # stretched, and not turned


def test_small_directions_have_smaller_errors_than_without_stretching() -> None:
    given = narrow_vectors(8000, 4)
    errors = (quantised(given, 2).approximations() - given) @ narrow_directions(4).T
    shares = errors.square().mean(0) / (given @ narrow_directions(4).T).square().mean(0)
    plain = faiss.ProductQuantizer(4, 2, 8)
    turned = (given @ narrow_directions(4).T)[:, [0, 3, 1, 2]].contiguous()
    plain.train(turned.numpy())
    plainly = torch.from_numpy(plain.decode(plain.compute_codes(turned.numpy()))) - turned
    assert shares[3] < 0.9 * plainly.square().mean(0)[1] / turned[:, 1].square().mean()


def test_the_error_is_not_above_that_of_the_k_means_of_faiss() -> None:
    given = vectors(2000)
    for parts in (8, 4):
        quantiser = faiss.ProductQuantizer(16, parts, 8)
        quantiser.cp.min_points_per_centroid = 1
        quantiser.train(given.numpy())
        theirs = torch.from_numpy(quantiser.decode(quantiser.compute_codes(given.numpy())))
        ours = quantised(given, parts).approximations()
        assert (ours - given).square().sum() <= 1.02 * (theirs - given).square().sum()


def test_more_bytes_mean_smaller_errors() -> None:
    given = vectors(1000)
    off = [error(PQ(codec_bytes=count), given) for count in (2, 4, 16)]
    assert off == sorted(off, reverse=True)
    assert off[0] < 0.1
    assert off[-1] < 1e-4
    assert error(Int8(), given) < 2e-5
    assert abs(error(Float16(), given)) < 1e-6


@every_codec
@pytest.mark.parametrize("count", [1, 3, 256, 257])
def test_decoded_vectors_have_unit_length_and_few_are_nearly_exact(codec: Codec, count: int) -> None:
    given = vectors(count)
    decoded = codec.encode(given).decode()
    assert decoded.dtype == torch.float32
    assert torch.allclose(decoded.norm(dim=1), torch.ones(count), atol=1e-6)
    assert float((decoded * given).sum(1).min()) > 0.999


@every_codec
def test_the_same_vectors_give_the_same_codes(codec: Codec) -> None:
    first, second = (codec.encode(vectors(600)).tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_identical_vectors_are_exact() -> None:
    given = vectors(3).repeat(200, 1)
    assert abs(error(PQ(), given)) < 1e-6


def test_encoding_again_adds_hardly_any_error() -> None:
    for codec, most in (
        (Float16(), 1e-9),
        (Int8(), 1e-9),
        (PQ(), 1e-5),
    ):
        for given in (vectors(800), narrow_vectors(800)):
            once = codec.encode(given)
            again = once
            for _ in range(5):
                again = codec.encode(again.approximations(), again)
            assert 1 - float((once.decode().double() * again.decode().double()).sum(1).mean()) < max(most, 1e-7)


# Bytes


@every_codec
@pytest.mark.parametrize("count", [1, 3, 255, 256, 257, 700])
def test_bytes_are_predicted_exactly(codec: Codec, count: int) -> None:
    encoded = codec.encode(vectors(count))
    assert encoded.nbytes == sum(tensor.nbytes for tensor in encoded.tensors().values())
    assert encoded.nbytes == codec.nbytes(count, 16)
    half = torch.arange(0, count, 2)
    assert encoded.take(half).nbytes == codec.nbytes(len(half), 16)


def test_bytes_by_hand() -> None:
    assert Float32().nbytes(1000, 64) == 256_000
    assert Float16().nbytes(1000, 64) == 128_000
    assert Int8().nbytes(1000, 64) == 64_000 + 2 * 64 * 4
    assert PQ().nbytes(1000, 64) == 16_000 + 256 * 64 * 2 + 64 * 64 * 2
    assert PQ(codec_bytes=32).nbytes(1000, 64) == 32_000 + 256 * 64 * 2 + 64 * 64 * 2
    assert PQ().nbytes(3, 64) == 3 * 16 + 3 * 64 * 2


def test_the_number_of_parts_divides_the_dimension() -> None:
    assert [PQ().parts(dimension) for dimension in (64, 512, 15, 7, 1)] == [16, 128, 3, 1, 1]
    assert PQ(codec_bytes=32).parts(64) == 32
    for asked, nearest in ((24, "16 or 32"), (100, "64")):
        with pytest.raises(UsageError, match=rf"64 numbers.* {asked} .*codec_bytes to {nearest}\."):
            PQ(codec_bytes=asked).nbytes(10, 64)


# Some of the vectors


@every_codec
@pytest.mark.parametrize("count", [5, 700])
def test_take_leaves_vectors_as_they_were(codec: Codec, count: int) -> None:
    encoded = codec.encode(vectors(count))
    some = torch.arange(0, count, 3).flip(0)
    chosen = encoded.take(some)
    assert chosen.codec == encoded.codec
    assert len(chosen) == len(some)
    # The range of int8 may shrink: half a step, and then the length; few vectors have no rotation: half precision.
    tolerance = {"int8": 3e-3, "pq": 1e-3}.get(codec.name, 0)
    assert torch.allclose(chosen.decode(), encoded.decode()[some], atol=tolerance, rtol=0)


def test_take_leaves_nothing_of_the_other_vectors() -> None:
    odd = torch.zeros(1, 16)
    odd[0, 5] = -1.0  # the only one that is negative
    given = torch.cat([vectors(400), odd])
    for codec in (Int8(), PQ()):
        encoded = codec.encode(given)
        lowest = [
            min(float(tensor.float().min()) for tensor in each.tensors().values())
            for each in (encoded, encoded.take(torch.arange(400)))
        ]
        assert lowest[0] < -0.99
        assert lowest[1] > -0.01


def test_take_leaves_rotated_vectors_as_they_were() -> None:
    encoded = quantised(narrow_vectors(1000), 8)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    for count, tolerance in ((1000, 0), (700, 0), (100, 1e-3)):  # so few vectors have no rotation: half precision
        chosen = encoded.take(order[:count])
        assert torch.allclose(chosen.decode(), encoded.decode()[order[:count]], atol=tolerance, rtol=0)
        assert chosen.nbytes == PQ(codec_bytes=8).nbytes(count, 16)


def test_vectors_without_a_rotation_are_read() -> None:
    given = vectors(300)
    encoded = quantised(given[:256], 8)  # as many as there are centroids
    assert encoded.rotation is None
    read = restore_encoded({"codes": encoded.codes, "codebook": encoded.codebook})
    assert torch.equal(read.approximations(), encoded.approximations())
    again = quantised(torch.cat([read.approximations(), given[256:]]), 8, read)
    assert torch.allclose(again.approximations(), given, atol=0.05)


def test_vectors_without_stretching_are_read_and_hardly_change() -> None:
    given = narrow_vectors(1000)
    turn = narrow_directions(16).T.half()  # orthonormal, as all rotations were
    quantiser = faiss.ProductQuantizer(16, 4, 8)
    quantiser.train((given @ turn.float()).numpy())
    centroids = torch.from_numpy(faiss.vector_to_array(quantiser.centroids)).reshape(4, 256, 4)
    codes = torch.from_numpy(quantiser.compute_codes((given @ turn.float()).numpy()))
    read = restore_encoded({"codes": codes, "codebook": centroids.half(), "rotation": turn})
    assert (read.approximations() - given).square().sum(1).mean() < 0.05
    again = quantised(read.approximations(), 4, read)
    assert torch.allclose(again.approximations(), read.approximations(), atol=2e-3)


@every_codec
def test_saved_vectors_are_restored(codec: Codec) -> None:
    encoded = codec.encode(vectors(300))
    again = restore_encoded(encoded.tensors())
    assert again.codec == codec.name
    assert torch.equal(again.decode(), encoded.decode())


def test_tensors_of_an_unknown_codec_are_refused() -> None:
    with pytest.raises(DataError, match="codes, signs"):
        restore_encoded({"codes": torch.zeros(1), "signs": torch.zeros(1)})


# Refusals


def test_vectors_that_are_not_finite_are_refused() -> None:
    given = vectors(3)
    given[1, 1] = torch.nan
    for codec in (Float32(), Float16(), Int8(), PQ()):
        with pytest.raises(TrainingError, match="NaN"):
            codec.encode(given)


def test_only_quantising_needs_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = PQ().encode(vectors(300))
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert len(encoded.take(torch.arange(280)).decode()) == 280
    Int8().check_installed()
    for refused in (PQ().check_installed, lambda: PQ().encode(vectors(300))):
        with pytest.raises(UsageError, match=r"faiss-cpu.*compress"):
            refused()


# In a memory


@every_codec
def test_the_rows_of_a_memory_are_encoded_together(codec: Codec) -> None:
    memory = FeatureMemory.empty(16)
    for number in range(3):
        old, new = len(memory), vectors(200, seed=number)
        sources = torch.cat([-1 - torch.arange(old), torch.arange(200)])
        memory = memory.rearranged(new, sources, torch.tensor([200] * (number + 1)), codec)
    assert memory.codec == codec.name
    assert memory.nbytes == codec.nbytes(600, 16)
    assert memory.class_indices.tolist() == [0] * 200 + [1] * 200 + [2] * 200
    assert torch.allclose(memory.rows.norm(dim=1), torch.ones(600), atol=1e-6)
    truth = torch.cat([vectors(200, seed=number) for number in range(3)])
    assert float((memory.rows * truth).sum(1).mean()) > (0.98 if codec == PQ() else 0.999)


def test_the_codec_of_a_memory_can_change() -> None:
    rows, everything = vectors(300), -1 - torch.arange(300)
    memory = FeatureMemory(PQ().encode(rows), torch.tensor([300]))
    plain = memory.rearranged(rows[:0], everything, memory.counts)
    assert plain.codec == "float32"
    assert torch.equal(plain.rows, memory.rows)
    assert plain.rearranged(rows[:0], everything, memory.counts, Int8()).codec == "int8"


# What a budget may choose


def test_a_budget_may_choose_int8_or_with_faiss_product_quantisation(monkeypatch: pytest.MonkeyPatch) -> None:
    options = list(budget_options(64))
    assert [option.codec for option in options] == [Int8(), *(PQ(codec_bytes=count) for count in (32, 16, 8))]
    assert [round(option.worth * 100) for option in options] == [100, 100, 90, 55]
    assert [round(option.most) for option in options] == [250, 250, 225, 90]
    assert [option.codec for option in budget_options(6)] == [Int8(), PQ(codec_bytes=3)]
    monkeypatch.setattr("engram.features.codecs.find_spec", lambda name: None)
    assert [option.codec for option in budget_options(64)] == [Int8()]


def test_without_a_budget_auto_is_int8() -> None:
    encoded = CODECS["auto"]().encode(vectors(20))
    assert encoded.codec == "int8" and encoded.nbytes == Int8().nbytes(20, 16)
