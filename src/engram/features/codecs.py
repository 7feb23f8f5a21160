"""Codecs: unit vectors (n, d) in few bytes.

Encoded vectors are tensors alone, and the names and types of the tensors tell the codec. So saved vectors can be
decoded whatever the settings are now, and only encoding by product quantisation needs faiss. To add a codec, subclass
`Codec` as a dataclass whose fields are its settings, subclass `Encoded`, and enter the codec in `CODECS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Self

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.errors import DataError, TrainingError, UsageError, not_installed
from engram.network import parallel
from engram.randomness import generator

LEVELS = 255  # steps between the lowest and the highest number that a byte can represent
ENOUGH = 250  # exact vectors of a class; more add little

# Product quantisation
CENTROIDS = 256  # of each part: as many as a byte can index
ITERATIONS = 25  # of k-means
MOST_VECTORS = 2**16  # from which centroids are computed
TRIAL_ITERATIONS, TRIAL_VECTORS = 5, 2**12  # of k-means, to choose the basis
SMALLEST = 1e-9  # mean square of a direction, relative to the largest
# s: errors are weighted by the mean square of their direction to the power of −s (docs/findings.md, Bytes)
STRETCH = 0.25


class Encoded(ABC):
    """Unit vectors (n, d) as they are stored. The fields are tensors; the first has one row for each vector."""

    @property
    @abstractmethod
    def codec(self) -> str:
        """The name of the codec."""

    @abstractmethod
    def approximations(self) -> Tensor:
        """The vectors that the codes stand for, float32 (n, d), not normalised: encoding them again loses least."""

    def decode(self) -> Tensor:
        """The vectors, float32 (n, d), of unit length."""
        return F.normalize(self.approximations())

    @abstractmethod
    def take(self, rows: Tensor) -> Self:
        """The vectors in these rows (k,), with only as much of the shared tensors as they need."""

    def refitted(self) -> Encoded:
        """The same vectors, their shared tensors computed from them alone."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        everything = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: tensor for name, tensor in everything.items() if tensor is not None}

    def __len__(self) -> int:
        return len(next(iter(self.tensors().values())))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def row_bytes(self) -> int:
        """The bytes of one vector, without what all of them share."""
        return next(iter(self.tensors().values()))[:1].nbytes


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """How vectors are encoded; its fields are settings."""

    name: ClassVar[str]  # its key in CODECS; `auto` has that of the codec that it stands for
    encoded: ClassVar[type[Encoded]]

    def check_installed(self) -> None:  # noqa: B027 (most codecs need nothing)
        """Raise a UsageError if a package is missing that encoding needs."""

    def encode(self, vectors: Tensor, previous: Encoded | None = None) -> Encoded:
        """Encode unit vectors, float32 (n, d); `previous` is how some of them were encoded before."""
        if not bool(vectors.isfinite().all()):  # codes are always finite, so nobody would notice later
            raise TrainingError("The vectors to store contain NaN or infinity. The task was not committed.")
        return self._encode(vectors, previous)

    @abstractmethod
    def _encode(self, vectors: Tensor, previous: Encoded | None) -> Encoded:
        """Encode finite vectors."""

    @abstractmethod
    def nbytes(self, count: int, dimension: int) -> int:
        """The exact bytes of `count` vectors of `dimension` numbers, including all that they share."""

    def resolved_settings(self, dimension: int) -> dict[str, Any]:
        """The values that automatic settings stand for with vectors of this dimension."""
        return {"codec": self.name}


@dataclass(frozen=True, eq=False)
class Plain(Encoded):
    """Floating-point numbers."""

    rows: Tensor  # float32 or float16 (n, d)

    @property
    def codec(self) -> str:
        return "float16" if self.rows.dtype == torch.float16 else "float32"

    def approximations(self) -> Tensor:
        return self.rows.float()

    def decode(self) -> Tensor:
        return self.rows if self.codec == "float32" else super().decode()

    def take(self, rows: Tensor) -> Self:
        return type(self)(self.rows[rows])


@dataclass(frozen=True, kw_only=True)
class Float32(Codec):
    """Exactly as they are, 4 bytes a number: the paper's."""

    name: ClassVar = "float32"
    encoded: ClassVar = Plain
    dtype: ClassVar = torch.float32

    def _encode(self, vectors: Tensor, previous: Encoded | None) -> Encoded:
        return Plain(vectors.to(self.dtype))

    def nbytes(self, count: int, dimension: int) -> int:
        return count * dimension * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Float16(Float32):
    """2 bytes a number."""

    name: ClassVar = "float16"
    dtype: ClassVar = torch.float16


@dataclass(frozen=True, eq=False)
class Scaled(Encoded):
    """A byte a number: one of 256 values, evenly spaced from the lowest to the highest of its dimension.

    Features that end in a ReLU are never negative, so a range of its own for each dimension saves a bit.
    """

    codes: Tensor  # uint8 (n, d)
    lowest: Tensor  # float32 (d,)
    steps: Tensor  # float32 (d,): from one value to the next

    @classmethod
    def of(cls, vectors: Tensor) -> Self:
        """Encode vectors (n, d); every number is off by at most half a step."""
        lowest, highest = vectors.aminmax(dim=0) if len(vectors) else (vectors.new_zeros(vectors.shape[1]),) * 2
        steps = (highest - lowest) / LEVELS
        levels = (vectors - lowest) / torch.where(steps > 0, steps, 1)
        return cls(levels.round().clamp(0, LEVELS).to(torch.uint8), lowest, steps)

    @property
    def codec(self) -> str:
        return "int8"

    def approximations(self) -> Tensor:
        return torch.addcmul(self.lowest, self.codes.float(), self.steps)

    def take(self, rows: Tensor) -> Self:
        return type(self).of(self.approximations()[rows])  # the range may come from a vector that is not among them


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """A byte a number."""

    name: ClassVar = "int8"
    encoded: ClassVar = Scaled

    def _encode(self, vectors: Tensor, previous: Encoded | None) -> Encoded:
        return Scaled.of(vectors)

    def nbytes(self, count: int, dimension: int) -> int:
        return count * dimension + 2 * dimension * 4


@dataclass(frozen=True, eq=False)
class Quantised(Encoded):
    """A byte a part: the index of one of up to 256 centroids."""

    codes: Tensor  # uint8 (n, m)
    codebook: Tensor  # float16 (m, min(256, n), d / m): its rounding is negligible beside the distance to a centroid
    # float16 (d, d): orthogonal columns, each as long as its direction is stretched. Up to 256 vectors have none.
    rotation: Tensor | None = None

    @property
    def codec(self) -> str:
        return "pq"

    def approximations(self) -> Tensor:
        parts = self.codebook.float()[torch.arange(len(self.codebook)), self.codes.long()]  # (n, m, d / m)
        return parts.flatten(1) if self.rotation is None else parts.flatten(1) @ self.rotation.float().T

    def take(self, rows: Tensor) -> Self:
        """The same vectors exactly, or to half precision if at most 256 are left; unused centroids are removed."""
        if self.rotation is not None and len(rows) <= CENTROIDS:
            return type(self)(*own_centroids(self.approximations()[rows], self.codes.shape[1]))
        codes, centroids = self.codes[rows], min(CENTROIDS, len(rows))
        codebook = self.codebook.new_zeros(len(self.codebook), centroids, self.codebook.shape[2])
        renumbered = torch.empty_like(codes)
        for part in range(len(codebook)):
            used, places = codes[:, part].long().unique(return_inverse=True)
            codebook[part, : len(used)] = self.codebook[part, used]
            renumbered[:, part] = places.to(torch.uint8)
        return type(self)(renumbered, codebook, self.rotation)

    def refitted(self) -> Encoded:
        if self.rotation is None:  # each has centroids of its own
            return self
        return ProductQuantisation(codec_bytes=self.codes.shape[1]).encode(self.approximations())


@dataclass(frozen=True, kw_only=True)
class ProductQuantisation(Codec):
    """Product quantisation: a byte for each part of a vector (Jégou et al., 2011).

    Vectors are rotated first, so that all parts carry about as much information, and stretched: small directions
    separate classes as well as large ones, and if all errors counted the same, no bytes would be spent on them.
    """

    name: ClassVar = "pq"
    encoded: ClassVar = Quantised

    codec_bytes: PositiveInt | None = None  # of a vector, its number of parts; None: d / 4, which is 1/16 of float32

    def check_installed(self) -> None:
        import_faiss()

    def parts(self, dimension: int) -> int:
        """The number of equal parts that a vector is split into, one byte each."""
        possible = [parts for parts in range(1, dimension + 1) if dimension % parts == 0]
        if self.codec_bytes is None:
            return max((parts for parts in possible if parts <= dimension / 4), default=1)
        if self.codec_bytes in possible:
            return self.codec_bytes
        below = [parts for parts in possible if parts < self.codec_bytes]
        above = [parts for parts in possible if parts > self.codec_bytes]
        raise UsageError(
            f"Vectors of {dimension} numbers cannot be split into {self.codec_bytes} equal parts of a byte each. "
            f"Set codec_bytes to {' or '.join(map(str, (*below[-1:], *above[:1])))}."
        )

    def _encode(self, vectors: Tensor, previous: Encoded | None) -> Encoded:
        parts = self.parts(vectors.shape[1])
        if len(vectors) <= CENTROIDS:
            return Quantised(*own_centroids(vectors, parts))
        start = None
        if isinstance(previous, Quantised) and previous.rotation is not None and previous.codes.shape[1] == parts:
            start = previous.rotation, previous.codebook
        return Quantised(*parallel.broadcast(lambda: quantise(vectors, parts, start)))

    def nbytes(self, count: int, dimension: int) -> int:
        shared = CENTROIDS + dimension if count > CENTROIDS else count  # rows of the codebook and of the rotation
        return count * self.parts(dimension) + shared * dimension * 2

    def resolved_settings(self, dimension: int) -> dict[str, Any]:
        return {"codec": self.name, "codec_bytes": self.parts(dimension)}


@dataclass(frozen=True, kw_only=True)
class AutoCodec(Int8):
    """What a memory budget chooses; int8 without one."""


CODECS: dict[str, type[Codec]] = {
    "float32": Float32,
    "float16": Float16,
    "int8": Int8,
    "pq": ProductQuantisation,
    "auto": AutoCodec,
}


class BudgetOption(NamedTuple):
    """A codec that a memory budget may choose, and what its vectors are worth (measured: docs/findings.md, Bytes)."""

    codec: Codec
    worth: float  # of one vector, in exact vectors
    most: float  # worth of any number of vectors of a class, in exact vectors


def budget_options(dimension: int) -> Iterator[BudgetOption]:
    """The codecs among which a memory budget chooses for vectors of this dimension."""
    yield BudgetOption(Int8(), 1.0, ENOUGH)
    # With d / 8 bytes every adaptation loses precision, so any number of vectors is worth only some exact ones.
    for share, worth, most in ((2, 1.0, 1.0), (4, 0.9, 0.9), (8, 0.55, 0.36)) if find_spec("faiss") else ():
        if dimension % share == 0:
            yield BudgetOption(ProductQuantisation(codec_bytes=dimension // share), worth, most * ENOUGH)


def restore_encoded(tensors: Mapping[str, Tensor]) -> Encoded:
    """The encoded vectors whose `tensors()` these are."""
    for kind in dict.fromkeys(codec.encoded for codec in CODECS.values()):
        names = {field.name: field.default is MISSING for field in fields(kind)}  # type: ignore[arg-type]
        if {name for name, required in names.items() if required} <= tensors.keys() <= names.keys():
            return kind(**tensors)
    raise DataError(f"This engram has no codec that stores vectors as {', '.join(sorted(tensors))}.")


# Codebooks of product quantisation: rotation, stretching and k-means (Jégou et al., 2011; Ge et al., 2013)


def in_basis(vectors: Tensor, basis: Tensor) -> Tensor:
    """The coordinates (n, d) of vectors (n, d) in the basis given by the columns of `basis` (d, d)."""
    inverse: Tensor = torch.linalg.inv(basis.float())
    return vectors @ inverse.T


def own_centroids(vectors: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Codes (n, m) and a codebook (m, n, d / m) in which every vector has centroids of its own: n <= 256."""
    count, dimension = vectors.shape
    codebook = vectors.reshape(count, parts, dimension // parts).transpose(0, 1)  # (m, n, d / m)
    codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, parts)
    return codes.contiguous(), codebook.half().contiguous()


def quantise(
    vectors: Tensor, parts: int, previous: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, codebook and rotation in the best of three bases: principal directions, the dimensions, the previous one.

    Vectors with many zeros are best in their own dimensions: rotated, they have no zeros. From the `previous` rotation
    and codebook, vectors that have not changed are encoded almost as before.
    """
    some, few = _spread(vectors, MOST_VECTORS), _spread(vectors, TRIAL_VECTORS)
    sizes, directions = torch.linalg.eigh(some.T.double() @ some.double() / len(some))  # (d,), (d, d)
    sizes, own_sizes = _positive(sizes), _positive(some.double().square().mean(dim=0))
    order = _balanced_order(sizes, parts)
    bases: list[tuple[Tensor, Tensor | None]] = [
        ((directions * sizes.pow(STRETCH / 2))[:, order].half(), None),
        (own_sizes.pow(STRETCH / 2).diag().half(), None),
    ]
    if previous is not None:
        bases.append(previous)
    weights = (directions * sizes.pow(-STRETCH / 2)).float()  # (d, d): of errors
    basis, start = min(bases, key=lambda each: _distortion(few, parts, each[0], each[1], weights))
    codebook = _k_means(in_basis(some, basis), parts, ITERATIONS, start).half()
    return _nearest(codebook.float(), in_basis(vectors, basis)), codebook, basis


def _spread(vectors: Tensor, most: int) -> Tensor:
    return vectors[:: -(-len(vectors) // most)]


def _positive(sizes: Tensor) -> Tensor:
    return sizes.clamp(min=SMALLEST * float(sizes.max()))


def _balanced_order(sizes: Tensor, parts: int) -> list[int]:
    """An order of directions with mean squares `sizes` (d,) in which all parts carry about as much information.

    Features vary along few directions: in any other order, many bytes say next to nothing (Ge et al., 2013, §3.2).
    """
    information, length = (sizes / sizes.min()).log(), len(sizes) // parts
    groups: list[list[int]] = [[] for _ in range(parts)]
    for direction in sizes.argsort(descending=True).tolist():  # each to the part that has the least so far
        unfilled = [group for group in groups if len(group) < length]
        min(unfilled, key=lambda group: float(information[group].sum())).append(direction)
    return [direction for group in groups for direction in group]


def _distortion(vectors: Tensor, parts: int, basis: Tensor, start: Tensor | None, weights: Tensor) -> float:
    """The squared error of vectors (n, d) after a few steps of k-means, weighted by `weights` (d, d)."""
    turned = in_basis(vectors, basis)
    centroids = _k_means(turned, parts, TRIAL_ITERATIONS, start)
    nearest = centroids[torch.arange(parts), _nearest(centroids, turned).long()]  # (n, m, d / m)
    return float(((turned - nearest.flatten(1)) @ basis.float().T @ weights).square().sum())


def _k_means(vectors: Tensor, parts: int, iterations: int, start: Tensor | None) -> Tensor:
    """Centroids of all parts, (m, 256, d / m), from `start` or from some of the vectors (n, d).

    faiss finds the nearest centroids, which is the costly part. Its own k-means takes eight times as long and ends with
    larger errors on vectors with many zeros: it replaces an unused centroid by half of another, and we by the vector
    with the largest error.
    """
    split = vectors.reshape(len(vectors), parts, -1)  # (n, m, d / m)
    first = torch.randperm(len(vectors), generator=generator(0, "codebook"))[:CENTROIDS]
    centroids = split[first].transpose(0, 1) if start is None else start.float()
    for _ in range(iterations):
        centroids = _improved(centroids, split, _nearest(centroids, vectors).long())
    return centroids


def _nearest(centroids: Tensor, vectors: Tensor) -> Tensor:
    """The index of the nearest centroid (m, 256, d / m) to each part of vectors (n, d): uint8 (n, m)."""
    parts, _, length = centroids.shape
    faiss = import_faiss()
    quantiser = faiss.ProductQuantizer(parts * length, parts, 8)
    faiss.copy_array_to_vector(centroids.flatten().numpy(), quantiser.centroids)
    return torch.from_numpy(quantiser.compute_codes(vectors.numpy()))


def _improved(centroids: Tensor, split: Tensor, codes: Tensor) -> Tensor:
    """The mean of the parts (n, m, d / m) that are nearest to each centroid (m, 256, d / m)."""
    parts, _, length = centroids.shape
    places = (codes + CENTROIDS * torch.arange(parts)).flatten()  # (n m,): of each part's centroid among all
    sums = torch.zeros(parts * CENTROIDS, length, dtype=torch.float64)
    sums.index_add_(0, places, split.reshape(-1, length).double())
    counts = torch.bincount(places, minlength=parts * CENTROIDS)
    means = (sums / counts.clamp(min=1)[:, None]).float().reshape_as(centroids)
    unused = (counts == 0).reshape(parts, CENTROIDS)
    for part in unused.any(dim=1).nonzero().squeeze(1).tolist():
        errors = (split[:, part] - means[part, codes[:, part]]).square().sum(dim=1)  # (n,)
        idle = unused[part].nonzero().squeeze(1)
        means[part, idle] = split[errors.argsort(descending=True, stable=True)[: len(idle)], part]
    return means


def import_faiss() -> Any:
    """The package faiss, or an error that says how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise not_installed("To store vectors by product quantisation (the codec pq), faiss-cpu", "compress") from error
    return faiss
