"""Codecs: how unit vectors (n, d) are kept in few bytes.

What is kept is tensors alone, which tell by their names and types what they are: so vectors that were saved are read
whatever the settings have become, and all but learning anew by product quantisation is done without faiss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Literal, Self

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.errors import DataError, TrainingError, UsageError
from engram.features.codebooks import CENTROIDS, Turned, check_installed, codebook_and_codes

LEVELS = 255  # steps between the lowest and the highest number that a byte tells apart

Codec = Literal["float32", "float16", "int8", "pq"]


class Coded(ABC):
    """Unit vectors (n, d) as they are kept: the fields are tensors, and of the first each vector has its row."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """The name of how they are kept."""

    @abstractmethod
    def numbers(self) -> Tensor:
        """What the codes stand for, float32 (n, d): vectors of almost unit length. Encoded again, it loses least."""

    def decoded(self) -> Tensor:
        """The vectors, float32 (n, d), of unit length."""
        return self.numbers() if self.codec == "float32" else F.normalize(self.numbers())

    @abstractmethod
    def chosen(self, rows: Tensor) -> Self:
        """The vectors in these rows (k,), and nothing that only others have led to."""

    def tensors(self) -> dict[str, Tensor]:
        """All that is kept, by name."""
        everything = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: tensor for name, tensor in everything.items() if tensor is not None}

    def __len__(self) -> int:
        return len(self._own)

    @property
    def nbytes(self) -> int:
        """The bytes of all that is kept."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def row_bytes(self) -> int:
        """The bytes of one vector, without what all of them share."""
        return self._own[:1].nbytes

    @property
    def _own(self) -> Tensor:
        return next(iter(self.tensors().values()))


@dataclass(frozen=True, eq=False)
class Plain(Coded):
    """As numbers: float32, exactly as they are given, or float16."""

    rows: Tensor  # float32 or float16 (n, d)

    @property
    def codec(self) -> Codec:
        return "float16" if self.rows.dtype == torch.float16 else "float32"

    def numbers(self) -> Tensor:
        return self.rows.float() if self.codec == "float16" else self.rows

    def chosen(self, rows: Tensor) -> Self:
        return type(self)(self.rows[rows])


@dataclass(frozen=True, eq=False)
class Scaled(Coded):
    """A byte a number: which of 256 values, evenly from the lowest to the highest of its dimension.

    Features that end in a ReLU are never negative, so a range of their own is worth a bit beside one around zero.
    """

    codes: Tensor  # uint8 (n, d)
    lowest: Tensor  # float32 (d,)
    steps: Tensor  # float32 (d,): from one value to the next

    @classmethod
    def of(cls, vectors: Tensor) -> Self:
        """Vectors (n, d), each number off by half a step at the most."""
        lowest, highest = vectors.aminmax(dim=0) if len(vectors) else (vectors.new_zeros(vectors.shape[1]),) * 2
        steps = (highest - lowest) / LEVELS
        levels = (vectors - lowest) / torch.where(steps > 0, steps, 1)
        return cls(levels.round().clamp(0, LEVELS).to(torch.uint8), lowest, steps)

    @property
    def codec(self) -> Codec:
        return "int8"

    def numbers(self) -> Tensor:
        return torch.addcmul(self.lowest, self.codes.float(), self.steps)

    def chosen(self, rows: Tensor) -> Self:
        return type(self).of(self.numbers()[rows])  # a range may have come from a vector that is not among them


@dataclass(frozen=True, eq=False)
class Product(Coded):
    """Product quantisation: a byte a sub-vector says which of up to 256 centroids it is near (Jégou et al., 2011).

    Vectors are turned and stretched first, so that every sub-vector has about as much to tell, and of small directions
    something is left; few are kept as they are.
    """

    codes: Tensor  # uint8 (n, m)
    codebook: Tensor  # float16 (m, min(256, n), d / m): its rounding is nothing beside the distance to a centroid
    rotation: Tensor | None = (
        None  # float16 (d, d): its columns are orthogonal, and as long as directions are stretched
    )

    @classmethod
    def of(cls, vectors: Tensor, bytes_each: int, before: Coded | None = None) -> Self:
        """Vectors (n, d) in so many bytes each, by a rotation and centroids that are found for them.

        `before` is how some of them were kept: those that have not moved since stay where they were, or nearly.
        """
        turned = before._turned if isinstance(before, Product) and before.codes.shape[1] == bytes_each else None
        codebook, codes, rotation = codebook_and_codes(vectors, bytes_each, turned)
        return cls(codes, codebook, rotation)

    @property
    def _turned(self) -> Turned | None:
        return None if self.rotation is None else (self.rotation, self.codebook)

    @property
    def codec(self) -> Codec:
        return "pq"

    def numbers(self) -> Tensor:
        parts = self.codebook.float()[torch.arange(len(self.codebook)), self.codes.long()]  # (n, m, d / m)
        return parts.flatten(1) if self.rotation is None else parts.flatten(1) @ self.rotation.float().T

    def chosen(self, rows: Tensor) -> Self:
        """The same vectors to the last bit, or to half precision where few are left; centroids of none are gone."""
        if self.rotation is not None and len(rows) <= CENTROIDS:
            return type(self).of(self.numbers()[rows], self.codes.shape[1])
        codes, centroids = self.codes[rows], min(CENTROIDS, len(rows))
        codebook = self.codebook.new_zeros(len(self.codebook), centroids, self.codebook.shape[2])
        renumbered = torch.empty_like(codes)
        for part in range(len(codebook)):
            used, places = codes[:, part].long().unique(return_inverse=True)
            codebook[part, : len(used)] = self.codebook[part, used]
            renumbered[:, part] = places.to(torch.uint8)
        return type(self)(renumbered, codebook, self.rotation)


KINDS: tuple[type[Plain] | type[Scaled] | type[Product], ...] = (Plain, Scaled, Product)


def coded(tensors: Mapping[str, Tensor]) -> Coded:
    """Vectors as they were kept, from what their `tensors()` gave."""
    for kind in KINDS:
        needed = {field.name for field in fields(kind) if field.default is MISSING}
        if needed <= tensors.keys() <= {field.name for field in fields(kind)}:
            return kind(**tensors)
    raise DataError(f"The stored vectors are kept in a way this engram does not know, as {', '.join(sorted(tensors))}.")


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How stored vectors are kept. The paper keeps float32."""

    # In 1/2: float16; in 1/4: int8, a byte a number; pq: product quantisation; auto: a budget's choice, else int8.
    codec: Codec | Literal["auto"] = "float32"
    codec_bytes: PositiveInt | None = None  # of pq, a vector; None: d / 4, which is 1/16 of float32

    def __post_init__(self) -> None:
        if self.codec_bytes is not None and self.codec != "pq":
            raise UsageError(
                f"codec_bytes is for the codec pq, and the codec is {self.codec}. Leave it out, or set it to none."
            )

    @property
    def used(self) -> Codec:
        """The codec, where none is left open."""
        return "int8" if self.codec == "auto" else self.codec

    def check(self) -> None:
        """Refuse, before anything is learned, what cannot be kept here."""
        if self.codec == "pq":
            check_installed()

    def encoded(self, vectors: Tensor, before: Coded | None = None) -> Coded:
        """Unit vectors, float32 (n, d), as they are kept from now on; `before` is how some of them were kept."""
        if self.used == "float32":
            return Plain(vectors)
        if not bool(vectors.isfinite().all()):  # no code is not finite, so nobody would notice later
            raise TrainingError("The vectors to keep are not finite. Nothing of this task was kept.")
        if self.used == "float16":
            return Plain(vectors.half())
        if self.used == "int8":
            return Scaled.of(vectors)
        return Product.of(vectors, product_bytes(vectors.shape[1], self.codec_bytes), before)

    def nbytes(self, count: int, dimension: int) -> int:
        """The bytes that so many vectors of so many numbers take."""
        return nbytes(self.used, count, dimension, self.codec_bytes)


def nbytes(codec: Codec, count: int, dimension: int, codec_bytes: int | None = None) -> int:
    """The bytes that `count` vectors of `dimension` numbers take, all that they share included: exactly."""
    if codec == "pq":
        shared = CENTROIDS + dimension if count > CENTROIDS else count  # rows: of the codebook, and of the rotation
        return count * product_bytes(dimension, codec_bytes) + shared * dimension * 2
    return {
        "float32": count * dimension * 4,
        "float16": count * dimension * 2,
        "int8": count * dimension + 2 * dimension * 4,
    }[codec]


def product_bytes(dimension: int, codec_bytes: int | None) -> int:
    """How many bytes product quantisation keeps of a vector: as asked for, if so many equal parts can be made of it."""
    possible = [parts for parts in range(1, dimension + 1) if dimension % parts == 0]
    if codec_bytes is None:
        return max((parts for parts in possible if parts <= dimension / 4), default=1)
    if codec_bytes in possible:
        return codec_bytes
    below, above = (
        [parts for parts in possible if parts < codec_bytes],
        [parts for parts in possible if parts > codec_bytes],
    )
    nearest = " or ".join(str(parts) for parts in (*below[-1:], *above[:1]))
    raise UsageError(
        f"Vectors of {dimension} numbers cannot be cut into {codec_bytes} equal parts, a byte each. "
        f"Set codec_bytes to {nearest}."
    )
